"""Watches a DataLoader's workers: do they wait for storage, and does one of them hold up the others?"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from lightning_gpu_tools.training import compat
from lightning_gpu_tools.training.run_measurements import LoadingFacts

_PROC = Path("/proc")
_INTERVAL_S = 1.0
# Our default: the points at which it is known how much has been read from storage; when they are used up, every second
# one goes.
_MAX_POINTS = 60
# In /proc/<pid>/stat the state is the first field behind the name, which may hold anything.
_WAITS_FOR_STORAGE = "D"
# Our default: a wait for data of less than a millisecond is none; the diagnosis draws the same line.
LONG_WAIT_S = 0.001


class WorkerWatch:
    """Samples what the workers of a DataLoader do, by the iterator that is in use, if it can be known.

    Where the system or a future version of torch does not report something, that stays unknown.

    Attributes:
        unseen: Those names of torch's that no poll has found since this was ``None``; of a loader without workers that
            is all of them.
    """

    def __init__(self, iterator: Callable[[], object]) -> None:
        self.unseen: set[str] | None = None
        self._iterator = iterator
        self._due_s = 0.0
        self._polls = self._states = self._waiting = 0
        self._ready_share = 0.0
        self._long_waits = 0
        self._ready_polls = self._ready = 0
        self._runs: dict[int, tuple[float, float, float]] = {}  # of each worker: when, seconds run, seconds delayed
        self._ran_s = self._delayed_s = self._watched_s = 0.0
        self._read_bytes: dict[int, int] = {}
        self._points: list[tuple[int, int]] = []  # steps done, bytes read from storage

    def after_long_wait(self) -> None:
        """Count how many batches lay ready when one that had been waited for came; right after that step."""
        iterator = self._iterator()
        if len(compat.worker_pids(iterator) or ()) < 2:
            return
        ready_share = compat.ready_share(iterator)
        if ready_share is not None:
            self._long_waits += 1
            self._ready_share += ready_share

    def before_fetch(self) -> None:
        """Count whether a batch lies ready for the step that comes."""
        ready = compat.is_batch_ready(self._iterator())
        if ready is not None:
            self._ready_polls += 1
            self._ready += ready

    def poll(self, steps: int) -> None:
        """Sample the workers, but not more often than once a second; costs some 50 us a worker."""
        now_s = time.monotonic()
        if now_s < self._due_s:
            return
        self._due_s = now_s + _INTERVAL_S
        iterator = self._iterator()
        missing = compat.missing_of_iterator(iterator)
        self.unseen = missing if self.unseen is None else self.unseen & missing
        pids = compat.worker_pids(iterator) or []
        for pid in pids:
            state = _state(pid)
            self._states += state is not None
            self._waiting += state == _WAITS_FOR_STORAGE
            self._add_cpu(pid, now_s)
        self._polls += bool(pids)
        for pid in pids or [os.getpid()]:
            read = _storage_bytes(pid)
            if read is not None:
                self._read_bytes[pid] = read
        self._points.append((steps, sum(self._read_bytes.values())))
        if len(self._points) > _MAX_POINTS:
            self._points = self._points[::2]

    def _add_cpu(self, pid: int, now_s: float) -> None:
        """Add up for how long a worker has computed, and for how long it wanted to and no core was free."""
        now = _run_and_delay_s(pid)
        before = self._runs.get(pid)
        if now is not None:
            self._runs[pid] = now_s, *now
            if before is not None:
                self._watched_s += now_s - before[0]
                self._ran_s += now[0] - before[1]
                self._delayed_s += now[1] - before[2]

    def facts(self) -> LoadingFacts:
        """Return what was seen so far."""
        early, late = self._early_and_late()
        return LoadingFacts(
            samples=self._polls,
            storage_wait_share=self._waiting / self._states if self._states else None,
            ready_out_of_order_share=self._ready_share / self._long_waits if self._long_waits else None,
            long_waits=self._long_waits,
            ready_share=self._ready / self._ready_polls if self._ready_polls else None,
            runnable_share=(self._ran_s + self._delayed_s) / self._watched_s if self._watched_s else None,
            delayed_share=self._delayed_s / self._watched_s if self._watched_s else None,
            early_storage_bytes_per_batch=early,
            late_storage_bytes_per_batch=late,
        )

    def _early_and_late(self) -> tuple[float | None, float | None]:
        third = len(self._points) // 3
        if third < 1:
            return None, None
        return _slope(self._points[0], self._points[third]), _slope(self._points[-1 - third], self._points[-1])


def _slope(begin: tuple[int, int], end: tuple[int, int]) -> float | None:
    steps = end[0] - begin[0]
    return (end[1] - begin[1]) / steps if steps > 0 else None


def _proc(pid: int, name: str) -> str:
    """Return what the kernel says of a process; nothing if it has ended, if it is private, or if this is not Linux."""
    try:
        return (_PROC / str(pid) / name).read_text()
    except OSError:
        return ""


def _state(pid: int) -> str | None:
    fields = _proc(pid, "stat").rpartition(")")[2].split()
    return fields[0] if fields else None


def _run_and_delay_s(pid: int) -> tuple[float, float] | None:
    """Return how long a process has run and how long it has waited for a core; see the kernel's sched-stats.rst."""
    counts = _proc(pid, "schedstat").split()
    return (int(counts[0]) / 1e9, int(counts[1]) / 1e9) if counts else None


def _storage_bytes(pid: int) -> int | None:
    lines = _proc(pid, "io").splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith("read_bytes:")), None)
