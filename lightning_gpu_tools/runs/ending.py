"""How a training ends, and what is kept for the case that an error ends it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_gpu_tools.advice.failures import Failure
from lightning_gpu_tools.advice.out_of_memory import OutOfMemory
from lightning_gpu_tools.host import oom_kills
from lightning_gpu_tools.loaders.settings import first_tensor
from lightning_gpu_tools.runs.failures import explain_failure, worker_exits
from lightning_gpu_tools.runs.out_of_memory import explain
from lightning_gpu_tools.runs.run import Run
from lightning_gpu_tools.training.memory_failures import MemoryFailures
from lightning_gpu_tools.training.step_clock import StepClock

if TYPE_CHECKING:
    from lightning_gpu_tools.runs.session import Session

COMPLETED = "completed"


class Ending:
    """How a training ends."""

    def __init__(self, run: Run, clock: StepClock) -> None:
        self.outcome = COMPLETED
        self.failure: Failure | None = None  # where more is known than the error
        self.out_of_memory: OutOfMemory | None = None  # if that has ended the training
        self.allocator = None if run.gpu is None else MemoryFailures(run.gpu, lambda: clock.current.phase)
        self._clock = clock
        self._oom_kills_before = oom_kills()
        self._begun: tuple[int, ...] = ()  # the last step, or the last step and batch of validation
        self.listen()

    def listen(self) -> None:
        """Hear of the allocator's failures, as soon as CUDA has begun."""
        if self.allocator is not None:
            self.allocator.listen()

    def close(self) -> None:
        """Hear of them no more."""
        if self.allocator is not None:
            self.allocator.close()

    def begin_step(self, batch: Any) -> None:
        """Note the batch of a step that begins; only the first call counts."""
        step = self._clock.steps
        if self.allocator is not None and self._begun != (step,):
            self._begun = (step,)
            self.allocator.begin_step(step, _shape(batch))

    def begin_validation_batch(self, batch: Any, number: int) -> None:
        """Note a batch of validation, likewise; number 0 begins another validation."""
        place = self._clock.steps, number
        if self.allocator is not None and self._begun != place:
            self._begun = place
            self.allocator.begin_validation_batch(number, _shape(batch))

    def note_error(self, session: Session, error: BaseException, step: int) -> str:
        """Return the outcome of a training that this error has ended, and keep what explains it."""
        if self.outcome == COMPLETED:  # the first one who hears of it
            is_wanted = not isinstance(error, Exception)  # Ctrl-C, sys.exit
            exits = [] if is_wanted else worker_exits(session.run, error)
            kills = oom_kills() - self._oom_kills_before
            self.out_of_memory = explain(session, error, step, exits, kills)
            self.failure = None if is_wanted else explain_failure(error, exits, kills)
            self.outcome = f"stopped by {type(error).__name__} at step {step}"
            if self.out_of_memory is not None:
                self.outcome = f"out of memory in {self.out_of_memory.place} at step {step}"
            elif self.failure is not None:
                self.outcome += f": {self.failure.what}"
            if self.failure is not None:
                session.begin()  # it may have come before training did
                if hasattr(error, "add_note"):  # Python 3.11
                    error.add_note(str(self.failure))
        return self.outcome

    @property
    def snapshot(self) -> Path | None:
        """Where torch writes what is allocated when memory runs out."""
        return None if self.allocator is None else self.allocator.snapshot

    @property
    def allocator_failures(self) -> int:
        """How often the allocator has failed on this rank, and the training went on."""
        count = 0 if self.allocator is None else self.allocator.count
        has_ended = self.out_of_memory is not None and self.out_of_memory.message.source == "allocator"
        return max(0, count - has_ended)


def _shape(batch: Any) -> tuple[int, ...] | None:
    first = first_tensor(batch)
    return None if first is None else tuple(first.shape)
