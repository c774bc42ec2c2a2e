"""What was counted of the memory of one rank, and whether memory grows. Plain data, bytes throughout."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal, NamedTuple


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryReading:
    """What torch's allocator counted for one GPU at one moment. Peaks last until somebody resets them."""

    allocated_bytes: int  # in tensors
    peak_allocated_bytes: int
    reserved_bytes: int  # held by the allocator: tensors and its cache
    peak_reserved_bytes: int
    # Free parts of blocks, which cannot go back to the driver; 0 with expandable segments and cudaMallocAsync.
    inactive_split_bytes: int = 0
    retries: int = 0  # after the allocator has emptied its cache
    allocations: int = 0  # of tensors so far


class StepNeed(NamedTuple):
    """What a step needs at a moment beside what was there when it began."""

    fixed_bytes: int
    batch_bytes: int  # that grow with the batch


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMemory:
    """The readings of one training step, as far as it has such moments and got there."""

    step: int  # by the step clock, from 1
    batch_shape: tuple[int, ...] | None = None  # of the first tensor of the batch
    begin: MemoryReading | None = None  # with the batch, and with a Trainer the old gradients
    after_forward: MemoryReading | None = None  # likewise; with automatic optimization alone
    before_backward: MemoryReading | None = None  # of the first one
    after_backward: MemoryReading | None = None
    end: MemoryReading | None = None  # after the optimizer
    needs: tuple[StepNeed, ...] = ()  # its moments that decide which batch fits; of few steps

    @property
    def readings(self) -> list[MemoryReading]:
        """Those that there are, in order."""
        moments = (self.begin, self.after_forward, self.before_backward, self.after_backward, self.end)
        return [reading for reading in moments if reading is not None]


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryHoldings:
    """What a training holds on this rank's GPU from step to step: its own shards, and shared storage once."""

    parameters_bytes: int = 0
    gradients_bytes: int = 0  # after the first backward
    gradients_kept_bytes: int = 0  # of them, when the step has ended
    gradient_buckets_bytes: int = 0  # DistributedDataParallel's copies; 0 with gradient_as_bucket_view=True
    optimizer_bytes: int = 0  # master weights included
    buffers_bytes: int = 0

    @property
    def between_steps_bytes(self) -> int:
        """What of it is there between two steps."""
        return (
            self.parameters_bytes
            + self.gradients_kept_bytes
            + self.gradient_buckets_bytes
            + self.optimizer_bytes
            + self.buffers_bytes
        )


class MemoryPoint(NamedTuple):
    """A moment of a training in a timeline."""

    time_s: float  # since training started
    kept_bytes: float  # in tensors when a step began
    step_bytes: float  # the most of the readings in it
    reserved_bytes: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMemory:
    """The GPU memory of one rank over a run."""

    latest: MemoryReading
    before_training: MemoryReading | None = None
    holdings: MemoryHoldings | None = None  # None before the optimizer's first step
    first_step: StepMemory | None = None  # the one with the optimizer's first step
    last_step: StepMemory | None = None  # the last one that was read to its end
    traced_step: StepMemory | None = None  # the last one with its needs
    # Where the tensors' peak rose, how high: before_training, forward, backward, optimizer, validation, or training
    # if it was between two readings.
    peaks_bytes: Mapping[str, int] = field(default_factory=dict)
    timeline: tuple[MemoryPoint, ...] = ()  # at most 200 points; not sent to other ranks

    @property
    def peak_bytes(self) -> int:
        """The most in tensors, also if somebody has reset torch's own peak since."""
        return max([self.latest.peak_allocated_bytes, *self.peaks_bytes.values()])


# Our defaults.
_PARTS = 8  # of a run, whose medians all have to rise; by chance those of 1 run in 8! = 40320 do
_WARM_UP_SHARE = 0.2  # left out: caches, workers and the allocator fill up
_MIN_POINTS_PER_PART = 3
_MIN_GROWTH_BYTES = 64 * 2**20
# What levels off grows less in the second half: a square root gains 0.7 as much there.
_MIN_SECOND_HALF = 0.8

# In tensors on the GPU when steps begin; of the training process on the host; of the loader's workers together beyond
# what they share.
Whose = Literal["gpu", "process", "workers"]


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryGrowth:
    """Memory that grew steadily over a run."""

    whose: Whose
    bytes_per_s: float
    grown_bytes: float  # after the first fifth of the run
    left_s: float | None = None  # until the memory is full at this rate; None if the limit is unknown
    phase: Literal["training", "validation"] | None = None  # where most of it grew


def steady_growth(whose: Whose, points: Sequence[tuple[float, float]], room_bytes: float | None) -> MemoryGrowth | None:
    """Return how memory grew by (seconds, bytes), oldest first; ``None`` if not steadily to the end, or too few points.

    ``room_bytes`` more would fit; ``None`` = unknown.
    """
    if not points:
        return None
    first_s, last_s = points[0][0], points[-1][0]
    begin_s = first_s + _WARM_UP_SHARE * (last_s - first_s)
    part_s = (last_s - begin_s) / _PARTS
    if part_s <= 0:
        return None
    parts: list[list[tuple[float, float]]] = [[] for _ in range(_PARTS)]
    for time_s, size in points:
        if time_s >= begin_s:
            parts[min(int((time_s - begin_s) / part_s), _PARTS - 1)].append((time_s, size))
    if min(map(len, parts)) < _MIN_POINTS_PER_PART:
        return None
    times = [median(time_s for time_s, _ in part) for part in parts]
    sizes = [median(size for _, size in part) for part in parts]
    middle = _PARTS // 2
    first_half, second_half = sizes[middle - 1] - sizes[0], sizes[-1] - sizes[middle]
    rises = all(after > before for before, after in itertools.pairwise(sizes))
    if not rises or sizes[-1] - sizes[0] < _MIN_GROWTH_BYTES or second_half < _MIN_SECOND_HALF * first_half:
        return None
    slope = median((sizes[j] - sizes[i]) / (times[j] - times[i]) for i in range(_PARTS) for j in range(i + 1, _PARTS))
    left_s = None if room_bytes is None else max(0.0, room_bytes) / slope
    return MemoryGrowth(whose=whose, bytes_per_s=slope, grown_bytes=sizes[-1] - sizes[0], left_s=left_s)
