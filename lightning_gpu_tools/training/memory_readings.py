"""What was counted of the GPU memory of one rank: plain data, the input of the account of memory. Bytes throughout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryReading:
    """What torch's allocator counted for one GPU at one moment.

    Attributes:
        allocated_bytes: In tensors.
        peak_allocated_bytes: The most so far, since the process began or somebody reset the peaks.
        reserved_bytes: What the allocator holds of the GPU; beyond the tensors it is its cache.
        peak_reserved_bytes: The most so far, likewise.
        active_bytes: In tensors, or freed while another stream may still use it.
        requested_bytes: What was asked for; the rest of ``allocated_bytes`` is due to rounding.
        inactive_split_bytes: Free parts of blocks that are in use elsewhere, which cannot go back to the driver. 0 with
            expandable segments and with ``cudaMallocAsync``.
        retries: How often the allocator has emptied its cache to try again.
        ooms: How often it has failed; cuDNN survives some of these.
    """

    allocated_bytes: int
    peak_allocated_bytes: int
    reserved_bytes: int
    peak_reserved_bytes: int
    active_bytes: int = 0
    requested_bytes: int = 0
    inactive_split_bytes: int = 0
    retries: int = 0
    ooms: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMemory:
    """The readings of one training step; ``None`` where the step has no such moment, or did not get there.

    Attributes:
        step: Its number, by the step clock, from 1.
        batch_shape: Shape of the first tensor of its batch; ``None`` if unknown.
        begin: Before forward, with the batch on the GPU. A Trainer's old gradients are still there.
        after_forward: After forward, before gradients are zeroed; none without a Trainer or with manual optimization.
        before_backward: Before the step's first backward, with gradients zeroed.
        after_backward: After it.
        end: After the optimizer.
    """

    step: int
    batch_shape: tuple[int, ...] | None = None
    begin: MemoryReading | None = None
    after_forward: MemoryReading | None = None
    before_backward: MemoryReading | None = None
    after_backward: MemoryReading | None = None
    end: MemoryReading | None = None

    @property
    def readings(self) -> list[MemoryReading]:
        """Those that there are, in order."""
        moments = (self.begin, self.after_forward, self.before_backward, self.after_backward, self.end)
        return [reading for reading in moments if reading is not None]


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryHoldings:
    """What a training holds from step to step on this rank's GPU.

    What is sharded counts as far as it is here, and what is on the CPU does not; what is shared counts once.

    Attributes:
        parameters_bytes: Parameters.
        gradients_bytes: Gradients, as they were after the first backward.
        gradients_kept_bytes: The part of them that is still there when the step has ended.
        gradient_buckets_bytes: DistributedDataParallel's copies of the gradients, which it sends; 0 with
            ``gradient_as_bucket_view=True``.
        optimizer_bytes: States of the optimizers, master weights included.
        buffers_bytes: Buffers of the model.
    """

    parameters_bytes: int = 0
    gradients_bytes: int = 0
    gradients_kept_bytes: int = 0
    gradient_buckets_bytes: int = 0
    optimizer_bytes: int = 0
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
    """A moment of a training in a timeline.

    Attributes:
        time_s: Seconds since training started.
        kept_bytes: In tensors when a step began.
        step_bytes: The most of the readings in it.
        reserved_bytes: What the allocator held of the GPU.
    """

    time_s: float
    kept_bytes: float
    step_bytes: float
    reserved_bytes: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMemory:
    """The GPU memory of one rank over a run.

    Attributes:
        latest: The last reading.
        before_training: The first one, right before training: what was loaded, and a peak by then.
        holdings: What is held from step to step; ``None`` before the optimizer's first step.
        first_step: The step with the optimizer's first step; ``None`` before.
        last_step: The last step that was read to its end; ``None`` before.
        peaks_bytes: By phase in which the peak of the tensors rose, how high: ``before_training``, ``forward``,
            ``backward``, ``optimizer``, ``validation``, or ``training`` where it rose between two readings.
        timeline: The steps that were read, in at most 200 points; empty in what one rank sends to another.
    """

    latest: MemoryReading
    before_training: MemoryReading | None = None
    holdings: MemoryHoldings | None = None
    first_step: StepMemory | None = None
    last_step: StepMemory | None = None
    peaks_bytes: Mapping[str, int] = field(default_factory=dict)
    timeline: tuple[MemoryPoint, ...] = ()

    @property
    def peak_bytes(self) -> int:
        """The most in tensors, also if somebody has reset torch's own peak since."""
        return max([self.latest.peak_allocated_bytes, *self.peaks_bytes.values()])
