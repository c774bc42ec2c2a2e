"""The state of torch's allocator when it failed, and the events before the failure.

torch calls a function of this module at the failure. By the time the error reaches a hook, much memory is free again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from typing import NamedTuple
from weakref import WeakSet

import torch

from lightning_gpu_tools.gpus.timeline import Timeline
from lightning_gpu_tools.training import compat
from lightning_gpu_tools.training.memory_counters import read_memory
from lightning_gpu_tools.training.memory_lines import MemoryRecorder, by_line, live_blocks
from lightning_gpu_tools.training.memory_readings import MemoryLine, MemoryReading

# Our defaults.
_EARLY_STEPS, _EVERY_STEPS = 64, 64  # reads at the start of the first steps, then of one step in 64; 10 to 20 µs each
_MAX_POINTS = 200
_RECORDED_BATCHES = 3  # of each validation, whose blocks are recorded with their lines


class AllocatorFailure(NamedTuple):
    """A failure of torch's allocator."""

    phase: str  # by the clock
    grad_enabled: bool | None  # in the allocating thread; None if unknown
    reading: MemoryReading | None
    lines: tuple[MemoryLine, ...] = ()  # of the blocks in use that were recorded


class MemoryFailures:
    """A count of the failures of torch's allocator on a GPU, and the facts that explain the last one.

    ``phase`` returns the current phase of the training thread.
    """

    def __init__(self, gpu: torch.device, phase: Callable[[], str]) -> None:
        self.count = 0  # the program or cuDNN may have continued after each failure
        self.last: AllocatorFailure | None = None
        self.batch_shape: tuple[int, ...] | None = None  # of the first tensor of the batch in use
        self.batch_bytes = 0  # on the GPU, of the last batch at whose start the bytes in tensors were read
        self.next_step = 0  # the next one to read at its start
        self._gpu = gpu
        self._phase = phase
        self._can_read = True
        self.usual: Callable[[], Collection[int]] = tuple  # addresses of blocks that belong to the optimizers
        self._validations = 0
        self._recorder = MemoryRecorder()
        self.begins = Timeline(_MAX_POINTS, 1.0)  # bytes in tensors at the start of steps
        self.validation_begins = Timeline(_MAX_POINTS, 1.0)  # the same for the batches of the last validation

    def listen(self) -> None:
        """Register for failures of the allocator, if CUDA has started."""
        global _is_attached
        attach = compat.out_of_memory_observer()
        if attach is None or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return
        _listening.add(self)
        if not _is_attached:  # only once, because it cannot be detached
            with contextlib.suppress(RuntimeError):  # not supported by cudaMallocAsync
                attach(_allocator_failed)
                _is_attached = True

    def close(self) -> None:
        """Stop listening for failures and recording."""
        _listening.discard(self)
        self._recorder.stop()

    def begin_step(self, step: int, shape: tuple[int, ...] | None, batch_bytes: Callable[[], int]) -> None:
        """Record the batch of a training step at its start, and in some steps the bytes in tensors and in the batch."""
        self.end_validation()  # of the batches before training
        self.batch_shape = shape
        if step >= self.next_step:
            self.next_step = step + (1 if step < _EARLY_STEPS else _EVERY_STEPS)
            self._read(self.begins, step, batch_bytes)

    def enter(self, phase: str) -> None:
        """Begin a validation, or training after it. A loop may not report the batches of a validation."""
        self.end_validation()
        if phase != "validation":
            return
        self.batch_shape = None
        self.validation_begins = Timeline(_MAX_POINTS, 1.0)
        self._validations += 1
        if self._validations.bit_count() == 1:
            self._recorder.start("state")

    def end_validation(self) -> None:
        """End the record of blocks, because a validation may have been short."""
        if self._recorder.is_recording:
            self._recorder.stop()

    def begin_validation_batch(
        self, number: int, shape: tuple[int, ...] | None, batch_bytes: Callable[[], int]
    ) -> None:
        """Record the same for a validation batch. Number 0 begins another validation."""
        self.batch_shape = shape
        if number == 0:
            self.validation_begins = Timeline(_MAX_POINTS, 1.0)
            self._recorder.start("state")
        elif number == _RECORDED_BATCHES:
            self._recorder.stop()
        if number <= _EARLY_STEPS or number % _EVERY_STEPS == 0:
            self._read(self.validation_begins, number, batch_bytes)

    def _read(self, timeline: Timeline, number: int, batch_bytes: Callable[[], int]) -> None:
        reading = self.counted()
        if reading is not None:
            timeline.add(number, reading.allocated_bytes)
            self.batch_bytes = batch_bytes()

    def counted(self) -> MemoryReading | None:
        """Return the current counters of the allocator; ``None`` if they cannot be read."""
        if self._can_read:
            try:
                return read_memory(self._gpu)
            except Exception:  # noqa: BLE001 - as in MemoryCounters, which reports it
                self._can_read = False
        return None

    def note(self) -> None:
        """Record a failure, in the allocating thread and without the allocator's lock."""
        self.count += 1
        self.last = AllocatorFailure(self._phase(), torch.is_grad_enabled(), self.counted())
        if self.count.bit_count() == 1:  # a program may catch one in every step
            usual = self.usual()
            blocks = (one for one in live_blocks(self._gpu) if one.stack and one.address not in usual)
            self.last = self.last._replace(lines=by_line(blocks))


_listening: WeakSet[MemoryFailures] = WeakSet()
_is_attached = False


def _allocator_failed(device: int, requested_bytes: int, total_bytes: int, free_bytes: int) -> None:
    for failures in list(_listening):
        if failures._gpu.index in (None, device):
            with contextlib.suppress(Exception):  # an error here would replace torch's own
                failures.note()
