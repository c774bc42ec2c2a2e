"""Sampling of a DataLoader's workers: whether they compute, wait for a core or storage, or delay each other."""

from __future__ import annotations

import os
from collections.abc import Callable
from time import monotonic  # by name: a program's tests may replace those of `time`

from lightning_gpu_tools.training import compat, stacks
from lightning_gpu_tools.training.cores import SCAN_SHARE
from lightning_gpu_tools.training.run_measurements import MANY_THREADS, LoadingFacts

_INTERVAL_S = 1.0
# Our defaults.
_MAX_POINTS = 60  # of bytes read from storage; beyond that, every second point is dropped
LONG_WAIT_S = 0.001  # shorter waits for data do not count, here and in the diagnosis


class WorkerWatch:
    """A sampler of the workers of a DataLoader, found through the iterator in use."""

    def __init__(self, iterator: Callable[[], object]) -> None:
        self.pids: set[int] = set()  # of all workers seen so far
        self.unseen: set[str] | None = None  # torch names that no poll has found; there may have been no workers
        self._iterator = iterator
        self._due_s = 0.0
        self._polls = self._states = self._waiting = 0
        self._ready_share = 0.0
        self._long_waits = 0
        self._ready_polls = self._ready = 0
        self._sampled_s = 0.0
        self._threads: dict[int, dict[int, stacks.ThreadTimes]] = {}  # by worker, at that time
        self._ran_s = self._delayed_s = self._watched_s = 0.0  # of main threads
        self._runnable_s = self._busy_s = 0.0  # of all threads
        self._pool_library: str | None = None  # empty: a worker had many runnable threads without OpenCV
        self._read_bytes: dict[int, int] = {}
        self.storage_points: list[tuple[int, int]] = []  # steps done, and bytes read from storage until then

    def after_long_wait(self) -> None:
        """Count how many other batches were ready after a step that waited for its batch."""
        iterator = self._iterator()
        ready_share = compat.ready_share(iterator)
        if ready_share is not None and len(compat.worker_pids(iterator)) > 1:
            self._long_waits += 1
            self._ready_share += ready_share

    def poll(self, steps: int) -> None:
        """Count whether a batch is ready, and at most once a second sample the workers in 50 µs each."""
        ready = compat.is_batch_ready(self._iterator())
        if ready is not None:
            self._ready_polls += 1
            self._ready += ready
        now_s = monotonic()
        if now_s < self._due_s:
            return
        self._due_s = now_s + _INTERVAL_S
        iterator = self._iterator()
        missing = compat.missing_of_iterator(iterator)
        self.unseen = missing if self.unseen is None else self.unseen & missing
        pids = compat.worker_pids(iterator)
        self.pids.update(pids)
        self._polls += bool(pids)
        for pid in pids or [os.getpid()]:
            fields, counters = stacks.stat_fields(pid) if pids else [], stacks.io_counters(pid)
            if "read_bytes" in counters:
                self._read_bytes[pid] = counters["read_bytes"]
            if fields:
                self._states += 1
                self._waiting += fields[0] == "D"
        self.storage_points.append((steps, sum(self._read_bytes.values())))
        if len(self.storage_points) > _MAX_POINTS:
            self.storage_points = self.storage_points[::2]

    def poll_threads(self) -> float:
        """Sample the workers' threads, in any thread, and return the seconds until the next poll."""
        now_s, before_s, before = monotonic(), self._sampled_s, self._threads
        self._threads = {pid: stacks.thread_times(pid) for pid in compat.worker_pids(self._iterator())}
        self._sampled_s = now_s
        elapsed_s = now_s - before_s
        for pid in self._threads.keys() & before.keys():
            earlier, now = before[pid], self._threads[pid]
            if pid not in earlier or pid not in now:  # its main thread: it has ended, or the kernel does not count
                continue
            added = stacks.added_times(earlier, now)
            self._watched_s += elapsed_s
            self._busy_s += added.ran_s
            self._runnable_s += sum(added)
            self._ran_s += now[pid].ran_s - earlier[pid].ran_s
            self._delayed_s += now[pid].delayed_s - earlier[pid].delayed_s
            if self._pool_library is None and sum(added) > MANY_THREADS * elapsed_s:
                self._pool_library = "cv2" if "/cv2/" in stacks.read_proc(pid, "maps") else ""
        return max(_INTERVAL_S, (monotonic() - now_s) / SCAN_SHARE)

    def facts(self) -> LoadingFacts:
        """Return the observations so far."""
        third = len(self.storage_points) // 3
        return LoadingFacts(
            samples=self._polls,
            storage_wait_share=self._waiting / self._states if self._states else None,
            ready_out_of_order_share=self._ready_share / self._long_waits if self._long_waits else None,
            long_waits=self._long_waits,
            ready_share=self._ready / self._ready_polls if self._ready_polls else None,
            runnable_share=(self._ran_s + self._delayed_s) / self._watched_s if self._watched_s else None,
            delayed_share=self._delayed_s / self._watched_s if self._watched_s else None,
            runnable_threads=self._runnable_s / self._watched_s if self._watched_s else None,
            worker_cores=self._busy_s / self._watched_s if self._watched_s else None,
            pool_library=self._pool_library or None,
            early_storage_bytes_per_batch=_slope(self.storage_points[: third + 1]),
            late_storage_bytes_per_batch=_slope(self.storage_points[-1 - third :]),
        )


def _slope(points: list[tuple[int, int]]) -> float | None:
    steps = points[-1][0] - points[0][0] if points else 0
    return (points[-1][1] - points[0][1]) / steps if steps > 0 else None
