"""What a batch costs to load, measured where it is loaded: in the worker processes, or in this one."""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import _utils

# A choice: the last so many batches of each worker are kept.
_KEPT = 64
# Of each worker: how many batches it has loaded so far, when it was ready, and then pairs of wall and CPU seconds.
_COUNT, _READY_AT, _FIRST_PAIR = 0, 1, 2


class WorkerProbe:
    """Measures each fetch in the workers of one loader, in memory that they share with this process.

    Args:
        num_workers: How many workers there will be.

    Raises:
        OSError: There is no shared memory left for a few hundred bytes a worker.
        RuntimeError: Likewise, as torch puts it.
    """

    def __init__(self, num_workers: int) -> None:
        self._board = torch.zeros(num_workers, _FIRST_PAIR + 2 * _KEPT, dtype=torch.float64)
        self._board.share_memory_()  # type: ignore[no-untyped-call]
        self._began_at = time.monotonic()

    def init_fn(self, users: Callable[[int], None] | None) -> Callable[[int], None]:
        """Return a ``worker_init_fn`` that calls the user's, if there is one, and then starts to measure."""
        return functools.partial(_start_measuring, users, self._board)

    def forget(self) -> None:
        """Drop what was measured up to now."""
        # A worker may be writing its next row meanwhile: it costs one number of many.
        self._board[:, _COUNT] = 0

    @property
    def start_s(self) -> float | None:
        """How long it took until the last worker was up; ``None`` if one is not."""
        ready_at = self._board[:, _READY_AT]
        return None if (ready_at == 0).any() else max(0.0, float(ready_at.max()) - self._began_at)

    @property
    def wall_s(self) -> list[float]:
        """Wall time of each of the last fetches."""
        return [seconds for row in self._rows() for seconds in row[0::2]]

    @property
    def cpu_s(self) -> list[float]:
        """CPU time of each of them, all threads of the worker."""
        return [seconds for row in self._rows() for seconds in row[1::2]]

    def _rows(self) -> list[list[float]]:
        return [row[_FIRST_PAIR:][: 2 * min(int(row[_COUNT]), _KEPT)] for row in self._board.tolist()]


def spread(seconds: list[float]) -> float | None:
    """Return the 95th percentile over the median: how much slower than usual a slow batch is."""
    if len(seconds) < 2:
        return None
    ordered = sorted(seconds)
    middle = statistics.median(ordered)
    return ordered[math.ceil(0.95 * len(ordered)) - 1] / middle if middle > 0 else None


def _start_measuring(users: Callable[[int], None] | None, board: torch.Tensor, worker_id: int) -> None:
    """Run in a worker, before it makes the fetcher whose class this changes; no other process sees the change."""
    if users is not None:
        users(worker_id)
    row = board[worker_id]
    fetcher: Any = _utils.fetch._MapDatasetFetcher
    fetch = fetcher.fetch

    def measured(self: Any, index: Any) -> Any:
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        batch = fetch(self, index)
        wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
        count = int(row[_COUNT])
        place = _FIRST_PAIR + 2 * (count % _KEPT)
        row[place], row[place + 1] = wall_s, cpu_s
        row[_COUNT] = count + 1
        return batch

    fetcher.fetch = measured
    row[_READY_AT] = time.monotonic()
