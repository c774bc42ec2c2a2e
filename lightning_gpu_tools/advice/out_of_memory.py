"""What an out-of-memory error shows, and remedies that its causes share. Pure; all sizes are in bytes."""

import math
from typing import NamedTuple

from lightning_gpu_tools.memory.readings import LOADING_CHECKPOINT, SETUP, OutOfMemory, RankMemory
from lightning_gpu_tools.training.phases import OPTIMIZER, OUTSIDE_LOOP, VALIDATION, base_phase
from lightning_gpu_tools.training.run_measurements import RunMeasurements
from lightning_gpu_tools.units import format_bytes, printable

CUDA_CONTEXT_BYTES = 3 * 2**30 // 10  # 0.3 GiB: pytorch issue 107667
CONTEXT_BYTES = 2**30  # if not reported: a CUDA context, and NCCL's 0.7 GB (nccl issue 964)
MIN_SHARE = 0.10  # our default: the smallest share of the memory that can be a cause
MARGIN = 0.20  # loadtune's, of a job's need: for rounding, fragments and cuDNN's workspaces
_MIN_UNLISTED = 0.10  # our default: from this share of the GPU, memory without an owner belongs to other processes
_NEARLY_FULL = 0.05  # our default: below this share of free memory, an ambiguous message counts
_MIN_FREED = 0.1  # our default: the share of the activations below which lower precision is not worth a change
_LEFT_BY_CHECKPOINTING = 0.2  # measured in a transformer of 6 layers: 5.7 of 28.2 MiB per sample


class ErrorFacts(NamedTuple):
    """The facts for a cause of an out-of-memory error; ``None`` = unknown."""

    run: RunMeasurements
    oom: OutOfMemory

    @property
    def in_validation(self) -> bool:
        """Whether the error occurred in validation."""
        return base_phase(self.oom.phase) == VALIDATION

    @property
    def has_completed_step(self) -> bool:
        """Whether the optimizer has completed a step before."""
        return self.oom.memory is not None and self.oom.memory.first_step is not None

    @property
    def full_memory(self) -> RankMemory | None:
        """The memory of the run, once a step has ended that began with the optimizer's states and old gradients."""
        memory = self.oom.memory
        if memory is None or memory.first_step is None or memory.last_step is None:
            return None
        return memory if memory.last_step.step > memory.first_step.step else None

    @property
    def allocated_bytes(self) -> int:
        """The size of all tensors; 0 if unknown."""
        return 0 if self.oom.reading is None else self.oom.reading.allocated_bytes

    @property
    def wanted_bytes(self) -> int:
        """The memory that tensors would have taken with this allocation."""
        return self.allocated_bytes + self.oom.requested_bytes

    @property
    def taken_bytes(self) -> int | None:
        """The part of ``wanted_bytes`` beyond that at the begin of the step."""
        begin = self.oom.begin_bytes
        return None if self.oom.reading is None or begin is None else self.wanted_bytes - begin

    @property
    def kept_bytes(self) -> int:
        """The part of the memory at the begin of the step that does not belong to the model; 0 if unknown."""
        model = self.oom.model.model_bytes
        return max(0, (self.oom.begin_bytes or 0) - model) if model else 0

    @property
    def room_bytes(self) -> int | None:
        """The most GPU memory that torch could have."""
        oom = self.oom
        if oom.reading is None or oom.free_bytes is None:
            return oom.allowed_bytes
        left = oom.reading.reserved_bytes + oom.free_bytes
        return min(left, oom.allowed_bytes or left)

    @property
    def unlisted_bytes(self) -> int:
        """The memory of processes that the driver does not list here, as of other containers; 0 if negligible."""
        oom = self.oom
        if oom.total_bytes is None or oom.free_bytes is None or oom.reading is None:
            return 0
        own = oom.own_bytes or oom.reading.reserved_bytes + CONTEXT_BYTES
        left = oom.total_bytes - oom.free_bytes - own - sum(process.memory_used_bytes or 0 for process in oom.others)
        return left if left >= _MIN_UNLISTED * oom.total_bytes else 0

    @property
    def others_bytes(self) -> int:
        """All known memory of other processes."""
        return sum(process.memory_used_bytes or 0 for process in self.oom.others) + self.unlisted_bytes

    @property
    def needed_bytes(self) -> float:
        """The least GPU memory that this job would have needed."""
        oom = self.oom
        tensors, to_come = self.wanted_bytes, oom.model.model_bytes - (oom.begin_bytes or self.allocated_bytes)
        if self.full_memory is not None:
            tensors, to_come = max(tensors, self.full_memory.peak_bytes), 0
        own = 0  # of this process, outside torch's allocator
        if oom.total_bytes is not None and oom.free_bytes is not None and oom.reading is not None:
            own = oom.total_bytes - oom.free_bytes - oom.reading.reserved_bytes - self.others_bytes
        return tensors + max(0, to_come) + max(0, own)

    @property
    def needed(self) -> str:
        """``needed_bytes`` plus 20%, rounded up, as a size for ``--min-free``."""
        least = self.needed_bytes * (1 + MARGIN)
        size, unit = (2**30, "GiB") if least >= 2**30 else (2**20, "MiB")
        return f"{math.ceil(least / size)}{unit}"


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


