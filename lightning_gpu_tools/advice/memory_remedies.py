"""Remedies that the causes of out-of-memory errors share, with the numbers of the run. All sizes are in bytes."""

from __future__ import annotations

import math

from lightning_gpu_tools.advice.out_of_memory import OutOfMemory
from lightning_gpu_tools.training.phases import VALIDATION, base_phase
from lightning_gpu_tools.training.run_measurements import RunMeasurements
from lightning_gpu_tools.units import format_bytes

MARGIN = 0.20  # loadtune's, of a job's need: for rounding, fragments and cuDNN's workspaces
_MIN_FREED = 0.1  # our default: the share of the activations below which lower precision is not worth a change
_LEFT_BY_CHECKPOINTING = 0.2  # measured in a transformer of 6 layers: 5.7 of 28.2 MiB per sample


def in_validation(oom: OutOfMemory) -> bool:
    """Return whether the error occurred in validation."""
    return base_phase(oom.phase) == VALIDATION


def levers(run: RunMeasurements, oom: OutOfMemory) -> str:
    """Return changes that free memory at the same batch size, each with the amount."""
    step = None if oom.memory is None else oom.memory.last_step
    known = [0]
    if oom.begin_bytes is not None and oom.allocated_bytes is not None:
        known.append(oom.allocated_bytes - oom.begin_bytes)
    if step is not None:
        after = [step.readings[name] for name in ("after_forward", "before_backward") if name in step.readings]
        known += [reading.allocated_bytes - step.readings["begin"].allocated_bytes for reading in after]
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
