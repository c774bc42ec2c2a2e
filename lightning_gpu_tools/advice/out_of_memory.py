"""What an out-of-memory error shows, and remedies that its causes share. Pure; all sizes are in bytes."""

from __future__ import annotations

import math

from lightning_gpu_tools.memory.readings import LOADING_CHECKPOINT, SETUP, OutOfMemory
from lightning_gpu_tools.training.phases import OPTIMIZER, OUTSIDE_LOOP, VALIDATION, base_phase
from lightning_gpu_tools.training.run_measurements import RunMeasurements
from lightning_gpu_tools.units import format_bytes, printable

# The facts for a cause: the run, and the error that ended it.
MemoryFacts = tuple[RunMeasurements, OutOfMemory]

CUDA_CONTEXT_BYTES = 3 * 2**30 // 10  # 0.3 GiB: pytorch issue 107667
CONTEXT_BYTES = 2**30  # if not reported: a CUDA context, and NCCL's 0.7 GB (nccl issue 964)
MIN_SHARE = 0.10  # our default: the smallest share of the memory that can be a cause
MARGIN = 0.20  # loadtune's, of a job's need: for rounding, fragments and cuDNN's workspaces
_MIN_UNLISTED = 0.10  # our default: from this share of the GPU, memory without an owner belongs to other processes
_NEARLY_FULL = 0.05  # our default: below this share of free memory, an ambiguous message counts
_MIN_FREED = 0.1  # our default: the share of the activations below which lower precision is not worth a change
_LEFT_BY_CHECKPOINTING = 0.2  # measured in a transformer of 6 layers: 5.7 of 28.2 MiB per sample


def is_out_of_memory(oom: OutOfMemory) -> bool:
    """Return whether memory was short, even if the message is ambiguous."""
    if oom.is_certain:
        return True
    if oom.source == "host":
        return oom.oom_kills > 0
    return oom.total_bytes is not None and (oom.free_bytes or 0) < _NEARLY_FULL * oom.total_bytes


def place_of(oom: OutOfMemory) -> str:
    """Return the phase of the error as text."""
    names = {SETUP: "the setup", LOADING_CHECKPOINT: "loading a checkpoint", OPTIMIZER: "the optimizer"}
    names[OUTSIDE_LOOP] = "code outside the loop"
    group, _, part = oom.phase.partition("/")
    return names.get(oom.phase) or printable(part or group.replace("_", " "))


def in_validation(oom: OutOfMemory) -> bool:
    """Return whether the error occurred in validation."""
    return base_phase(oom.phase) == VALIDATION


def is_pool_of_driver(oom: OutOfMemory) -> bool:
    """Return whether torch allocates with cudaMallocAsync, from a pool of the driver."""
    return "backend:cudaMallocAsync" in oom.allocator


def has_completed_steps(oom: OutOfMemory, *, full: bool = False) -> bool:
    """Return whether the optimizer has completed a step before.

    A ``full`` step began with the optimizer's states and old gradients.
    """
    first = None if oom.memory is None else oom.memory.first_step
    if oom.memory is None or first is None or not full:
        return first is not None
    return oom.memory.last_step is not None and oom.memory.last_step.step > first.step


def wanted_bytes(oom: OutOfMemory) -> int:
    """Return the memory that tensors would have taken with this allocation."""
    return (0 if oom.reading is None else oom.reading.allocated_bytes) + oom.requested_bytes


def begin_bytes(oom: OutOfMemory) -> int | None:
    """Return the size of all tensors when this step or validation batch began, with its batch.

    If the batches of validation are unknown, it is the size when the last step began.
    """
    begins = (in_validation(oom) and oom.validation_begins) or oom.begins
    return int(begins[-1][1]) if begins else None


def taken_bytes(oom: OutOfMemory) -> int | None:
    """Return the memory that tensors would have taken with this allocation, beyond that at the begin of the step."""
    begin = begin_bytes(oom)
    return None if oom.reading is None or begin is None else wanted_bytes(oom) - begin


def kept_bytes(oom: OutOfMemory) -> int:
    """Return the part of ``begin_bytes`` that does not belong to the model; 0 if unknown."""
    model = oom.model.model_bytes
    return max(0, (begin_bytes(oom) or 0) - model) if model else 0


def room_bytes(oom: OutOfMemory) -> int | None:
    """Return the most GPU memory that torch could have."""
    if oom.reading is None or oom.free_bytes is None:
        return oom.allowed_bytes
    left = oom.reading.reserved_bytes + oom.free_bytes
    return min(left, oom.allowed_bytes or left)