def is_pool_of_driver(oom: OutOfMemory) -> bool:
    """Return whether torch allocates with cudaMallocAsync, from a pool of the driver."""
    return "backend:cudaMallocAsync" in oom.allocator


def levers(facts: ErrorFacts) -> str:
    """Return changes that free memory at the same batch size, each with the amount."""
    run, oom = facts
    step = None if oom.memory is None else oom.memory.last_step
    activations = max((facts.taken_bytes or 0) - oom.requested_bytes, 0 if step is None else step.forward_bytes)
    if activations <= 0 or facts.in_validation:
        return ""
    left = format_bytes(_LEFT_BY_CHECKPOINTING * activations)
    found = [f"activation checkpointing (about {left} instead of {format_bytes(activations)})"] * (run.stage == "fit")
    halved = (activations - oom.model.parameters_bytes) / 2  # autocast keeps a 16-bit copy of the weights
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


def another_gpu(facts: ErrorFacts) -> str:
    """Return a sentence on a GPU of this machine with enough free memory; empty without one."""
    oom = facts.oom
    least = max(facts.needed_bytes * (1 + MARGIN), facts.room_bytes or 0)
    others = [gpu for gpu in oom.gpus if gpu.uuid != oom.uuid and not gpu.error]
    best = max(others, key=lambda gpu: (gpu.memory_free_bytes or 0, -gpu.index), default=None)
    free = 0 if best is None else best.memory_free_bytes or 0
    if best is None or free < least or oom.uuid is None or oom.allowed_bytes is not None:  # a limit holds there as well
        return ""
    pick = f"CUDA_VISIBLE_DEVICES=$(lightning-gpu-tools pick --min-free {facts.needed})"
    return f"{'GPU' if best.mig_index is None else 'MIG instance'} {best.number} has {format_bytes(free)} free: {pick}."


def why_host_is_full(oom: OutOfMemory) -> str:
    """Return what ran out of the host's memory."""
    if oom.workers or oom.oom_kills:
        pids = ", ".join(map(str, oom.workers))
        who = f"worker {pids} of the DataLoader" if pids else "a process of this job"
        return f"The kernel killed {who}, because the memory of this machine or job was full."
    return "The memory of this machine or job is full."


def fewer_workers(run: RunMeasurements) -> str:
    """Return advice on fewer workers or prefetched batches; empty without workers."""
    loader = run.loader
    if loader is None or not loader.num_workers:
        return ""
    now = f"num_workers={loader.num_workers}, prefetch_factor={loader.prefetch_factor}"
    return f"Use fewer workers, or prefetch fewer batches (now {now})."
