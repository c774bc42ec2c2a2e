"""What was known when an out-of-memory error came: the input of its diagnosis. Bytes throughout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_gpu_tools.advice.memory_errors import OutOfMemoryMessage
from lightning_gpu_tools.gpus.readings import GpuProcess, GpuReading
from lightning_gpu_tools.training.memory_growth import MemoryGrowth
from lightning_gpu_tools.training.memory_readings import MemoryReading, RankMemory
from lightning_gpu_tools.training.phases import OPTIMIZER, VALIDATION, base_phase
from lightning_gpu_tools.units import printable

LOADING_CHECKPOINT = "loading_checkpoint"
SETUP = "setup"
_NEARLY_FULL = 0.05  # our default for the share of free memory below which a message with two meanings counts


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSize:
    """What a model needs on one GPU beside its batch."""

    parameters_bytes: int = 0  # with buffers
    gradients_bytes: int = 0
    optimizer_bytes: int = 0  # states, which come with the optimizer's first step
    fusible: tuple[str, ...] = ()  # names of optimizers that need less with fused=True

    @property
    def total_bytes(self) -> int:
        """The sum."""
        return self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class OutOfMemory:
    """An out-of-memory error that ended a run, and what was known when it came; ``None`` = unknown."""

    message: OutOfMemoryMessage
    phase: str  # of the training thread, as in phase_s, or SETUP or LOADING_CHECKPOINT
    step: int  # of the Trainer, or the batch of a loop
    rank: int = 0
    reading: MemoryReading | None = None  # when torch's allocator failed
    grad_enabled: bool | None = None
    batch_shape: tuple[int, ...] | None = None  # of the first tensor of the batch
    usual_items: float | None = None  # the median count of numbers in it
    memory: RankMemory | None = None
    begins: Sequence[tuple[float, float]] = ()  # (step, bytes in tensors) when steps began, oldest first
    validation_begins: Sequence[tuple[float, float]] = ()  # the same of this validation's batches
    model: ModelSize = ModelSize()  # with 0 for unknown sizes
    uuid: str | None = None  # of the GPU
    gpus: tuple[GpuReading, ...] = ()  # of the machine, read after the error
    own_pids: frozenset[int] | None = None  # this job's processes by the driver's numbers
    orphans: tuple[int, ...] = ()  # processes on this GPU whose parent has ended
    is_sharded: bool = False  # over the ranks
    growth: tuple[MemoryGrowth, ...] = ()
    oom_kills: int = 0  # by the kernel, on this machine, during the run

    @property
    def place(self) -> str:
        """The phase, in words."""
        names = {SETUP: "the setup", LOADING_CHECKPOINT: "loading a checkpoint", OPTIMIZER: "the optimizer"}
        group, _, part = self.phase.partition("/")
        return names.get(self.phase) or printable(part or group.replace("_", " "))

    @property
    def gpu(self) -> GpuReading | None:
        """This GPU, read after the error."""
        return next((gpu for gpu in self.gpus if gpu.uuid is not None and gpu.uuid == self.uuid), None)

    @property
    def total_bytes(self) -> int | None:
        """Size of the GPU's memory."""
        return self.message.total_bytes or (None if self.gpu is None else self.gpu.memory_total_bytes)

    @property
    def free_bytes(self) -> int | None:
        """The part of it that was free."""
        on_gpu = None if self.gpu is None else self.gpu.memory_free_bytes
        return on_gpu if self.message.free_bytes is None else self.message.free_bytes

    @property
    def allocated_bytes(self) -> int | None:
        """What was in tensors."""
        return self.message.allocated_bytes if self.reading is None else self.reading.allocated_bytes

    @property
    def reserved_bytes(self) -> int | None:
        """What torch had of the GPU."""
        if self.reading is not None:
            return self.reading.reserved_bytes
        allocated = self.message.allocated_bytes
        return None if allocated is None else allocated + (self.message.cached_bytes or 0)

    @property
    def requested_bytes(self) -> int:
        """What could not be had; 0 if the message does not say."""
        return self.message.requested_bytes or 0

    @property
    def wanted_bytes(self) -> int:
        """What would have been in tensors."""
        return (self.allocated_bytes or 0) + self.requested_bytes

    @property
    def room_bytes(self) -> int | None:
        """What torch could have of the GPU."""
        if self.reserved_bytes is None or self.free_bytes is None:
            return self.message.allowed_bytes
        left = self.reserved_bytes + self.free_bytes
        return min(left, self.message.allowed_bytes or left)

    @property
    def others(self) -> tuple[GpuProcess, ...]:
        """Other jobs' processes on the GPU, the largest first."""
        found = [GpuProcess(pid=pid, memory_used_bytes=size) for pid, size in self.message.others_bytes.items()]
        if self.gpu is not None and self.gpu.processes and self.own_pids is not None:
            found = [one for one in self.gpu.processes if one.pid not in self.own_pids]
        return tuple(sorted(found, key=lambda one: -(one.memory_used_bytes or 0)))

    @property
    def others_bytes(self) -> int:
        """Their memory, as far as the driver reports it."""
        return sum(one.memory_used_bytes or 0 for one in self.others)

    @property
    def has_completed_steps(self) -> bool:
        """Whether the optimizer has made a step before."""
        return self.memory is not None and self.memory.first_step is not None

    @property
    def begin_bytes(self) -> int | None:
        """What was in tensors when this step or validation batch began."""
        begins = self.validation_begins if base_phase(self.phase) == VALIDATION else self.begins
        return int(begins[-1][1]) if begins else None

    @property
    def kept_bytes(self) -> int:
        """What was in tensors then beside the model; 0 if that is unknown."""
        return max(0, (self.begin_bytes or 0) - self.model.total_bytes) if self.model.total_bytes else 0


def is_out_of_memory(oom: OutOfMemory) -> bool:
    """Return whether memory was short, also where the message has another meaning."""
    if oom.message.is_certain:
        return True
    if oom.message.source == "host":
        return oom.oom_kills > 0
    return oom.total_bytes is not None and (oom.free_bytes or 0) < _NEARLY_FULL * oom.total_bytes
