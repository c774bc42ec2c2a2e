"""The use of this job's CPU cores: by the job, its loader's workers and other processes, and waits for a core."""

import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from time import monotonic, perf_counter  # by name: a program's tests may replace those of `time`
from typing import NamedTuple

import torch

from lightning_gpu_tools.background import SafeReader
from lightning_gpu_tools.host import HostBudget, children_cpu_s, cores_in_reach, idle_cpu_s, read_host_budget
from lightning_gpu_tools.processes import ProcessStat, process_stat
from lightning_gpu_tools.training import compat
from lightning_gpu_tools.training.run_measurements import CoreFacts, CoreUser, LoadingFacts, StepBlock
from lightning_gpu_tools.training.stacks import ThreadTimes, added_times, io_counters, thread_times
from lightning_gpu_tools.units import user_name

# Our defaults.
_INTERVAL_S = 1.0
_SCAN_SHARE = 0.01  # of the background thread's time, at most, for listing processes or threads
_CONTENDED = 0.05  # half of the reporting threshold; below it, other processes are not listed
_MAX_POINTS = 60  # of bytes read from storage; beyond that, every second point is dropped
LONG_WAIT_S = 0.001  # shorter waits for data do not count, here and in the diagnosis


class ThreadWait:
    """The time that a runnable thread of this process has waited for a core, from the kernel's schedstat.

    Time in which a cgroup's quota throttled the thread counts as well. A read takes about 2 µs.
    """

    def __init__(self) -> None:
        self.is_known: bool | None = None  # whether the kernel counts; None before the counters are opened
        self._file = -1

    def open(self) -> None:
        """Open the counters of the calling thread."""
        self.is_known = False
        with suppress(OSError):  # a kernel or container without schedstat
            self._file = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)
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


class CoreUsers:
    """Who uses this job's cores while the training thread waits for one: other programs, and its own children.

    Children are descendants of this process that are not workers of a loader.

    ``waited_s`` returns the thread's wait so far, ``rank_pids`` the processes of this job's ranks on the machine, whose
    descendants count as the job's, and ``worker_pids`` the workers of this process.
    """

    def __init__(
        self,
        waited_s: Callable[[], float],
        rank_pids: Callable[[], Iterable[int]],
        worker_pids: Callable[[], Iterable[int]],
    ) -> None:
        self._waited_s, self._rank_pids, self._worker_pids = waited_s, rank_pids, worker_pids
        self._polled = monotonic(), waited_s()
        self._before: dict[int, ProcessStat] = {}
        self._watched_s = 0.0
        # By user and name; children have no user.
        self._used_s: defaultdict[tuple[str, str], float] = defaultdict(float)

    @property
    def other(self) -> CoreUser | None:
        """The program of others that used the cores most."""
        return self._user(is_child=False)

    @property
    def children(self) -> CoreUser | None:
        """All children together, with the name of those that used the cores most."""
        return self._user(is_child=True)

    def _user(self, *, is_child: bool) -> CoreUser | None:
        used_s = {of: seconds for of, seconds in self._used_s.copy().items() if is_child == (not of[0])}
        if not used_s:
            return None
        user, name = max(used_s, key=used_s.__getitem__)
        seconds = sum(used_s.values()) if is_child else used_s[user, name]
        return CoreUser(user=user, name=name, cores=seconds / self._watched_s)

    def poll(self) -> float:
        """List the processes if the thread has been waiting, and return the seconds until the next poll."""
        now_s, waited_s = monotonic(), self._waited_s()
        elapsed_s, added_s = now_s - self._polled[0], waited_s - self._polled[1]
        before, self._before, self._polled = self._before, {}, (now_s, waited_s)
        if added_s <= _CONTENDED * elapsed_s:
            return _INTERVAL_S
        pids = map(int, filter(str.isdecimal, os.listdir("/proc")))
        self._before = {pid: stat for pid in pids if (stat := process_stat(pid)) is not None}
        if before:
            self._watched_s += elapsed_s
            self._add(before, self._before)
        return max(_INTERVAL_S, (monotonic() - now_s) / _SCAN_SHARE)

    def _add(self, before: dict[int, ProcessStat], now: dict[int, ProcessStat]) -> None:
        this, ranks, cores = os.getpid(), {*self._rank_pids()}, os.sched_getaffinity(0)
        of_job = _family(now, {this, *ranks})
        children = _family(now, {this}) - _family(now, ranks - {this}) - {this, *self._worker_pids()}
        for pid, process in now.items():
            earlier = before.get(pid)
            is_same = earlier is not None and earlier.started_ticks == process.started_ticks
            cpu_s = process.cpu_s - earlier.cpu_s if earlier is not None and is_same else process.cpu_s
            if cpu_s <= 0 or process.core not in cores or pid in of_job - children:
                continue
            with suppress(OSError):  # it has ended
                user = "" if pid in children else user_name(os.stat(f"/proc/{pid}").st_uid)
                self._used_s[user, process.name] += cpu_s


