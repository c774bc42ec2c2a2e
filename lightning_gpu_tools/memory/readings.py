"""Memory readings of one rank, and memory that has grown. Plain data, always in bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from lightning_gpu_tools.gpus.metrics import GpuSample


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryReading:
    """The counters of torch's allocator for one GPU at one moment, or those in an error. 0 = unknown."""

    allocated_bytes: int  # in tensors
    reserved_bytes: int  # held by the allocator: tensors and its cache
    peak_allocated_bytes: int = 0  # until it is reset
    peak_reserved_bytes: int = 0  # until it is reset
    # Free parts of blocks, which cannot be returned to the driver; 0 with expandable segments and cudaMallocAsync.
    inactive_split_bytes: int = 0
    inactive_splits: int = 0  # number of these parts
    retries: int = 0  # allocations retried after the allocator emptied its cache
    allocations: int = 0  # number of tensors allocated so far


Stack = Sequence[Mapping[str, Any]]  # as torch records it, innermost frame first


class Block(NamedTuple):
    """A block of torch's allocator: allocated, released, or listed in a segment."""

    address: int
    size: int  # in bytes, in a segment of the whole block, else as requested; negative for a release
    grows: bool = False  # with the batch
    phase: str = ""
    stack: Stack = ()  # of its allocation; empty if it was not recorded, or no Python ran
    is_free: bool = False
    is_small: bool = False  # in a segment for blocks of up to 1 MiB


Segment = tuple[Block, ...]  # memory that the allocator has taken from the driver: its blocks from end to end


class MemoryLine(NamedTuple):
    """A source line, and the GPU memory that was allocated there."""

    bytes: int
    blocks: int
    phase: str = ""  # forward, backward or optimizer; empty if unknown
    file: str = ""  # empty where no Python ran, as in backward
    line: int = 0
    function: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMemory:
    """The memory of one training step.

    ``readings`` has these moments in this order, if the step has and reaches them. The first four include the batch
    and, with a Trainer, the first three include the old gradients.

    - ``begin``
    - ``after_forward``, only with automatic optimization
    - ``before_backward``, the first one
    - ``after_backward``
    - ``end``, after the optimizer
    """

    step: int  # by the step clock, starting at 1
    batch_shape: tuple[int, ...] = ()  # of the first tensor of the batch; empty if unknown
    readings: Mapping[str, MemoryReading] = field(default_factory=dict)
    added_bytes: int = 0  # by its own allocations at their peak, or by those of the last step that was recorded
    # For a replay, not sent to other ranks:
    segments: tuple[Segment, ...] = ()  # when the step began, if it is the first one recorded
    events: tuple[Block, ...] = ()  # its allocations and releases, without stacks


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryHoldings:
    """The memory that training holds on this rank's GPU across steps: only own shards, and shared storage once."""

    parameters_bytes: int = 0
    gradients_bytes: int = 0  # after the first backward
    gradients_kept_bytes: int = 0  # the part that remains at the end of the step
    gradient_buckets_bytes: int = 0  # DistributedDataParallel's copies; 0 with gradient_as_bucket_view=True
    optimizer_bytes: int = 0  # including master weights
    buffers_bytes: int = 0
    workspaces_bytes: int = 0  # of cuBLAS, allocated by torch for each of its handles and streams

    @property
    def model_bytes(self) -> int:
        """The model with its gradients and optimizer states."""
        return self.parameters_bytes + self.buffers_bytes + self.gradients_bytes + self.optimizer_bytes

    @property
    def between_steps_bytes(self) -> int:
        """The part that remains between two steps."""
        kept_bytes = self.gradients_kept_bytes + self.gradient_buckets_bytes + self.workspaces_bytes
        return self.model_bytes - self.gradients_bytes + kept_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMemory:
    """The GPU memory of one rank over a run."""

    latest: MemoryReading
    gpu: tuple[int, int, str] = (0, 0, "")  # on which it trains: node, index and UUID
    samples: tuple[GpuSample, ...] = ()  # of the GPUs of its node, if this rank polls the driver
    own_pids: tuple[int, ...] | None = None  # the driver's PIDs of this job on its node, as far as known
    kept_bytes: int = 0  # in tensors when the last step began, if memory ran out in it; else 0
    before_training: MemoryReading | None = None
    earlier_bytes: int = 0  # in tensors that existed before training and are not the model's or the optimizer's
    holdings: MemoryHoldings | None = None  # None before the optimizer's first step
    first_step: StepMemory | None = None  # with the optimizer's first step
    last_step: StepMemory | None = None  # the last step read to its end
    # For a replay: the first step, the optimizer's first, and the first with its states and old gradients. The first
    # two may be the same step, and the third may not exist yet. Empty if unknown.
    recorded: tuple[StepMemory, ...] = ()
    room_bytes: int = 0  # the most that torch could use next to other processes; 0 = unknown
    # The ten lines with the most memory: at the peak of the last recorded step, and left by earlier recorded steps.
    peak_lines: tuple[MemoryLine, ...] = ()
    kept_lines: tuple[MemoryLine, ...] = ()
    # Peak of memory in tensors, by where it rose: before_training, forward, backward, optimizer, validation, or
    # training if it rose between two readings.
    peaks_bytes: Mapping[str, int] = field(default_factory=dict)

    @property
    def peak_bytes(self) -> int:
        """The peak of memory in tensors, even if torch's own peak was reset since."""
        return max([self.latest.peak_allocated_bytes, *self.peaks_bytes.values()])


# gpu: in tensors at the start of steps; process: host memory of the training process; workers: memory of all workers of
# the loader together, without the part that they share.
Whose = Literal["gpu", "process", "workers"]


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryGrowth:
    """Memory that grew steadily over a run."""

    whose: Whose
    bytes_per_s: float
    grown_bytes: float  # growth after the first fifth of the run
    left_s: float | None = None  # seconds until memory is full at this rate; None if the limit is unknown
