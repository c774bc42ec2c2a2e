"""Competition for CPU cores: the wait of this job's threads for a core, and other processes that use the cores."""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from time import monotonic  # by name: a program's tests may replace those of `time`
from typing import NamedTuple

from lightning_gpu_tools.host import own_cores
from lightning_gpu_tools.processes import TICKS_PER_S, read_kernel_file
from lightning_gpu_tools.training.run_measurements import CoreUser
from lightning_gpu_tools.units import user_name

# Our defaults.
_INTERVAL_S = 1.0
SCAN_SHARE = 0.01  # of the background thread's time, at most, for listing processes
_CONTENDED = 0.05  # half of the reporting threshold; below it, other processes are not listed


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


class _Process(NamedTuple):
    name: str
    parent: int
    cpu_s: float
    core: int  # the core on which it last ran
    started_ticks: int


class CoreUsers:
    """The CPU time on this job's cores while the training thread waits for one: of other programs, and of children.

    Children are this process's descendants that are not workers of a loader.

    ``waited_s`` returns the thread's wait so far. ``rank_pids`` returns the processes of this job's ranks on the
    machine, and ``worker_pids`` the workers of this process. The descendants of ranks also count as the job's.
    """

    def __init__(
        self,
        waited_s: Callable[[], float],
        rank_pids: Callable[[], Iterable[int]],
        worker_pids: Callable[[], Iterable[int]],
    ) -> None:
        self._waited_s, self._rank_pids, self._worker_pids = waited_s, rank_pids, worker_pids
        self._waited_before_s, self._polled_s = waited_s(), monotonic()
        self._before: dict[int, _Process] = {}
        self._before_s = self._watched_s = 0.0
        self._of_others: defaultdict[tuple[str, str], float] = defaultdict(float)  # seconds by user and name
        self._of_children: defaultdict[str, float] = defaultdict(float)  # seconds by name

    @property
    def other(self) -> CoreUser | None:
        """The program of others that used the cores most."""
        used_s = dict(self._of_others)
        if not used_s:
            return None
        user, name = max(used_s, key=lambda program: used_s[program])
        return CoreUser(user=user, name=name, cores=used_s[user, name] / self._watched_s)

    @property
    def children(self) -> CoreUser | None:
        """All children together, with the name of those that used the cores most."""
        used_s = dict(self._of_children)
        if not used_s:
            return None
        name = max(used_s, key=lambda name: used_s[name])
        return CoreUser(user="", name=name, cores=sum(used_s.values()) / self._watched_s)

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
        return max(_INTERVAL_S, (monotonic() - began_s) / SCAN_SHARE)

    def _add(self, now: dict[int, _Process], elapsed_s: float) -> None:
        this, ranks, cores = os.getpid(), {*self._rank_pids()}, own_cores()
        of_job = _family(now, {this, *ranks})
        children = _family(now, {this}) - _family(now, ranks - {this}) - {this, *self._worker_pids()}
        self._watched_s += elapsed_s
        for pid, process in now.items():
            before = self._before.get(pid)
            is_same = before is not None and before.started_ticks == process.started_ticks
            cpu_s = process.cpu_s - before.cpu_s if before is not None and is_same else process.cpu_s
            if cpu_s <= 0 or process.core not in cores:
                continue
            if pid in children:
                self._of_children[process.name] += cpu_s
            elif pid not in of_job:
                self._of_others[_user_of(pid), process.name] += cpu_s


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