def _family(processes: dict[int, ProcessStat], pids: Collection[int]) -> set[int]:
    """Return these processes with all their descendants."""
    family = set(pids)
    while more := {pid for pid, one in processes.items() if one.parent in family} - family:
        family |= more
    return family


class HostReading(NamedTuple):
    """The state of the host at one moment; CPU times are counters."""

    at_s: float  # by perf_counter
    budget: HostBudget
    own_cpu_s: float
    children_cpu_s: float | None
    idle_cpu_s: float | None  # while its cores were idle
    threads: dict[int, ThreadTimes]  # of this process


class CoreUse:
    """The use of this job's cores since training began."""

    def __init__(self, users: CoreUsers, reader: SafeReader, *, local_ranks: int) -> None:
        self.users = users
        self._reader = reader
        self._local_ranks = local_ranks
        self.began = self.read()
        self._ahead: HostReading | None = None

    def read_ahead(self) -> None:
        """Read the state of the host for the next measurement, in another thread."""
        self._ahead = self.read()

    def latest(self) -> HostReading:
        """Return the state that was read ahead, once, or else read it."""
        ahead, self._ahead = self._ahead, None
        return ahead or self.read()

    def read(self) -> HostReading:
        """Read the state of the host, in any thread; takes some milliseconds."""
        read, ranks = self._reader.read, self._local_ranks
        without_limit = HostBudget(
            cores=os.cpu_count() or 1, memory_available_bytes=sys.maxsize, shm_free_bytes=None, local_ranks=ranks
        )
        return HostReading(
            at_s=perf_counter(),
            budget=read("the host's cores and memory", partial(read_host_budget, local_ranks=ranks), without_limit),
            own_cpu_s=time.process_time(),
            children_cpu_s=read("the workers' CPU time", children_cpu_s, None),
            idle_cpu_s=read("the idle time of the cores", idle_cpu_s, None),
            threads=read("the runnable threads", thread_times, {}),
        )

    def facts(
        self, now: HostReading, steady: StepBlock, workers: int, loading: LoadingFacts, *, knows_core_wait: bool
    ) -> CoreFacts | None:
        """Return the use of the cores up to ``now``, given the steady steps; ``None`` if it cannot be counted."""
        began, elapsed_s = self.began, now.at_s - self.began.at_s
        by_children = growth_per(elapsed_s, began.children_cpu_s, now.children_cpu_s)
        idle = growth_per(elapsed_s, began.idle_cpu_s, now.idle_cpu_s)
        if by_children is None or idle is None:
            return None
        used = self._local_ranks * ((now.own_cpu_s - began.own_cpu_s) / elapsed_s + by_children)
        affinity = len(os.sched_getaffinity(0))
        of_workers = workers * (loading.runnable_threads or 0.0)
        runnable = sum(added_times(began.threads, now.threads)) / elapsed_s + of_workers
        return CoreFacts(
            wait_share=steady.core_wait_s / steady.wall_s if steady.steps and knows_core_wait else None,
            others_cores=max(0.0, affinity - used - idle),
            affinity_cores=affinity,
            machine_cores=os.cpu_count() or 1,
            runnable_threads=self._local_ranks * runnable,
            torch_threads=torch.get_num_threads(),
            other=self.users.other,
            children=self.users.children,
        )


def in_reach(budget: HostBudget, use: CoreFacts | None) -> HostBudget:
    """Return what this job may use, with how many cores it could use while other programs and children run."""
    if use is None:
        return budget
    by_children = 0.0 if use.children is None else use.children.cores
    left = use.affinity_cores - use.others_cores - by_children
    return replace(budget, cores_in_reach=cores_in_reach(budget.cores, left))