def unlisted_bytes(oom: OutOfMemory) -> int:
    """Return the memory of processes that the driver does not list here, such as other containers'; 0 if negligible."""
    if oom.total_bytes is None or oom.free_bytes is None or oom.reading is None:
        return 0
    own = oom.own_bytes or oom.reading.reserved_bytes + CONTEXT_BYTES
    left = oom.total_bytes - oom.free_bytes - own - sum(process.memory_used_bytes or 0 for process in oom.others)
    return left if left >= _MIN_UNLISTED * oom.total_bytes else 0


def others_bytes(oom: OutOfMemory) -> int:
    """Return all known memory of other processes."""
    return sum(process.memory_used_bytes or 0 for process in oom.others) + unlisted_bytes(oom)


def levers(run: RunMeasurements, oom: OutOfMemory) -> str:
    """Return changes that free memory at the same batch size, each with the amount."""
    step = None if oom.memory is None else oom.memory.last_step
    known = [0]
    taken = taken_bytes(oom)
    if taken is not None:
        known.append(taken - oom.requested_bytes)
    if step is not None:
        known.append(step.forward_bytes)
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
    count, size = len(oom.gpus), oom.model.model_bytes
    if oom.is_sharded or count < 2 or not size:
        return ""
    return f"FSDP over {count} GPUs needs {format_bytes(size / count)} instead of {format_bytes(size)} on each."


def needed_bytes(oom: OutOfMemory) -> float:
    """Return the least GPU memory that this job would have needed."""
    tensors, allocated = wanted_bytes(oom), 0 if oom.reading is None else oom.reading.allocated_bytes
    to_come = max(0, oom.model.model_bytes - (begin_bytes(oom) or allocated))
    if oom.memory is not None and has_completed_steps(oom, full=True):
        tensors, to_come = max(tensors, oom.memory.peak_bytes), 0
    own = 0  # of this process, outside torch's allocator
    if oom.total_bytes is not None and oom.free_bytes is not None and oom.reading is not None:
        own = max(0, oom.total_bytes - oom.free_bytes - oom.reading.reserved_bytes - others_bytes(oom))
    return tensors + to_come + own


def needed(oom: OutOfMemory) -> str:
    """Return ``needed_bytes`` plus 20%, rounded up, as a size for ``--min-free``."""
    least = needed_bytes(oom) * (1 + MARGIN)
    size, unit = (2**30, "GiB") if least >= 2**30 else (2**20, "MiB")
    return f"{math.ceil(least / size)}{unit}"


def raised_limit(oom: OutOfMemory) -> str:
    """Return a sentence on the limit to raise; empty if there is none, or the GPU would be too small without it."""
    allowed, total, free = oom.allowed_bytes, oom.total_bytes, oom.free_bytes
    if allowed is None or total is None or free is None or free < oom.requested_bytes:
        return ""
    if needed_bytes(oom) + others_bytes(oom) > total:
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
    least = max(needed_bytes(oom) * (1 + MARGIN), room_bytes(oom) or 0)
    others = [gpu for gpu in oom.gpus if gpu.uuid != oom.uuid and not gpu.error]
    best = max(others, key=lambda gpu: (gpu.memory_free_bytes or 0, -gpu.index), default=None)
    if best is None or (free := best.memory_free_bytes or 0) < least or oom.uuid is None:
        return ""
    pick = f"CUDA_VISIBLE_DEVICES=$(lightning-gpu-tools pick --min-free {needed(oom)})"
    return f"{'GPU' if best.mig_index is None else 'MIG instance'} {best.number} has {format_bytes(free)} free: {pick}."


def why_host_is_full(run: RunMeasurements, oom: OutOfMemory) -> str:
    """Return the known facts about an error of the host's memory."""
    if oom.workers or oom.oom_kills:
        pids = ", ".join(map(str, oom.workers))
        who = f"worker {pids} of the DataLoader" if pids else "a process of this job"
        return f"The kernel killed {who}, because the memory of this machine or job was full."
    if oom.requested_bytes:
        available = format_bytes(run.host.memory_available_bytes)
        return f"The host has {available} left, but {format_bytes(oom.requested_bytes)} were requested at once."
    return "The memory of this machine or job is full."


def fewer_workers(run: RunMeasurements) -> str:
    """Return advice on fewer workers or prefetched batches; empty without workers."""
    loader = run.loader
    if loader is None or not loader.num_workers:
        return ""
    now = f"num_workers={loader.num_workers}, prefetch_factor={loader.prefetch_factor}"
    return f"Use fewer workers, or prefetch fewer batches (now {now})."
