"""The end of training, and why an error ended it: dead workers, a sample, or memory that ran out, with the facts then.

torch calls a function of this module when its allocator fails. By the time the error reaches a hook, much memory is
free again.
"""

import contextlib
import math
import os
import signal
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from types import FrameType
from typing import Any
from weakref import WeakSet

import torch

from lightning_gpu_tools.advice.findings import is_of_program
from lightning_gpu_tools.advice.out_of_memory import is_out_of_memory, place_of
from lightning_gpu_tools.advice.workers import Failure, failure_of_dataset, failure_of_workers, not_picklable
from lightning_gpu_tools.gpus.metrics import Timeline
from lightning_gpu_tools.host import oom_kills
from lightning_gpu_tools.loaders.settings import batch_bytes, batch_shape
from lightning_gpu_tools.loaders.workers import OF_LIVING_WORKERS, wait_for_exit_codes
from lightning_gpu_tools.memory import readings
from lightning_gpu_tools.memory.blocks import MemoryRecorder, by_line, live_blocks
from lightning_gpu_tools.memory.counters import MemoryCounters, read_memory
from lightning_gpu_tools.memory.holdings import count_holdings, trained_bytes
from lightning_gpu_tools.reports.report import COMPLETED
from lightning_gpu_tools.runs.run import Run
from lightning_gpu_tools.runs.run_gpus import with_gpus
from lightning_gpu_tools.runs.run_recorder import RunRecorder
from lightning_gpu_tools.training import compat
from lightning_gpu_tools.training.phases import BACKWARD, FORWARD, OPTIMIZER, UNEXPLAINED, VALIDATION
from lightning_gpu_tools.training.source_lines import line_in, stack_of
from lightning_gpu_tools.training.step_clock import StepClock

# Our defaults.
_EARLY_STEPS, _EVERY_STEPS = 64, 64  # reads at the start of the first steps, then of one step in 64; 10 to 20 µs each
_MAX_POINTS = 200
_RECORDED_BATCHES = 3  # of each validation, whose blocks are recorded with their lines

_ALLOCATOR_SETTINGS = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"  # if both are set, torch follows the first one
# The training thread's phase, by the innermost of these functions in the traceback; after a colon, a part of its path.
_FUNCTIONS = {
    "training_step": FORWARD,
    "backward": BACKWARD,
    "step:torch/optim": OPTIMIZER,
    "validation_step": VALIDATION,
    "test_step": VALIDATION,
    "load_state_dict": readings.LOADING_CHECKPOINT,
    "load_checkpoint": readings.LOADING_CHECKPOINT,
    "load:torch/serialization": readings.LOADING_CHECKPOINT,
}