def growth_per(amount: float, before: float | None, now: float | None) -> float | None:
    """Return the growth of a counter per unit of ``amount``; ``None`` if the counter cannot be read."""
    return None if now is None or before is None else (now - before) / amount


class WorkerWatch:
    """A sampler of a DataLoader's workers: whether they compute, wait for a core or storage, or delay each other.

    It finds them through the iterator in use.
    """

    def __init__(self, iterator: Callable[[], object], steps: Callable[[], int]) -> None:
        """``steps`` returns the number of steps so far."""
        self.pids: set[int] = set()  # of all workers seen so far
        self._iterator = iterator
        self._steps = steps
        self._states = self._waiting = 0
        self._ready_share = 0.0
        self._long_waits = 0
        self._ready_polls = self._ready = 0
        self._sampled_s = 0.0
        self._threads: dict[int, dict[int, ThreadTimes]] = {}  # by worker, at that time
        self._ran_s = self._delayed_s = self._watched_s = 0.0  # of main threads
        self._runnable_s = self._busy_s = 0.0  # of all threads
        self._read_bytes: dict[int, int] = {}
        self._storage_points: list[tuple[int, int]] = []  # steps done, and bytes read from storage until then

    # In the training thread

    def after_long_wait(self) -> None:
        """Count how many other batches were ready after a step that waited for its batch."""
        iterator = self._iterator()
        ready_share = compat.ready_share(iterator)
        if ready_share is not None and len(compat.worker_pids(iterator)) > 1:
            self._long_waits += 1
            self._ready_share += ready_share

    def after_step(self) -> None:
        """Count whether a batch is ready."""
        ready = compat.is_batch_ready(self._iterator())
        if ready is not None:
            self._ready_polls += 1
            self._ready += ready

    # In the background

    def poll(self) -> float:
        """Sample the workers, and return the seconds until the next poll."""
        now_s, before_s, before = monotonic(), self._sampled_s, self._threads
        pids = compat.worker_pids(self._iterator())
        self.pids = self.pids | set(pids)  # a new set, because another thread may iterate over the old one
        states = [stat.state for stat in map(process_stat, pids) if stat is not None]
        self._states += len(states)
        self._waiting += states.count("D")
        for pid in pids or [os.getpid()]:
            self._read_bytes[pid] = io_counters(pid).get("read_bytes", self._read_bytes.get(pid, 0))
        self._storage_points.append((self._steps(), sum(self._read_bytes.values())))
        if len(self._storage_points) > _MAX_POINTS:
            self._storage_points = self._storage_points[::2]
        self._threads, self._sampled_s = {pid: thread_times(pid) for pid in pids}, now_s
        for pid, threads in self._threads.items():
            earlier = before.get(pid, {})
            if pid in threads and pid in earlier:  # its main thread: it has not ended, and the kernel counts
                added = added_times(earlier, threads)
                self._watched_s += now_s - before_s
                self._busy_s += added.ran_s
                self._runnable_s += sum(added)
                self._ran_s += threads[pid].ran_s - earlier[pid].ran_s
                self._delayed_s += threads[pid].delayed_s - earlier[pid].delayed_s
        return max(_INTERVAL_S, (monotonic() - now_s) / _SCAN_SHARE)

    def facts(self) -> LoadingFacts:
        """Return the observations so far."""
        points = self._storage_points
        third = len(points) // 3
        return LoadingFacts(
            storage_wait_share=self._waiting / self._states if self._states else None,
            ready_out_of_order_share=self._ready_share / self._long_waits if self._long_waits else None,
            long_waits=self._long_waits,
            ready_share=self._ready / self._ready_polls if self._ready_polls else None,
            runnable_share=(self._ran_s + self._delayed_s) / self._watched_s if self._watched_s else None,
            delayed_share=self._delayed_s / self._watched_s if self._watched_s else None,
            runnable_threads=self._runnable_s / self._watched_s if self._watched_s else None,
            worker_cores=self._busy_s / self._watched_s if self._watched_s else None,
            early_storage_bytes_per_batch=_slope(points[: third + 1]),
            late_storage_bytes_per_batch=_slope(points[-1 - third :]),
        )


def _slope(points: list[tuple[int, int]]) -> float | None:
    steps = points[-1][0] - points[0][0] if points else 0
    return (points[-1][1] - points[0][1]) / steps if steps > 0 else None
