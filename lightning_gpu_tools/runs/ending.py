"""The end of training, and facts about batches and memory that explain an error.

torch calls a function of this module when its allocator fails. By the time the error reaches a hook, much memory is
free again.
"""

import contextlib
import math
from dataclasses import replace
from typing import Any
from weakref import WeakSet

import torch

from lightning_gpu_tools.advice.out_of_memory import place_of
from lightning_gpu_tools.advice.workers import Failure
from lightning_gpu_tools.gpus.metrics import Timeline
from lightning_gpu_tools.host import oom_kills
from lightning_gpu_tools.loaders.settings import batch_bytes, batch_shape
from lightning_gpu_tools.memory.blocks import MemoryRecorder, by_line, live_blocks
from lightning_gpu_tools.memory.counters import MemoryCounters, read_memory
from lightning_gpu_tools.memory.readings import MemoryReading, OutOfMemory
from lightning_gpu_tools.reports.report import COMPLETED
from lightning_gpu_tools.runs.run import Run
from lightning_gpu_tools.training import compat
from lightning_gpu_tools.training.step_clock import StepClock

# Our defaults.
_EARLY_STEPS, _EVERY_STEPS = 64, 64  # reads at the start of the first steps, then of one step in 64; 10 to 20 µs each
_MAX_POINTS = 200
_RECORDED_BATCHES = 3  # of each validation, whose blocks are recorded with their lines


class Ending:
    """The end of training: its outcome, the last failure of torch's allocator, and the batch in use."""

    def __init__(self, run: Run, clock: StepClock) -> None:
        self.run, self.clock = run, clock
        self.outcome = COMPLETED
        self.failure: Failure | None = None  # if known beyond the error
        self.out_of_memory: OutOfMemory | None = None  # if it ended training
        self.last: OutOfMemory | None = None  # of torch's allocator: what is known in its thread
        self.batch_shape: tuple[int, ...] | None = None  # of the first tensor of the batch in use
        self.batch_bytes = 0  # on the GPU, of the last batch at whose start the bytes in tensors were read
        self.next_step = math.inf if run.gpu is None else 0.0  # the next one to read at its start
        self.counters: MemoryCounters | None = None  # of this rank's GPU, once training has begun
        self.begins = Timeline(_MAX_POINTS, 1.0)  # bytes in tensors at the start of steps
        self.validation_begins = Timeline(_MAX_POINTS, 1.0)  # the same for the batches of the last validation
        self._failures = 0  # of the allocator; the program or cuDNN may have continued after each
        self._gpu = run.gpu
        self._recorder = MemoryRecorder()
        self._validations = 0
        self.oom_kills_before = oom_kills()
        self.listen()

    def listen(self) -> None:
        """Register for failures of the allocator, if this rank has a GPU and CUDA has started."""
        global _is_attached
        attach = compat.find(compat.OUT_OF_MEMORY_OBSERVER)
        if self._gpu is None or attach is None or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
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

    def begin_step(self, batch: Any) -> None:
        """Record the batch of a training step at its start, and in some steps the bytes in tensors and in the batch."""
        if self._gpu is None:
            return
        self._recorder.stop()  # of the batches of a validation, which may have been short
        step = self.clock.steps
        with contextlib.suppress(Exception):  # an odd batch must not end training
            self.batch_shape = batch_shape(batch)
            if step >= self.next_step:
                self.next_step = step + (1 if step < _EARLY_STEPS else _EVERY_STEPS)
                self._read(self.begins, step, batch)

    def note_failed_batch(self, batch: Any) -> None:
        """Record the batch of a step that has failed."""
        with contextlib.suppress(Exception):
            self.batch_shape = batch_shape(batch)

    def enter(self, phase: str) -> None:
        """Begin a validation, or training after it. A loop may not report the batches of a validation."""
        self._recorder.stop()
        if phase == "validation" and self._gpu is not None:
            self.batch_shape = None
            self.validation_begins = Timeline(_MAX_POINTS, 1.0)
            self._validations += 1
            if self._validations.bit_count() == 1:
                self._recorder.start("state")

    def begin_validation_batch(self, batch: Any, number: int) -> None:
        """Record the same for a validation batch. Number 0 begins another validation."""
        if self._gpu is None:
            return
        self.batch_shape = batch_shape(batch)
        if number == 0:
            self.validation_begins = Timeline(_MAX_POINTS, 1.0)
            self._recorder.start("state")
        elif number == _RECORDED_BATCHES:
            self._recorder.stop()
        if number <= _EARLY_STEPS or number % _EVERY_STEPS == 0:
            self._read(self.validation_begins, number, batch)

    def _read(self, timeline: Timeline, number: int, batch: Any) -> None:
        reading = self.counted()
        if reading is not None:
            timeline.add(number, reading.allocated_bytes)
            self.batch_bytes = batch_bytes(batch, on_gpu=True)

    def counted(self) -> MemoryReading | None:
        """Return the current counters of the allocator; ``None`` if they cannot be read."""
        with contextlib.suppress(Exception):  # as in MemoryCounters, which reports it
            return None if self._gpu is None else read_memory(self._gpu)
        return None

    def note_allocator_failure(self) -> None:
        """Record a failure, in the allocating thread and without the allocator's lock."""
        assert self._gpu is not None
        self._failures += 1
        self.last = OutOfMemory(
            phase=self.clock.current.phase, grad_enabled=torch.is_grad_enabled(), reading=self.counted()
        )
        if self._failures.bit_count() == 1:  # a program may catch one in every step
            usual = () if self.counters is None else self.counters.usual  # blocks that belong to the optimizers
            blocks = (one for one in live_blocks(self._gpu) if one.stack and one.address not in usual)
            self.last = replace(self.last, lines=by_line(blocks))

    def note_error(
        self, error: BaseException, step: int, failure: Failure | None, out_of_memory: OutOfMemory | None
    ) -> None:
        """Record the error that ended training, and its explanation."""
        self.failure, self.out_of_memory = failure, out_of_memory
        # A run that was asked to stop says how it ended.
        self.outcome = getattr(error, "outcome", "") or f"stopped by {type(error).__name__} at step {step}"
        if out_of_memory is not None:
            self.outcome = f"out of memory in {place_of(out_of_memory)} at step {step}"
        elif failure is not None:
            self.outcome += f": {failure.what}"
        if failure is not None and hasattr(error, "add_note"):  # Python 3.11
            error.add_note(str(failure))

    @property
    def allocator_failures(self) -> int:
        """The number of allocator failures on this rank after which training continued."""
        has_ended = self.out_of_memory is not None and self.out_of_memory.source == "allocator"
        return max(0, self._failures - has_ended)


_listening: WeakSet[Ending] = WeakSet()
_is_attached = False


def _allocator_failed(device: int, requested_bytes: int, total_bytes: int, free_bytes: int) -> None:
    for ending in list(_listening):
        if ending.run.gpu is not None and ending.run.gpu.index in (None, device):
            with contextlib.suppress(Exception):  # an error here would replace torch's own
                ending.note_allocator_failure()
