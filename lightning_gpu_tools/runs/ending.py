"""The end of training, and facts about batches and memory that explain an error."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any

from lightning_gpu_tools.advice.failures import Failure
from lightning_gpu_tools.advice.out_of_memory import OutOfMemory
from lightning_gpu_tools.host import oom_kills
from lightning_gpu_tools.loaders.settings import batch_bytes, batch_shape
from lightning_gpu_tools.reports.report import COMPLETED
from lightning_gpu_tools.runs.run import Run
from lightning_gpu_tools.training.memory_failures import MemoryFailures
from lightning_gpu_tools.training.step_clock import StepClock


class Ending:
    """The end of training."""

    def __init__(self, run: Run, clock: StepClock) -> None:
        self.run, self.clock = run, clock
        self.outcome = COMPLETED
        self.failure: Failure | None = None  # if known beyond the error
        self.out_of_memory: OutOfMemory | None = None  # if it ended training
        self.allocator = None if run.gpu is None else MemoryFailures(run.gpu, lambda: clock.current.phase)
        self._oom_kills_before = oom_kills()
        self._begun_validation = (-1, -1)  # step of the last validation batch, and its number
        self.listen()

    def listen(self) -> None:
        """Start to record allocator failures, if CUDA has started."""
        if self.allocator is not None:
            self.allocator.listen()

    def close(self) -> None:
        """Stop recording allocator failures."""
        if self.allocator is not None:
            self.allocator.close()

    def begin_step(self, batch: Any) -> None:
        """Record the batch of a step that begins."""
        if self.allocator is not None:
            with suppress(Exception):  # an odd batch must not end training
                size = partial(batch_bytes, batch, on_gpu=True)
                self.allocator.begin_step(self.clock.steps, batch_shape(batch), size)

    def note_failed_batch(self, batch: Any) -> None:
        """Record the batch of a step that has failed."""
        if self.allocator is not None:
            with suppress(Exception):
                self.allocator.batch_shape = batch_shape(batch)

    def begin_validation_batch(self, batch: Any, number: int) -> None:
        """Record a validation batch in the same way; number 0 begins another validation."""
        place = self.clock.steps, number
        if self.allocator is not None and self._begun_validation != place:
            self._begun_validation = place
            size = partial(batch_bytes, batch, on_gpu=True)
            self.allocator.begin_validation_batch(number, batch_shape(batch), size)

    @property
    def kills(self) -> int:
        """The number of processes that the kernel's OOM killer has killed here since the start."""
        return oom_kills() - self._oom_kills_before

    def note_error(
        self, error: BaseException, step: int, failure: Failure | None, out_of_memory: OutOfMemory | None
    ) -> None:
        """Record the error that ended training, and its explanation."""
        self.failure, self.out_of_memory = failure, out_of_memory
        self.outcome = f"stopped by {type(error).__name__} at step {step}"
        if out_of_memory is not None:
            self.outcome = f"out of memory in {out_of_memory.place} at step {step}"
        elif failure is not None:
            self.outcome += f": {failure.what}"
        if failure is not None and hasattr(error, "add_note"):  # Python 3.11
            error.add_note(str(failure))
