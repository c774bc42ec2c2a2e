"""Competition for CPU cores: the wait of this job's threads for a core, and other processes that use the cores."""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from time import monotonic  # by name: a program's tests may replace those of `time`
from typing import NamedTuple

from lightning_gpu_tools.host import own_cores
from lightning_gpu_tools.processes import read_kernel_file
from lightning_gpu_tools.training.run_measurements import CoreUser
from lightning_gpu_tools.training.stacks import TICKS_PER_S
from lightning_gpu_tools.units import user_name

# Our defaults.
_INTERVAL_S = 1.0
_SCAN_SHARE = 0.01  # of the background thread's time, at most, for listing processes
_CONTENDED = 0.05  # half of the reporting threshold; below it, other processes are not listed
_MAX_USERS = 3  # in a report


class ThreadWait:
    """The time that a runnable thread of this process has waited for a core, from the kernel's schedstat.

    Time in which a cgroup's quota throttled the thread counts as well. A read takes about 2 µs.
    """

    def __init__(self) -> None:
        """Open the counters of the calling thread."""
        self._file, self.is_known = -1, False
        try:
            self._file = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)
        except OSError:  # a kernel or container without schedstat
            return
        self.is_known = int(os.pread(self._file, 96, 0).split()[0]) > 0  # a kernel that does not count writes zeros

    def seconds(self) -> float:
        """Return the seconds so far; 0 if unknown. Safe in any thread."""
        try:
            return int(os.pread(self._file, 96, 0).split()[1]) / 1e9 if self._file >= 0 else 0.0
        except OSError:  # the thread has ended
            return 0.0

    def close(self) -> None:
        """Close the counters."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)


def runnable_s() -> dict[int, float]:
    """Return the seconds that each thread of this process has run or waited for a core, by thread ID."""
    found = {}
    with_threads = os.path.isdir("/proc/self/task")  # not on macOS
    for thread in os.listdir("/proc/self/task") if with_threads else ():
        counts = read_kernel_file(f"/proc/self/task/{thread}/schedstat").split()
        if counts:
            found[int(thread)] = (int(counts[0]) + int(counts[1])) / 1e9
    return found


def added_s(before: dict[int, float], now: dict[int, float]) -> float:
    """Return the seconds that all threads together have added since ``before``."""
    return sum(seconds - before.get(thread, 0.0) for thread, seconds in now.items())


def pressure_s() -> float | None:
    """Return the seconds in which any thread of the machine waited for a core; ``None`` before Linux 4.20."""
    some = read_kernel_file("/proc/pressure/cpu").partition("total=")[2].split()
    return int(some[0]) / 1e6 if some else None


class _Process(NamedTuple):
    name: str
    parent: int
    cpu_s: float
    core: int  # the core on which it last ran
    started_ticks: int


class CoreUsers:
    """Totals of other processes' CPU time on this job's cores while the training thread waits for one.

    ``waited_s`` returns the thread's wait so far. ``own_pids`` returns this job's processes on the machine; their
    children also count as the job's.
    """

    def __init__(self, waited_s: Callable[[], float], own_pids: Callable[[], Iterable[int]]) -> None:
        self.found: tuple[CoreUser, ...] = ()
        self._waited_s, self._own_pids = waited_s, own_pids
        self._waited_before_s, self._polled_s = waited_s(), monotonic()
        self._before: dict[int, _Process] = {}
        self._before_s = self._watched_s = 0.0
        self._cpu_s: defaultdict[tuple[str, str], float] = defaultdict(float)

    def poll(self) -> float:
        """List the processes if the thread has been waiting, and return the seconds until the next poll."""
        began_s, waited_s = monotonic(), self._waited_s()
        is_contended = waited_s - self._waited_before_s > _CONTENDED * (began_s - self._polled_s)
        self._waited_before_s, self._polled_s = waited_s, began_s
        if not is_contended and not self._before:
            return _INTERVAL_S
        now = _processes()
        if self._before:
            self._add(now, began_s - self._before_s)
        self._before, self._before_s = now if is_contended else {}, began_s
        return max(_INTERVAL_S, (monotonic() - began_s) / _SCAN_SHARE)

    def _add(self, now: dict[int, _Process], elapsed_s: float) -> None:
        own, cores = _family(now, {os.getpid(), *self._own_pids()}), own_cores()
        self._watched_s += elapsed_s
        for pid, process in now.items():
            before = self._before.get(pid)
            is_same = before is not None and before.started_ticks == process.started_ticks
            cpu_s = process.cpu_s - before.cpu_s if before is not None and is_same else process.cpu_s
            if pid not in own and cpu_s > 0 and process.core in cores:
                self._cpu_s[_user_of(pid), process.name] += cpu_s
        self.found = tuple(
            CoreUser(user=user, name=name, cores=cpu_s / self._watched_s)
            for (user, name), cpu_s in sorted(self._cpu_s.items(), key=lambda item: -item[1])[:_MAX_USERS]
        )


def _processes() -> dict[int, _Process]:
    """Return the processes that this one may see, by PID."""
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            head, _, rest = read_kernel_file(f"/proc/{entry}/stat").rpartition(")")
            fields = rest.split()  # of proc_pid_stat(5), starting at the third
            if fields:
                cpu_s = (int(fields[11]) + int(fields[12])) / TICKS_PER_S
                name = head.partition("(")[2]
                found[int(entry)] = _Process(name, int(fields[1]), cpu_s, int(fields[36]), int(fields[19]))
    return found


def _family(processes: dict[int, _Process], pids: Collection[int]) -> set[int]:
    """Return these processes with all their descendants."""
    family = set(pids)
    while more := {pid for pid, one in processes.items() if one.parent in family} - family:
        family |= more
    return family


def _user_of(pid: int) -> str:
    try:
        return user_name(os.stat(f"/proc/{pid}").st_uid)
    except OSError:  # it has ended
        return "?"
