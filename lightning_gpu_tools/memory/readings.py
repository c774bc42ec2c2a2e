"""Memory readings of one rank, and memory that has grown. Plain data, always in bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryReading:
    """The counters of torch's allocator for one GPU at one moment. Peaks last until they are reset."""

    allocated_bytes: int  # in tensors
    peak_allocated_bytes: int
    reserved_bytes: int  # held by the allocator: tensors and its cache
    peak_reserved_bytes: int
    # Free parts of blocks, which cannot be returned to the driver; 0 with expandable segments and cudaMallocAsync.
    inactive_split_bytes: int = 0
    inactive_splits: int = 0  # number of these parts; 0 = unknown
    retries: int = 0  # allocations retried after the allocator emptied its cache
    allocations: int = 0  # number of tensors allocated so far


Stack = Sequence[Mapping[str, Any]]  # as torch records it, innermost frame first


class Block(NamedTuple):
    """A block of GPU memory that was allocated, or released."""

    address: int
    size: int  # as requested, in bytes; negative for a release
    grows: bool = False  # with the batch
    phase: str = ""
    stack: Stack = ()  # of its allocation; empty if it was not recorded, or no Python ran


class Segment(NamedTuple):
    """Memory that torch's allocator has taken from the driver, and its blocks from end to end."""

    is_small: bool  # for blocks of up to 1 MiB
    blocks: tuple[tuple[int, int, bool], ...]  # address, size, and whether it is free


class RecordedStep(NamedTuple):
    """The allocations of one step."""

    step: int
    batch_shape: tuple[int, ...]  # of the first tensor of its batch
    events: tuple[Block, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedSteps:
    """The allocations of the first step, of the optimizer's first, and of the first with its states and old gradients.

    The first two may be the same step, and the third may not exist yet.
    """

    segments: tuple[Segment, ...]  # when the first step began
    steps: tuple[RecordedStep, ...]
    room_bytes: int = 0  # the most that torch could use next to other processes; 0 = unknown


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
    """The readings of one training step, for the moments that exist in it and that it reached."""

    step: int  # by the step clock, starting at 1
    batch_shape: tuple[int, ...] | None = None  # of the first tensor of the batch
    begin: MemoryReading | None = None  # includes the batch and, with a Trainer, the old gradients
    after_forward: MemoryReading | None = None  # includes the same; only with automatic optimization
    before_backward: MemoryReading | None = None  # before the first backward
    after_backward: MemoryReading | None = None
    end: MemoryReading | None = None  # after the optimizer
    added_bytes: int = 0  # by its own allocations at their peak, or by those of the last step that was recorded

    @property
    def readings(self) -> list[MemoryReading]:
        """The existing readings, in order."""
        moments = (self.begin, self.after_forward, self.before_backward, self.after_backward, self.end)
        return [reading for reading in moments if reading is not None]


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
    def between_steps_bytes(self) -> int:
        """The part that remains between two steps."""
        return (
            self.parameters_bytes
            + self.gradients_kept_bytes
            + self.gradient_buckets_bytes
            + self.optimizer_bytes
            + self.buffers_bytes
            + self.workspaces_bytes
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMemory:
    """The GPU memory of one rank over a run."""

    latest: MemoryReading
    kept_bytes: int = 0  # in tensors when the last step began, if memory ran out in it; else 0
    before_training: MemoryReading | None = None
    earlier_bytes: int = 0  # in tensors that existed before training and are not the model's or the optimizer's
    holdings: MemoryHoldings | None = None  # None before the optimizer's first step
    first_step: StepMemory | None = None  # with the optimizer's first step
    last_step: StepMemory | None = None  # the last step read to its end
    recorded: RecordedSteps | None = None  # not sent to other ranks
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