class Ending:
    """The end of training: its outcome, the last failure of torch's allocator, and the batch in use."""

    def __init__(self, run: Run, clock: StepClock) -> None:
        self.run, self.clock = run, clock
        self.recorder: RunRecorder | None = None  # once training has begun
        self.outcome = COMPLETED
        self.failure: Failure | None = None  # if known beyond the error
        self.out_of_memory: readings.OutOfMemory | None = None  # if it ended training
        self.next_step = math.inf if run.gpu is None else 0.0  # the next one to read at its start
        self._last: readings.OutOfMemory | None = None  # of torch's allocator: what is known in its thread
        self._failures = 0  # of the allocator; the program or cuDNN may have continued after each
        self._batch_shape: tuple[int, ...] | None = None  # of the first tensor of the batch in use
        self._batch_bytes = 0  # on the GPU, of the last batch at whose start the bytes in tensors were read
        self._begins = Timeline(_MAX_POINTS, 1.0)  # bytes in tensors at the start of steps
        self._validation_begins = Timeline(_MAX_POINTS, 1.0)  # the same for the batches of the last validation
        self._gpu = run.gpu
        self._recorder = MemoryRecorder()
        self._validations = 0
        self._oom_kills = oom_kills()  # before
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
            self._batch_shape = batch_shape(batch)
            if step >= self.next_step:
                self.next_step = step + (1 if step < _EARLY_STEPS else _EVERY_STEPS)
                self._read(self._begins, step, batch)

    def note_failed_batch(self, batch: Any) -> None:
        """Record the batch of a step that has failed."""
        with contextlib.suppress(Exception):
            self._batch_shape = batch_shape(batch)

    def enter(self, phase: str) -> None:
        """Begin a validation, or training after it. A loop may not report the batches of a validation."""
        self._recorder.stop()
        if phase == "validation" and self._gpu is not None:
            self._batch_shape = None
            self._validation_begins = Timeline(_MAX_POINTS, 1.0)
            self._validations += 1
            if self._validations.bit_count() == 1:
                self._recorder.start("state")

    def begin_validation_batch(self, batch: Any, number: int) -> None:
        """Record the same for a validation batch. Number 0 begins another validation."""
        if self._gpu is None:
            return
        self._batch_shape = batch_shape(batch)
        if number == 0:
            self._validation_begins = Timeline(_MAX_POINTS, 1.0)
            self._recorder.start("state")
        elif number == _RECORDED_BATCHES:
            self._recorder.stop()
        if number <= _EARLY_STEPS or number % _EVERY_STEPS == 0:
            self._read(self._validation_begins, number, batch)

    def _read(self, timeline: Timeline, number: int, batch: Any) -> None:
        reading = self._counted()
        if reading is not None:
            timeline.add(number, reading.allocated_bytes)
            self._batch_bytes = batch_bytes(batch, on_gpu=True)

    def _counted(self) -> readings.MemoryReading | None:
        """Return the current counters of the allocator; ``None`` if they cannot be read."""
        with contextlib.suppress(Exception):  # as in MemoryCounters, which reports it
            return None if self._gpu is None else read_memory(self._gpu)
        return None

    @property
    def _counters(self) -> MemoryCounters | None:
        return None if self.recorder is None else self.recorder.memory

    def note_allocator_failure(self) -> None:
        """Record a failure, in the allocating thread and without the allocator's lock."""
        assert self._gpu is not None
        self._failures += 1
        self._last = readings.OutOfMemory(
            phase=self.clock.current.phase, grad_enabled=torch.is_grad_enabled(), reading=self._counted()
        )
        if self._failures.bit_count() == 1:  # a program may catch one in every step
            usual = () if self._counters is None else self._counters.usual  # blocks that belong to the optimizers
            blocks = (one for one in live_blocks(self._gpu) if one.stack and one.address not in usual)
            self._last = replace(self._last, lines=by_line(blocks))

    @property
    def allocator_failures(self) -> int:
        """The number of allocator failures on this rank after which training continued."""
        has_ended = self.out_of_memory is not None and self.out_of_memory.source == "allocator"
        return max(0, self._failures - has_ended)

    def note_error(self, error: BaseException, step: int, begin: Callable[[], object]) -> None:
        """Record the error that ended training, and explain it; further ones come from the end itself.

        ``begin`` starts to measure, because the error may have been raised before training began.
        """
        if self.outcome != COMPLETED:
            return
        is_intended = not isinstance(error, Exception)  # Ctrl-C, sys.exit
        exits = [] if is_intended else _worker_exits(self.run, error)
        kills, message = oom_kills() - self._oom_kills, readings.out_of_memory(error)
        killed = tuple(pid for _, pid, code in exits if code == -signal.SIGKILL)
        if killed and (message is None or message.source == "host"):
            message = replace(readings.OF_HOST, is_certain=False, workers=killed)
        failure = None if is_intended else _failure_of(error, exits, kills)
        if failure is not None or (message is not None and message.is_certain):
            begin()
        if message is not None:
            self.out_of_memory = self._with_facts(replace(message, step=step, oom_kills=kills), error)
        self.failure = failure
        # A run that was asked to stop says how it ended.
        self.outcome = getattr(error, "outcome", "") or f"stopped by {type(error).__name__} at step {step}"
        if self.out_of_memory is not None:
            self.outcome = f"out of memory in {place_of(self.out_of_memory)} at step {step}"
        elif failure is not None:
            self.outcome += f": {failure.what}"
        if failure is not None and hasattr(error, "add_note"):  # Python 3.11
            error.add_note(str(failure))

    def _with_facts(self, message: readings.OutOfMemory, error: BaseException) -> readings.OutOfMemory | None:
        """Return the message of an error with the other facts at that time; ``None`` if it has another meaning here.

        The counters keep what was in use then.
        """
        run, clock, recorder, counters = self.run, self.clock, self.recorder, self._counters
        memory = None if counters is None else counters.facts()
        found = replace(
            message,
            rank=run.place.rank,
            memory=memory,
            is_sharded=run.place.world_size > 1 and not run.is_plain_ddp,
            asked=_requesting_line(error, message.requested_bytes),
        )
        if run.gpu is not None:
            found = replace(
                found,
                batch_shape=self._batch_shape,
                batch_bytes=self._batch_bytes,
                usual_items=None if recorder is None else recorder.usual_batch_items,
                begins=self._begins.points(),
                validation_begins=self._validation_begins.points(),
            )
            if message.source != "allocator" or self._last is None:
                now, reading = self._counted(), message.reading
                if now is not None and reading is not None:  # now, many tensors may be free again
                    allocated, reserved = reading.allocated_bytes, reading.reserved_bytes
                    if reserved <= allocated:  # a message without the size of the cache does not say what was reserved
                        reserved = now.reserved_bytes
                    reading = replace(now, allocated_bytes=allocated, reserved_bytes=reserved)
                found = replace(found, reading=reading or now)
            else:
                found = replace(
                    found,
                    phase=self._last.phase if clock.ran else UNEXPLAINED,
                    reading=self._last.reading or message.reading,
                    grad_enabled=self._last.grad_enabled,
                    lines=self._last.lines,
                )
        if found.phase == UNEXPLAINED:
            found = replace(found, phase=_phase_of(error) or (clock.current.phase if clock.ran else readings.SETUP))
        if message.source != "host" and run.gpu is not None:
            ranks, watch = (None, None) if recorder is None else (recorder.ranks, recorder.watch)
            variable = next(filter(os.environ.__contains__, _ALLOCATOR_SETTINGS), _ALLOCATOR_SETTINGS[-1])
            found = replace(
                with_gpus(found, run, ranks, watch),
                allocator=f"{variable}={os.environ.get(variable, '')}",
                model=_model_size(run, memory),
                # Those that would benefit much from their fused kernel, unlike SGD.
                fusible=tuple(
                    type(one).__name__
                    for one in run.optimizers
                    if isinstance(one, (torch.optim.Adam, torch.optim.AdamW)) and not one.defaults["fused"]
                ),
            )
        if not is_out_of_memory(found):
            return None
        if counters is not None:
            counters.note_failure(found.begin_bytes, found.reading)
        return found


