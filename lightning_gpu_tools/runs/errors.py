"""Why an error ended a run: dead workers, a sample, or memory that ran out, with the facts at that time."""

import os
import signal
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import replace
from types import FrameType

import torch

from lightning_gpu_tools.advice.findings import is_of_program
from lightning_gpu_tools.advice.out_of_memory import is_out_of_memory
from lightning_gpu_tools.advice.workers import (
    Failure,
    failure_of_dataset,
    failure_of_workers,
    not_picklable,
)
from lightning_gpu_tools.loaders.workers import OF_LIVING_WORKERS, wait_for_exit_codes
from lightning_gpu_tools.memory.holdings import count_holdings
from lightning_gpu_tools.memory.readings import (
    LOADING_CHECKPOINT,
    OF_HOST,
    SETUP,
    MemoryHoldings,
    MemoryLine,
    MemoryReading,
    OutOfMemory,
    RankMemory,
    largest_first,
    out_of_memory,
)
from lightning_gpu_tools.processes import INIT, process_stat
from lightning_gpu_tools.runs.ending import Ending
from lightning_gpu_tools.runs.run import Run
from lightning_gpu_tools.runs.run_gpus import gpu_readings, read_driver
from lightning_gpu_tools.runs.run_recorder import RunRecorder
from lightning_gpu_tools.selection.cuda import whole_or_instances
from lightning_gpu_tools.training import compat
from lightning_gpu_tools.training.phases import BACKWARD, FORWARD, OPTIMIZER, UNEXPLAINED, VALIDATION
from lightning_gpu_tools.training.source_lines import line_in, stack_of

# The training thread's phase, by the innermost of these functions in the traceback; after a colon, a part of its path.
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


def worker_exits(run: Run, error: BaseException) -> list[tuple[int, int, int]]:
    """Return the number, PID and exit code of dead workers of the loader that failed, or of the training loader."""
    workers = compat.workers(compat.iterator_waited_for(_frames(error)) or run.iterator)
    text = str(error)
    may_be_of_workers = "DataLoader worker" in text or isinstance(error, (ConnectionError, EOFError, FileNotFoundError))
    if may_be_of_workers and workers and not any(words in text for words in OF_LIVING_WORKERS):
        wait_for_exit_codes(workers)
    exits = [(i, one.pid or 0, one.exitcode) for i, one in enumerate(workers) if one.exitcode is not None]
    return [dead for dead in exits if dead[2] or "exited unexpectedly" in text]


def failure_of(error: BaseException, exits: Sequence[tuple[int, int, int]], oom_kills: int) -> Failure | None:
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


def message_of(error: BaseException, exits: Sequence[tuple[int, int, int]]) -> OutOfMemory | None:
    """Return what the text of an error says about memory, or that the kernel killed workers."""
    message = out_of_memory(error)
    killed = tuple(pid for _, pid, code in exits if code == -signal.SIGKILL)
    if killed and (message is None or message.source == "host"):
        return replace(OF_HOST, is_certain=False, workers=killed)
    return message


