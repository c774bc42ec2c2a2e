"""What torch's allocator counted when it failed, and what led to it.

torch calls a function of this module right then: when the error reaches a hook, much is free again.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections import deque
from collections.abc import Callable
from pathlib import Path
from statistics import median_high
from typing import NamedTuple
from weakref import WeakSet

import torch

from lightning_gpu_tools.training import compat
from lightning_gpu_tools.training.memory_counters import read_memory
from lightning_gpu_tools.training.memory_readings import MemoryReading
from lightning_gpu_tools.training.timeline import Timeline
from lightning_gpu_tools.units import printable

# Our defaults.
_EARLY_STEPS, _EVERY_STEPS = 64, 64  # all up to here, then every so many, are read when they begin, for 10 to 20 us
_MAX_POINTS = 200
_MAX_BATCHES = 101
_MAX_EVENTS = 100_000  # as in https://pytorch.org/blog/understanding-gpu-memory-1/


class AllocatorFailure(NamedTuple):
    """A moment at which torch's allocator has failed."""

    phase: str  # of the clock
    grad_enabled: bool  # in the thread that allocated
    reading: MemoryReading | None


class MemoryFailures:
    """Counts the failures of torch's allocator on a GPU, and keeps what explains the last one.

    ``phase`` returns what the training thread is doing.
    """

    def __init__(self, gpu: torch.device, phase: Callable[[], str]) -> None:
        self.count = 0  # the program or cuDNN may have gone on after each failure
        self.last: AllocatorFailure | None = None
        self.batch_shape: tuple[int, ...] | None = None  # of the first tensor of the batch in use
        self.snapshot: Path | None = None  # where to write torch's snapshot when the allocator fails
        self._gpu = gpu
        self._phase = phase
        self._can_read = True
        self._step_shape: tuple[int, ...] | None = None
        self._items: deque[int] = deque(maxlen=_MAX_BATCHES)
        self._begins = Timeline(_MAX_POINTS, 1.0)
        self._validation = Timeline(_MAX_POINTS, 1.0)

    def listen(self) -> None:
        """Be called when the allocator fails, if CUDA has begun."""
        global _is_attached
        attach = compat.out_of_memory_observer()
        if attach is None or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return
        _listening.add(self)
        if not _is_attached:  # once: it cannot be detached
            with contextlib.suppress(RuntimeError):  # cudaMallocAsync cannot do it
                attach(_allocator_failed)
                _is_attached = True

    def record_history(self, snapshot: Path) -> None:
        """Have torch record allocations with their stacks, and write them to a file when memory runs out."""
        if torch.cuda.is_initialized() and (record := compat.memory_recorder()) is not None:  # type: ignore[no-untyped-call]
            try:
                snapshot.parent.mkdir(parents=True, exist_ok=True)
                snapshot.unlink(missing_ok=True)  # of an earlier run
                record(max_entries=_MAX_EVENTS)
                self.snapshot = snapshot
            except (RuntimeError, OSError) as error:  # cudaMallocAsync has no history; the folder is not writable
                warnings.warn(f"memory_history=True has no effect: {printable(error, 300)}", stacklevel=2)

    def close(self) -> None:
        """Listen no more."""
        _listening.discard(self)
        if self.snapshot is not None and (record := compat.memory_recorder()) is not None:
            self.snapshot = None
            record(enabled=None)

    def begin_step(self, step: int, shape: tuple[int, ...] | None) -> None:
        """Note the batch of a training step that begins, and now and then what is in tensors."""
        if self._step_shape is not None:  # that step has come to its end
            self._items.append(math.prod(self._step_shape))
        self._step_shape = self.batch_shape = shape
        if step <= _EARLY_STEPS or step % _EVERY_STEPS == 0:
            self._read(self._begins, step)

    def begin_validation_batch(self, number: int, shape: tuple[int, ...] | None) -> None:
        """Note the same of a batch of validation; number 0 begins another validation."""
        self.batch_shape = shape
        if number == 0:
            self._validation = Timeline(_MAX_POINTS, 1.0)
        if number <= _EARLY_STEPS or number % _EVERY_STEPS == 0:
            self._read(self._validation, number)

    def _read(self, timeline: Timeline, number: int) -> None:
        reading = self.counted()
        if reading is not None:
            timeline.add(number, reading.allocated_bytes)

    def counted(self) -> MemoryReading | None:
        """Return what the allocator counts now."""
        if self._can_read:
            try:
                return read_memory(self._gpu)
            except Exception:  # noqa: BLE001 - as in MemoryCounters, which reports it
                self._can_read = False
        return None

    def note(self) -> None:
        """Note, in the thread that allocates and without the allocator's lock, that it has failed."""
        self.count += 1
        self.last = AllocatorFailure(self._phase(), torch.is_grad_enabled(), self.counted())
        if self.snapshot is not None and (dump := compat.memory_dumper()) is not None:
            dump(str(self.snapshot))

    @property
    def usual_items(self) -> float | None:
        """Median size of the first tensor of a batch, in numbers, over steps that came to their end."""
        return float(median_high(self._items)) if self._items else None

    @property
    def begins(self) -> list[tuple[float, float]]:
        """(step, bytes in tensors when it began), oldest first."""
        return self._begins.points()

    @property
    def validation_begins(self) -> list[tuple[float, float]]:
        """(batch, bytes in tensors when it began) of the last validation."""
        return self._validation.points()


_listening: WeakSet[MemoryFailures] = WeakSet()
_is_attached = False


def _allocator_failed(device: int, requested_bytes: int, total_bytes: int, free_bytes: int) -> None:
    for failures in list(_listening):
        if failures._gpu.index in (None, device):
            with contextlib.suppress(Exception):  # which would take the place of torch's own error
                failures.note()
