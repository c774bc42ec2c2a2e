"""How a training ends: what is kept while it runs, and what an error that ends it does not say itself."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from lightning_gpu_tools.advice.failures import (
    INDEX_NOTE,
    Failure,
    WorkerExit,
    failure_of_dataset,
    failure_of_workers,
    not_picklable,
)
from lightning_gpu_tools.advice.out_of_memory import (
    LOADING_CHECKPOINT,
    SETUP,
    ModelSize,
    OutOfMemory,
    OutOfMemoryMessage,
    is_out_of_memory,
    out_of_memory,
)
from lightning_gpu_tools.errors import NvmlUnavailableError
from lightning_gpu_tools.gpus import sampler
from lightning_gpu_tools.gpus.readings import GpuReading
from lightning_gpu_tools.host import oom_kills, shared_memory_bytes
from lightning_gpu_tools.loaders.settings import batch_shape
from lightning_gpu_tools.loaders.workers import OF_LIVING_WORKERS, wait_for_exit_codes
from lightning_gpu_tools.processes import INIT, process_stat
from lightning_gpu_tools.runs.run import Run, gpu_readings
from lightning_gpu_tools.training import compat
from lightning_gpu_tools.training.device_facts import is_fusible
from lightning_gpu_tools.training.memory_counters import count_holdings
from lightning_gpu_tools.training.memory_failures import MemoryFailures
from lightning_gpu_tools.training.memory_readings import RankMemory
from lightning_gpu_tools.training.phases import BACKWARD, FORWARD, OPTIMIZER, UNEXPLAINED, VALIDATION
from lightning_gpu_tools.training.step_clock import StepClock
from lightning_gpu_tools.units import printable

if TYPE_CHECKING:
    from lightning_gpu_tools.runs.session import Session

# What loads the samples of a batch, private in torch.utils.data. Without it an error lacks the index.
FETCH = "_utils.fetch._MapDatasetFetcher.fetch"


def worker_exits(run: Run, error: BaseException) -> list[WorkerExit]:
    """Return the workers that have died, of the loader that an error comes from or of the training's."""
    workers = compat.workers(compat.iterator_waited_for(_frames(error)) or run.iterator)
    text = str(error)
    may_be_of_workers = "DataLoader worker" in text or isinstance(error, (ConnectionError, EOFError, FileNotFoundError))
    if may_be_of_workers and workers and not any(words in text for words in OF_LIVING_WORKERS):
        wait_for_exit_codes(workers)
    exits = [WorkerExit(i, one.pid or 0, one.exitcode) for i, one in enumerate(workers) if one.exitcode is not None]
    return [one for one in exits if one.exitcode or "exited unexpectedly" in text]


def failure_of(error: BaseException, exits: Sequence[WorkerExit], oom_kills: int) -> Failure | None:
    """Return what has ended a training, where more is known than its error."""
    frames, shm_bytes = _frames(error), shared_memory_bytes()
    # Only "dump": what receives tensors from a worker is in that file, too, and fails where the worker has died.
    is_pickling = any(f.f_code.co_name == "dump" and _file(f).endswith("multiprocessing/reduction.py") for f in frames)
    if is_pickling and any("torch/utils/data/" in _file(frame) for frame in frames):
        return not_picklable(str(error))
    dead = failure_of_workers(exits, oom_kills, shm_bytes)
    return dead or failure_of_dataset(str(error), _index_of(frames), shm_bytes)