def with_facts(
    message: OutOfMemory, error: BaseException, step: int, *, ending: Ending, recorder: RunRecorder | None, kills: int
) -> OutOfMemory | None:
    """Return the message of an error with the other facts at that time; ``None`` if it has another meaning here.

    The counters keep what was in use then. ``recorder`` has facts about the run, once training has begun.
    """
    run, clock, counters = ending.run, ending.clock, ending.counters
    memory = None if counters is None else counters.facts()
    found = replace(
        message,
        step=step,
        rank=run.place.rank,
        memory=memory,
        is_sharded=run.place.world_size > 1 and not run.is_plain_ddp,
        oom_kills=kills,
        asked=_requesting_line(error, message.requested_bytes),
    )
    if run.gpu is not None:
        failure = ending.last if message.source == "allocator" else None
        if failure is None:
            found = replace(found, reading=_when_it_failed(ending.counted(), message.reading))
        else:
            found = replace(
                found,
                phase=failure.phase if clock.ran else UNEXPLAINED,
                reading=failure.reading or message.reading,
                grad_enabled=failure.grad_enabled,
                lines=failure.lines,
            )
        found = replace(
            found,
            batch_shape=ending.batch_shape,
            batch_bytes=ending.batch_bytes,
            usual_items=None if recorder is None else recorder.usual_batch_items,
            begins=ending.begins.points(),
            validation_begins=ending.validation_begins.points(),
        )
    if found.phase == UNEXPLAINED:
        found = replace(found, phase=_phase_of(error) or (clock.current.phase if clock.ran else SETUP))
    if message.source != "host" and run.gpu is not None:
        found = replace(
            _with_gpus(found, recorder, run),
            allocator=_allocator_settings(),
            model=_model_size(run, memory, found.is_sharded),
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


def _when_it_failed(now: MemoryReading | None, in_message: MemoryReading | None) -> MemoryReading | None:
    """Return a reading after an error with the sizes in its message, because many tensors may be free again."""
    if now is None or in_message is None:
        return now or in_message
    allocated, reserved = in_message.allocated_bytes, in_message.reserved_bytes
    # A message without the size of the cache does not say what was reserved.
    return replace(
        now, allocated_bytes=allocated, reserved_bytes=reserved if reserved > allocated else now.reserved_bytes
    )


def _allocator_settings() -> str:
    # If both variables are set, torch follows the first one.
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    name = next((name for name in names if name in os.environ), names[-1])
    return f"{name}={os.environ.get(name, '')}"


def _phase_of(error: BaseException) -> str | None:
    found = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        for name, phase in _FUNCTIONS.items():
            function, _, path = name.partition(":")
            if code.co_name == function and path in code.co_filename.replace(os.sep, "/"):
                found = phase
    return found


def _requesting_line(error: BaseException, requested_bytes: int) -> MemoryLine | None:
    """Return the program's innermost line in the traceback; ``None`` if all lines are a framework's."""
    seen = line_in(reversed(stack_of(traceback.walk_tb(error.__traceback__))))
    if seen is None or not is_of_program(seen.file):
        return None
    return MemoryLine(requested_bytes, 1, "", seen.file, seen.line, seen.function)


def _with_gpus(found: OutOfMemory, recorder: RunRecorder | None, run: Run) -> OutOfMemory:
    """Return the same error with what the driver reports of the GPUs now."""
    assert run.gpu is not None
    (own,) = gpu_readings([run.gpu])
    gpus = whole_or_instances(read_driver())
    found = replace(found, uuid=own.uuid, gpus=gpus)
    gpu = next((gpu for gpu in gpus if gpu.uuid is not None and gpu.uuid == own.uuid), None)
    if gpu is None:
        return found
    from lightning_gpu_tools.gpus import nvml  # imports pynvml

    listed = gpu.processes or ()
    foreign = {one.pid for one in listed if one.is_foreign}
    found = replace(
        found,
        total_bytes=found.total_bytes or gpu.memory_total_bytes,
        free_bytes=gpu.memory_free_bytes if found.free_bytes is None else found.free_bytes,
        others=tuple(one._replace(is_foreign=one.pid in foreign) for one in found.others),
    )
    if recorder is None or not listed or not nvml.pids_are_ours() or foreign:
        return found
    job_pids, watch = recorder.ranks.pids_on_node(), recorder.watch
    if job_pids is None:
        return found
    own_bytes = sum(one.memory_used_bytes or 0 for one in listed if one.pid == os.getpid())
    others = largest_first(one for one in listed if one.pid != os.getpid())
    found = replace(
        found,
        own_bytes=found.own_bytes or own_bytes or None,
        others=others,
        strays=recorder.ranks.ranks_elsewhere(own.uuid),
    )
    if watch is None:
        return found
    windows = watch.trained_on()
    busy = {one.pid for window in windows for one in window.processes or () if one.utilization_percent}
    stats = {one.pid: process_stat(one.pid) for one in listed if one.pid not in job_pids | busy}
    orphans = tuple(pid for pid, stat in stats.items() if stat is not None and stat.parent == INIT)
    return replace(found, orphans=orphans)


def _model_size(run: Run, memory: RankMemory | None, is_sharded: bool) -> MemoryHoldings:
    """Return a model's memory without its batch, including gradients and states that do not exist yet."""
    held = memory.holdings if memory is not None and memory.holdings is not None else count_holdings(run)
    trained = [weight for one in run.optimizers for group in one.param_groups for weight in group["params"]]
    here = [weight.nbytes for weight in trained if weight.requires_grad and weight.device == run.device]
    trained_bytes = held.parameters_bytes if is_sharded else sum(here)  # a sharded weight reports the size of the whole
    return replace(
        held,
        gradients_bytes=max(held.gradients_bytes, trained_bytes),
        optimizer_bytes=max(held.optimizer_bytes, copies_per_weight(run.optimizers) * trained_bytes),
    )


def copies_per_weight(optimizers: Iterable[torch.optim.Optimizer]) -> int:
    """Return the most values that an optimizer keeps per weight: two in Adam's variants, one with momentum."""
    options = [one.defaults for one in optimizers]
    if any("betas" in one for one in options):
        return 2
    return int(any(one.get("momentum") for one in options))