_listening: WeakSet[Ending] = WeakSet()
_is_attached = False


def _allocator_failed(device: int, requested_bytes: int, total_bytes: int, free_bytes: int) -> None:
    for ending in list(_listening):
        if ending.run.gpu is not None and ending.run.gpu.index in (None, device):
            with contextlib.suppress(Exception):  # an error here would replace torch's own
                ending.note_allocator_failure()


def _worker_exits(run: Run, error: BaseException) -> list[tuple[int, int, int]]:
    """Return the number, PID and exit code of dead workers of the loader that failed, or of the training loader."""
    workers = compat.workers(compat.iterator_waited_for(_frames(error)) or run.iterator)
    text = str(error)
    may_be_of_workers = "DataLoader worker" in text or isinstance(error, (ConnectionError, EOFError, FileNotFoundError))
    if may_be_of_workers and workers and not any(words in text for words in OF_LIVING_WORKERS):
        wait_for_exit_codes(workers)
    exits = [(i, one.pid or 0, one.exitcode) for i, one in enumerate(workers) if one.exitcode is not None]
    return [dead for dead in exits if dead[2] or "exited unexpectedly" in text]


def _failure_of(error: BaseException, exits: Sequence[tuple[int, int, int]], oom_kills: int) -> Failure | None:
    """Return the failure that ended training, if known beyond its error."""
    frames = _frames(error)
    # Only "dump": code in the same file that receives tensors from a worker fails if the worker has died.
    codes = [frame.f_code for frame in frames]
    is_pickling = any(c.co_name == "dump" and c.co_filename.endswith("multiprocessing/reduction.py") for c in codes)
    if is_pickling and any("torch/utils/data/" in code.co_filename for code in codes):
        return not_picklable(str(error))
    dead = failure_of_workers(exits, oom_kills)
    return dead or failure_of_dataset(str(error), compat.index_of(frames))


def _frames(error: BaseException) -> list[FrameType]:
    return [frame for frame, _ in traceback.walk_tb(error.__traceback__)]


def _phase_of(error: BaseException) -> str | None:
    found = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        for name, phase in _FUNCTIONS.items():
            function, _, path = name.partition(":")
            if code.co_name == function and path in code.co_filename.replace(os.sep, "/"):
                found = phase
    return found


def _requesting_line(error: BaseException, requested_bytes: int) -> readings.MemoryLine | None:
    """Return the program's innermost line in the traceback; ``None`` if all lines are a framework's."""
    seen = line_in(reversed(stack_of(traceback.walk_tb(error.__traceback__))))
    if seen is None or not is_of_program(seen.file):
        return None
    return readings.MemoryLine(requested_bytes, 1, "", seen.file, seen.line, seen.function)


def _model_size(run: Run, memory: readings.RankMemory | None) -> readings.MemoryHoldings:
    """Return a model's memory without its batch, including gradients and states that do not exist yet."""
    held = memory.holdings if memory is not None and memory.holdings is not None else count_holdings(run)
    weights_bytes = trained_bytes(run)
    return replace(
        held,
        gradients_bytes=max(held.gradients_bytes, weights_bytes),
        optimizer_bytes=max(held.optimizer_bytes, copies_per_weight(run.optimizers) * weights_bytes),
    )


def copies_per_weight(optimizers: Iterable[torch.optim.Optimizer]) -> int:
    """Return the most values that an optimizer keeps per weight: two in Adam's variants, one with momentum."""
    options = [one.defaults for one in optimizers]
    if any("betas" in one for one in options):
        return 2
    return int(any(one.get("momentum") for one in options))