def noting_index(fetch: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Have what loads the samples of a batch, also in workers, add the dataset's index to an error (Python 3.11)."""

    def fetched(self: Any, indices: Any) -> Any:
        try:
            return fetch(self, indices)
        except Exception as error:
            index = _index_of(_frames(error))
            if index is not None and hasattr(error, "add_note"):
                error.add_note(INDEX_NOTE.format(index))
            raise

    return fetched


def _frames(error: BaseException) -> list[FrameType]:
    return [frame for frame, _ in traceback.walk_tb(error.__traceback__)]


def _file(frame: FrameType) -> str:
    return frame.f_code.co_filename.replace("\\", "/")


def _index_of(frames: Sequence[FrameType]) -> str | None:
    """Return the index with which torch has asked the dataset for a sample."""
    fetching = [i for i, frame in enumerate(frames) if _file(frame).endswith("torch/utils/data/_utils/fetch.py")]
    for frame in frames[fetching[-1] + 1 :][:1] if fetching else ():
        names = frame.f_code.co_varnames
        if frame.f_code.co_name == "__getitem__" and len(names) > 1:
            return printable(repr(frame.f_locals.get(names[1])), 50)
    return None


# What the training thread was doing, by the innermost of these functions in the traceback; after a colon, of its path.
_FUNCTIONS = {
    "training_step": FORWARD,
    "backward": BACKWARD,
    "step:torch/optim": OPTIMIZER,
    "validation_step": VALIDATION,
    "test_step": VALIDATION,
    "load_state_dict": LOADING_CHECKPOINT,
    "load_checkpoint": LOADING_CHECKPOINT,
    "load:torch/serialization": LOADING_CHECKPOINT,
}


def out_of_memory_facts(
    session: Session, error: BaseException, step: int, exits: Sequence[WorkerExit], kills: int
) -> OutOfMemory | None:
    """Return what is known of an out-of-memory error; ``None`` if the error is another one."""
    message = out_of_memory(error)
    killed = tuple(one.pid for one in exits if one.exitcode == -signal.SIGKILL)
    if killed and (message is None or message.source == "host"):
        message = OutOfMemoryMessage(source="host", name="the program", is_certain=False, workers=killed)
    if message is None:
        return None
    if message.is_certain:
        session.begin()  # it may have come before training did
    run, clock, failures = session.run, session.clock, session.ending.allocator
    memory = None if session.timer.memory is None else session.timer.memory.facts()
    phase = UNEXPLAINED
    counted: dict[str, Any] = {}
    if failures is not None:
        failure = failures.last if message.source == "allocator" else None
        phase = failure.phase if failure is not None and clock.ran else UNEXPLAINED
        counted = {
            "reading": failures.counted() if failure is None else failure.reading,
            "grad_enabled": None if failure is None else failure.grad_enabled,
            "batch_shape": failures.batch_shape,
            "usual_items": failures.usual_items,
            "begins": failures.begins,
            "validation_begins": failures.validation_begins,
        }
    if phase == UNEXPLAINED:
        phase = _phase_of(error) or (clock.current.phase if clock.ran else SETUP)
    found = OutOfMemory(
        message=message,
        phase=phase,
        step=step,
        rank=run.place.rank,
        memory=memory,
        is_sharded=run.place.world_size > 1 and not run.is_plain_ddp,
        growth=session.memory.growth() if session.recorder is not None else (),
        oom_kills=kills,
        **counted,
    )
    if message.source != "host" and run.gpu is not None:
        found = _with_gpus(found, session, run)
        found = replace(found, model=_model_size(run, memory, found.is_sharded))
    return found if is_out_of_memory(found) else None


def _phase_of(error: BaseException) -> str | None:
    found = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        for name, phase in _FUNCTIONS.items():
            function, _, path = name.partition(":")
            if code.co_name == function and path in code.co_filename.replace(os.sep, "/"):
                found = phase
    return found


def _with_gpus(found: OutOfMemory, session: Session, run: Run) -> OutOfMemory:
    assert run.gpu is not None
    (own,) = gpu_readings([run.gpu])
    found = replace(found, uuid=own.uuid)
    try:
        found = replace(found, gpus=sampler.read_gpus())
    except NvmlUnavailableError:  # the message has what it has
        return found
    pids = None if session.gpus is None else session.gpus.own_pids
    if session.gpus is None or pids is None:  # in a container a number may be that of another process here
        return found
    windows = session.gpus.trained_on()
    busy = {one.pid for window in windows for one in window.processes or () if one.utilization_percent}
    return replace(found, own_pids=pids, orphans=_orphans(found.gpu, pids | busy))


def _orphans(gpu: GpuReading | None, others: frozenset[int]) -> tuple[int, ...]:
    """Return the processes on a GPU whose parent has ended, without these others."""
    pids = [one.pid for one in (gpu.processes if gpu is not None else None) or () if one.pid not in others]
    return tuple(pid for pid in pids if (stat := process_stat(pid)) is not None and stat.parent == INIT)


def _model_size(run: Run, memory: RankMemory | None, is_sharded: bool) -> ModelSize:
    """Return what a model needs beside its batch, also gradients and states that have yet to be made."""
    held = memory.holdings if memory is not None and memory.holdings is not None else count_holdings(run)
    trained = [weight for one in run.optimizers for group in one.param_groups for weight in group["params"]]
    here = [weight.nbytes for weight in trained if weight.requires_grad and weight.device == run.device]
    trained_bytes = held.parameters_bytes if is_sharded else sum(here)  # a sharded one gives the size of the whole
    copies = max((copies_per_weight(one) for one in run.optimizers), default=0)
    return ModelSize(
        parameters_bytes=held.parameters_bytes + held.buffers_bytes,
        gradients_bytes=max(held.gradients_bytes, trained_bytes),
        optimizer_bytes=max(held.optimizer_bytes, copies * trained_bytes),
        fusible=tuple(type(one).__name__ for one in run.optimizers if is_fusible(one)),
    )


def copies_per_weight(optimizer: torch.optim.Optimizer) -> int:
    """Return how many numbers an optimizer keeps for each weight: two in Adam and its kind, one with momentum."""
    return 2 if "betas" in optimizer.defaults else 1 if optimizer.defaults.get("momentum") else 0


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
        self.begun_step = -1  # the last one, by the clock
        self._begun_validation = (-1, -1)  # likewise, and its batch
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
        if self.begun_step != self._clock.steps:
            self.begun_step = self._clock.steps
            if self.allocator is not None:
                self.allocator.begin_step(self.begun_step, batch_shape(batch))

    def begin_validation_batch(self, batch: Any, number: int) -> None:
        """Note a batch of validation, likewise; number 0 begins another validation."""
        place = self._clock.steps, number
        if self.allocator is not None and self._begun_validation != place:
            self._begun_validation = place
            self.allocator.begin_validation_batch(number, batch_shape(batch))

    def note_error(self, session: Session, error: BaseException, step: int) -> str:
        """Return the outcome of a training that this error has ended, and keep what explains it."""
        if self.outcome == COMPLETED:  # the first one who hears of it
            is_wanted = not isinstance(error, Exception)  # Ctrl-C, sys.exit
            exits = [] if is_wanted else worker_exits(session.run, error)
            kills = oom_kills() - self._oom_kills_before
            self.out_of_memory = out_of_memory_facts(session, error, step, exits, kills)
            self.failure = None if is_wanted else failure_of(error, exits, kills)
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
