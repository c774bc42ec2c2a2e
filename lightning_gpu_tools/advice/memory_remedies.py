"""Remedies that the causes of out-of-memory errors share, with the numbers of the run. All sizes are in bytes."""

from __future__ import annotations

import math

from lightning_gpu_tools.advice.batch_size import NOT_RECORDED, LargestBatch, bound_by_failure, largest_batch, split
from lightning_gpu_tools.advice.lines import holding
from lightning_gpu_tools.advice.out_of_memory import OutOfMemory
from lightning_gpu_tools.training.phases import VALIDATION, base_phase
from lightning_gpu_tools.training.run_measurements import RunMeasurements
from lightning_gpu_tools.units import format_bytes

MARGIN = 0.20  # loadtune's, of a job's need: for rounding, fragments and cuDNN's workspaces
_PART_OF_BOUND = 0.5  # our default: what to try of an upper bound, because the rest of the failed step is unknown
_MIN_FREED = 0.1  # our default: the share of the activations below which lower precision is not worth a change
_LEFT_BY_CHECKPOINTING = 0.2  # measured in a transformer of 6 layers: 5.7 of 28.2 MiB per sample


def in_validation(oom: OutOfMemory) -> bool:
    """Return whether the error occurred in validation."""
    return base_phase(oom.phase) == VALIDATION


def largest_that_fits(run: RunMeasurements, oom: OutOfMemory) -> LargestBatch:
    """Return the largest batch size that fits, in samples."""
    if oom.room_bytes is None:
        return LargestBatch(why_not="The error does not include the size of the memory.")
    if oom.batch_shape and samples(run, oom) is None:
        return LargestBatch(why_not="The first dimension of the first tensor of a batch is not its samples.")
    bound = LargestBatch(why_not=NOT_RECORDED)
    if oom.batch_shape and oom.allocated_bytes is not None and oom.begin_bytes is not None:
        begin = oom.begin_bytes - oom.batch_bytes
        # The first step of the optimizer will take memory as well.
        fixed = begin if in_validation(oom) else max(begin, oom.model.total_bytes)
        bound = bound_by_failure(oom.batch_shape[0], oom.wanted_bytes - begin, fixed, oom.room_bytes)
    recorded = None if oom.memory is None or in_validation(oom) else oom.memory.recorded
    if recorded is None:
        return bound
    # The advice is more batches with the same effective size, so gradients stay.
    found = largest_batch(recorded, oom.room_bytes, run.batch_bytes or 0, keeps_gradients=True)
    if found.size is None or not oom.batch_shape:
        return bound if found.size is None else found
    return LargestBatch(size=min(found.size, oom.batch_shape[0] - 1))


def smaller_batch(run: RunMeasurements, oom: OutOfMemory, size: int | None, fits: LargestBatch) -> str:
    """Return advice on the batch size to set."""
    where = " of the validation loader" if in_validation(oom) else ""
    if size is None or fits.size is None:
        return f"Lower the batch size{where}{f' (now {size})' if size else ''}. {fits.why_not}".strip()
    if fits.size < 1:
        return "Based on measured memory, not even a batch of 1 fits."
    known = f"About {fits.size} fit" if fits.is_bound else f"{fits.size} fit, based on measured memory"
    goal = math.ceil(_PART_OF_BOUND * fits.size) if fits.is_bound else fits.size
    more = ", or fewer: the failed step did not finish" if fits.is_bound else ""
    if in_validation(oom) or run.stage != "fit":
        return f"Set batch_size={goal}{where} (now {size}). {known}{more}."
    smaller, accumulate = split(size, goal, run.accumulate_grad_batches)
    if run.has_trainer:
        keep = f"accumulate_grad_batches={accumulate} (now {run.accumulate_grad_batches})"
    else:
        keep = f"call optimizer.step() after every {accumulate} batches, with the loss divided by {accumulate},"
    return f"Set batch_size={smaller} (now {size}), and {keep} to keep the effective batch size. {known}{more}."


def samples(run: RunMeasurements, oom: OutOfMemory) -> int | None:
    """Return the number of samples in the batch; ``None`` if they are not the first dimension of its first tensor."""
    size = oom.batch_shape[0] if oom.batch_shape else None
    known = None if run.loader is None or in_validation(oom) else run.loader.batch_size
    return None if size is None or (known is not None and size > known) else size


def levers(run: RunMeasurements, oom: OutOfMemory) -> str:
    """Return changes that free memory at the same batch size, each with the amount."""
    step = None if oom.memory is None else oom.memory.last_step
    known = [0]
    if oom.begin_bytes is not None and oom.allocated_bytes is not None:
        known.append(oom.allocated_bytes - oom.begin_bytes)
    if step is not None and step.begin is not None:
        after = [reading for reading in (step.after_forward, step.before_backward) if reading is not None]
        known += [reading.allocated_bytes - step.begin.allocated_bytes for reading in after]
    activations = max(known)
    if not activations or in_validation(oom):
        return ""
    left = format_bytes(_LEFT_BY_CHECKPOINTING * activations)
    found = [f"activation checkpointing (about {left} instead of {format_bytes(activations)})"] * (run.stage == "fit")
    model = oom.model
    halved = (activations - model.parameters_bytes) / 2  # autocast keeps a 16-bit copy of the weights
    if is_32(run) and halved > _MIN_FREED * activations:
        found.append(f"precision='bf16-mixed' (frees up to {format_bytes(halved)})")
    return f"At the same batch size, these need less memory: {'; '.join(found)}." if found else ""


