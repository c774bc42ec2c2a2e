"""An out-of-memory error and what was known when it came: the input of its diagnosis. Pure; bytes throughout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from lightning_gpu_tools.advice.memory_errors import OutOfMemoryMessage
from lightning_gpu_tools.gpus.readings import GpuProcess, GpuReading
from lightning_gpu_tools.training.memory_growth import MemoryGrowth
from lightning_gpu_tools.training.memory_readings import MemoryReading, RankMemory
from lightning_gpu_tools.training.phases import OPTIMIZER, VALIDATION, base_phase
from lightning_gpu_tools.units import printable

# Where an error came before training began.
LOADING_CHECKPOINT = "loading_checkpoint"
SETUP = "setup"
# Our default: what a message may mean, too, counts as an error of memory if less than this share of it is free.
_NEARLY_FULL = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSize:
    """What a model needs on one GPU beside its batch.

    Attributes:
        parameters_bytes: Parameters and buffers.
        gradients_bytes: Gradients, of what is trained.
        optimizer_bytes: States of the optimizers, which come with their first step.
        fusible: Names of optimizers that need less with ``fused=True``.
    """

    parameters_bytes: int = 0
    gradients_bytes: int = 0
    optimizer_bytes: int = 0
    fusible: tuple[str, ...] = ()

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes


@dataclass(frozen=True, kw_only=True)
class OutOfMemory:
    """An out-of-memory error that has ended a run, and what was known when it came; ``None`` = unknown.

    Attributes:
        message: What the error says.
        phase: What the training thread was doing, as in ``phase_s``, or ``"setup"`` or ``"loading_checkpoint"``.
        step: The step of the Trainer, or the batch of a loop.
        rank: Which rank.
        reading: What torch's allocator counted when it failed.
        grad_enabled: Whether a graph was recorded then.
        batch_shape: Shape of the first tensor of the batch.
        usual_items: How many numbers it has in other batches: the median.
        memory: What was counted of the run.
        begins: (step, bytes in tensors) when steps began, oldest first.
        validation_begins: (batch, bytes in tensors) when the batches of this validation began.
        model: What the model needs; its sizes are 0 where they are unknown.
        uuid: The GPU.
        gpus: All GPUs of the machine, read after the error.
        own_pids: This job's processes by the driver's numbers.
        orphans: Processes on this GPU whose parent has ended.
        is_sharded: Whether the model is sharded over the ranks already.
        growth: Memory that has grown steadily.
        oom_kills: Processes that the kernel has killed on this machine during the run, because memory ran out.
    """

    message: OutOfMemoryMessage
    phase: str
    step: int
    rank: int = 0
    reading: MemoryReading | None = None
    grad_enabled: bool | None = None
    batch_shape: tuple[int, ...] | None = None
    usual_items: float | None = None
    memory: RankMemory | None = None
    begins: Sequence[tuple[float, float]] = ()
    validation_begins: Sequence[tuple[float, float]] = ()
    model: ModelSize = ModelSize()
    uuid: str | None = None
    gpus: tuple[GpuReading, ...] = ()
    own_pids: frozenset[int] | None = None
    orphans: tuple[int, ...] = ()
    is_sharded: bool = False
    growth: tuple[MemoryGrowth, ...] = ()
    oom_kills: int = 0

    @property
    def place(self) -> str:
        """Where it came, in words."""
        names = {SETUP: "the setup", LOADING_CHECKPOINT: "loading a checkpoint", OPTIMIZER: "the optimizer"}
        group, _, part = self.phase.partition("/")
        return names.get(self.phase) or printable(part or group.replace("_", " "))

    @cached_property
    def gpu(self) -> GpuReading | None:
        """This GPU, read after the error."""
        return next((gpu for gpu in self.gpus if gpu.uuid is not None and gpu.uuid == self.uuid), None)

    @cached_property
    def total_bytes(self) -> int | None:
        """All memory of the GPU."""
        return self.message.total_bytes or (None if self.gpu is None else self.gpu.memory_total_bytes)

    @cached_property
    def free_bytes(self) -> int | None:
        """What was free of it."""
        if self.message.free_bytes is not None:
            return self.message.free_bytes
        return None if self.gpu is None else self.gpu.memory_free_bytes

    @cached_property
    def allocated_bytes(self) -> int | None:
        """What was in tensors."""
        return self.message.allocated_bytes if self.reading is None else self.reading.allocated_bytes

    @cached_property
    def reserved_bytes(self) -> int | None:
        """What torch had of the GPU."""
        return self.message.reserved_bytes if self.reading is None else self.reading.reserved_bytes

    @property
    def requested_bytes(self) -> int:
        """What could not be had; 0 if the message does not say."""
        return self.message.requested_bytes or 0

    @cached_property
    def room_bytes(self) -> int | None:
        """What torch could have of the GPU: what others and CUDA itself left, or what it was allowed."""
        if self.reserved_bytes is None or self.free_bytes is None:
            return self.message.allowed_bytes
        return min(self.reserved_bytes + self.free_bytes, self.message.allowed_bytes or math.inf)  # type: ignore[return-value]

    @cached_property
    def others(self) -> tuple[GpuProcess, ...]:
        """The processes of others on the GPU, the largest first."""
        if self.gpu is not None and self.gpu.processes and self.own_pids is not None:
            found = [one for one in self.gpu.processes if one.pid not in self.own_pids]
        else:
            found = [GpuProcess(pid=pid, memory_used_bytes=size) for pid, size in self.message.others_bytes.items()]
        return tuple(sorted(found, key=lambda one: -(one.memory_used_bytes or 0)))

    @property
    def others_bytes(self) -> int:
        """What they use, as far as the driver says."""
        return sum(one.memory_used_bytes or 0 for one in self.others)

    @property
    def has_completed_steps(self) -> bool:
        """Whether a step with the optimizer came to its end before."""
        return self.memory is not None and self.memory.first_step is not None

    @cached_property
    def begin_bytes(self) -> int | None:
        """What was in tensors when this step, or validation, began."""
        begins = self.validation_begins if base_phase(self.phase) == VALIDATION else self.begins
        return int(begins[-1][1]) if begins else None

    @property
    def kept_bytes(self) -> int:
        """What was in tensors then beside the model; 0 if that is unknown."""
        is_known = self.begin_bytes is not None and self.model.total_bytes
        return max(0, (self.begin_bytes or 0) - self.model.total_bytes) if is_known else 0


def is_out_of_memory(oom: OutOfMemory) -> bool:
    """Return whether memory was short, where the message may mean something else, too."""
    if oom.message.is_certain:
        return True
    if oom.message.source == "host":
        return oom.oom_kills > 0
    return oom.total_bytes is not None and (oom.free_bytes or 0) < _NEARLY_FULL * oom.total_bytes
