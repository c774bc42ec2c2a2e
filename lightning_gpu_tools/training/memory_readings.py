"""What was counted of the GPU memory of one rank, as plain data. Bytes throughout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


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
    # Where the tensors' peak rose, how high: before_training, forward, backward, optimizer, validation, or training
    # if it was between two readings.
    peaks_bytes: Mapping[str, int] = field(default_factory=dict)
    timeline: tuple[MemoryPoint, ...] = ()  # at most 200 points; not sent to other ranks

    @property
    def peak_bytes(self) -> int:
        """The most in tensors, also if somebody has reset torch's own peak since."""
        return max([self.latest.peak_allocated_bytes, *self.peaks_bytes.values()])