def is_32(run: RunMeasurements) -> bool:
    """Return whether the model computes in 32 bits; ``False`` if unknown."""
    return (run.precision or "").startswith("32")


def sharded(oom: OutOfMemory) -> str:
    """Return a sentence on the memory per GPU with sharding; empty if it is already used or does not help."""
    count, size = len(oom.gpus), oom.model.total_bytes
    if oom.is_sharded or count < 2 or not size:
        return ""
    return f"FSDP over {count} GPUs needs {format_bytes(size / count)} instead of {format_bytes(size)} on each."


def needed_bytes(oom: OutOfMemory) -> float:
    """Return the least GPU memory that this job would have needed."""
    tensors = oom.wanted_bytes
    to_come = max(0, oom.model.total_bytes - (oom.begin_bytes or oom.allocated_bytes or 0))
    if oom.has_completed_full_steps and oom.memory is not None:
        tensors, to_come = max(tensors, oom.memory.peak_bytes), 0
    own = 0  # of this process, outside torch's allocator
    if oom.total_bytes is not None and oom.free_bytes is not None and oom.reserved_bytes is not None:
        own = max(0, oom.total_bytes - oom.free_bytes - oom.reserved_bytes - oom.others_bytes)
    return tensors + to_come + own


def needed(oom: OutOfMemory) -> str:
    """Return ``needed_bytes`` plus 20%, rounded up, as a size for ``--min-free``."""
    least = needed_bytes(oom) * (1 + MARGIN)
    size, unit = (2**30, "GiB") if least >= 2**30 else (2**20, "MiB")
    return f"{math.ceil(least / size)}{unit}"


def raised_limit(oom: OutOfMemory) -> str:
    """Return a sentence on the limit to raise; empty if there is none, or the GPU would be too small without it."""
    allowed, total, free = oom.message.allowed_bytes, oom.total_bytes, oom.free_bytes
    if allowed is None or total is None or free is None or free < oom.requested_bytes:
        return ""
    if needed_bytes(oom) + oom.others_bytes > total:
        return ""
    return (
        f"A limit allows torch {format_bytes(allowed)}, but {format_bytes(free)} of {format_bytes(total)} are free. "
        "Raise it: torch.cuda.set_per_process_memory_fraction, or per_process_memory_fraction in PYTORCH_ALLOC_CONF."
    )


def more_room(oom: OutOfMemory) -> str:
    """Return a sentence on a limit to raise or another GPU; empty if neither helps."""
    return raised_limit(oom) or another_gpu(oom)


def another_gpu(oom: OutOfMemory) -> str:
    """Return a sentence on a GPU of this machine with enough free memory; empty without one."""
    least = max(needed_bytes(oom) * (1 + MARGIN), oom.room_bytes or 0)
    others = [gpu for gpu in oom.gpus if gpu.uuid != oom.uuid and not gpu.error]
    best = max(others, key=lambda gpu: (gpu.memory_free_bytes or 0, -gpu.index), default=None)
    if best is None or (free := best.memory_free_bytes or 0) < least or oom.uuid is None:
        return ""
    pick = f"CUDA_VISIBLE_DEVICES=$(lightning-gpu-tools pick --min-free {needed(oom)})"
    return f"{'GPU' if best.mig_index is None else 'MIG instance'} {best.number} has {format_bytes(free)} free: {pick}."


def largest_lines(oom: OutOfMemory) -> str | None:
    """Return the program's lines that allocate most of a step; ``None`` if they are unknown."""
    if oom.memory is not None and oom.memory.peak_lines and not in_validation(oom):
        return holding(oom.memory.peak_lines)
    return holding(oom.lines)


def why_host_is_full(run: RunMeasurements, oom: OutOfMemory) -> str:
    """Return the known facts about an error of the host's memory."""
    message = oom.message
    if message.workers or oom.oom_kills:
        pids = ", ".join(map(str, message.workers))
        who = f"worker {pids} of the DataLoader" if pids else "a process of this job"
        return f"The kernel killed {who}, because the memory of this machine or job was full."
    if message.requested_bytes:
        available = format_bytes(run.host.memory_available_bytes)
        return f"The host has {available} left, but {format_bytes(message.requested_bytes)} were requested at once."
    return "The memory of this machine or job is full."


def fewer_workers(run: RunMeasurements) -> str:
    """Return advice on fewer workers or prefetched batches; empty without workers."""
    loader = run.loader
    if loader is None or not loader.num_workers:
        return ""
    now = f"num_workers={loader.num_workers}, prefetch_factor={loader.prefetch_factor}"
    return f"Use fewer workers, or prefetch fewer batches (now {now})."
