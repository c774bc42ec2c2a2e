"""Watches a DataLoader's workers: do they wait for storage, and does one of them hold up the others?"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer

from lightning_gpu_tools.training.run_measurements import LoadingFacts

_PROC = Path("/proc")
_INTERVAL_S = 1.0
# A choice: the points at which it is known how much has been read from storage; when they are used up, every second
# one goes.
_MOST_POINTS = 60
# In /proc/<pid>/stat the state is the first field behind the name, which may hold anything.
_WAITS_FOR_STORAGE = "D"
# A choice: a wait for data of less than a millisecond is none; the diagnosis draws the same line.
LONG_WAIT_S = 0.001


class WorkerWatch:
    """Looks at the workers of a Trainer's training loader when it is told to.

    Where the system or a future version of torch does not tell what is looked for, that stays unknown.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._due_s = 0.0
        self._looks = self._states = self._waiting = 0
        self._ready_share = 0.0
        self._long_waits = 0
        self._ready_looks = self._ready = 0
        self._runs: dict[int, tuple[float, float, float]] = {}  # of each worker: when, seconds run, seconds delayed
        self._ran_s = self._delayed_s = self._watched_s = 0.0
        self._read_bytes: dict[int, int] = {}
        self._points: list[tuple[int, int]] = []  # steps done, bytes read from storage

    def after_long_wait(self) -> None:
        """Take in how many batches lay ready when one that had been waited for came; right after that step."""
        loader = self._iterator()
        ordered = getattr(loader, "_task_info", None)
        if not ordered or len(getattr(loader, "_workers", ())) < 2:
            return
        # torch keeps a batch that comes before its turn beside the number of its worker.
        ready = sum(1 for entry in ordered.values() if len(entry) == 2)
        self._long_waits += 1
        self._ready_share += ready / len(ordered)

    def before_fetch(self) -> None:
        """Take in whether a batch lies ready for the step that comes."""
        queue = getattr(self._iterator(), "_data_queue", None)
        if queue is not None:
            try:
                self._ready += queue.qsize() > 0
            except NotImplementedError:  # macOS
                return
            self._ready_looks += 1

    def _watch_cpu(self, pid: int, now_s: float) -> None:
        """Add up for how long a worker has computed, and for how long it wanted to and no core was free."""
        now = _run_and_delay_s(pid)
        before = self._runs.get(pid)
        if now is not None:
            self._runs[pid] = now_s, *now
            if before is not None:
                self._watched_s += now_s - before[0]
                self._ran_s += now[0] - before[1]
                self._delayed_s += now[1] - before[2]

    def look(self, steps: int) -> None:
        """Look at what the workers do, but not more often than once a second; costs some 50 us a worker."""
        now_s = time.monotonic()
        if now_s < self._due_s:
            return
        self._due_s = now_s + _INTERVAL_S
        pids = [worker.pid for worker in getattr(self._iterator(), "_workers", ()) if worker.pid]
        for pid in pids:
            state = _state(pid)
            self._states += state is not None
            self._waiting += state == _WAITS_FOR_STORAGE
            self._watch_cpu(pid, now_s)
        self._looks += bool(pids)
        for pid in pids or [os.getpid()]:
            read = _storage_bytes(pid)
            if read is not None:
                self._read_bytes[pid] = read
        self._points.append((steps, sum(self._read_bytes.values())))
        if len(self._points) > _MOST_POINTS:
            self._points = self._points[::2]

    def facts(self) -> LoadingFacts:
        """Return what was seen so far."""
        early, late = self._early_and_late()
        return LoadingFacts(
            looks=self._looks,
            storage_wait_share=self._waiting / self._states if self._states else None,
            ready_out_of_order_share=self._ready_share / self._long_waits if self._long_waits else None,
            long_waits=self._long_waits,
            ready_share=self._ready / self._ready_looks if self._ready_looks else None,
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

    def _iterator(self) -> Any:
        """Return the iterator of the first training loader; ``None`` where Lightning keeps it elsewhere."""
        fetcher = getattr(self._trainer.fit_loop, "_data_fetcher", None)
        combined = getattr(fetcher, "_combined_loader", None)
        iterators = getattr(getattr(combined, "_iterator", None), "iterators", None)
        return iterators[0] if iterators else None


def _slope(begin: tuple[int, int], end: tuple[int, int]) -> float | None:
    steps = end[0] - begin[0]
    return (end[1] - begin[1]) / steps if steps > 0 else None


def _state(pid: int) -> str | None:
    try:
        return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):  # it has ended, or this is not Linux
        return None


def _run_and_delay_s(pid: int) -> tuple[float, float] | None:
    """Return how long a process has run and how long it has waited for a core; see the kernel's sched-stats.rst."""
    try:
        ran_ns, delayed_ns, _ = (_PROC / str(pid) / "schedstat").read_text().split()
    except (OSError, ValueError):  # it has ended, or this kernel does not count it
        return None
    return int(ran_ns) / 1e9, int(delayed_ns) / 1e9


def _storage_bytes(pid: int) -> int | None:
    try:
        lines = (_PROC / str(pid) / "io").read_text().splitlines()
    except OSError:  # it has ended, this is not Linux, or the file is nobody's to read
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("read_bytes:")), None)
