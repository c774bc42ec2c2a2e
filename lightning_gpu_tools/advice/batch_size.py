"""The largest batch size that fits a GPU's memory, from the record of a smaller one. All sizes are in bytes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from lightning_gpu_tools.training.memory_readings import RankMemory, StepNeed

# Our default, as a part of the memory left for the batch. Up to 16 % was in pieces that no tensor can use, with ten
# models on a simulated GPU (benchmarks/out_of_memory.py).
FRAGMENTS = 0.16


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPeak:
    """The memory of a step at one batch size."""

    batch_size: int  # in samples, or in elements if samples differ in length
    begin_bytes: int  # in tensors when the step began, without the batch
    needs: tuple[StepNeed, ...]  # in addition to begin_bytes, at its decisive moments, with the batch
    is_complete: bool = True  # if False, it failed and would have needed more


@dataclass(frozen=True, kw_only=True, slots=True)
class LargestBatch:
    """The largest batch size that fits, or the reason why it is unknown."""

    size: int | None = None  # 0: not even one sample fits
    is_bound: bool = False  # an upper bound: it is only known that larger sizes do not fit
    why_not: str = ""  # why there is no size, as a sentence


def step_peak(
    memory: RankMemory, batch_bytes: int = 0, *, accumulates: bool = False, by_items: bool = False
) -> StepPeak | None:
    """Return the memory needs of a rank's recorded step, with its batch size in samples or in elements.

    ``None`` without such a step, or before it is known what the optimizer's first step leaves. The very first step
    begins without that memory, so it is added. With gradient accumulation, other steps keep gradients in backward.
    """
    step, first, held = memory.traced_step, memory.first_step, memory.holdings
    if step is None or first is None or held is None or step.begin is None or not step.batch_shape:
        return None
    to_come = held.optimizer_bytes + held.gradients_kept_bytes if step.step <= first.step else 0
    return StepPeak(
        batch_size=math.prod(step.batch_shape) if by_items else step.batch_shape[0],
        begin_bytes=max(0, step.begin.allocated_bytes - batch_bytes) + to_come,
        needs=tuple(
            StepNeed(max(0, need.fixed_bytes) if accumulates else need.fixed_bytes, need.batch_bytes + batch_bytes)
            for need in step.needs
        ),
    )


def largest_batch(peaks: Iterable[StepPeak], room_bytes: float) -> LargestBatch:
    """Return the largest batch size whose step fits.

    ``room_bytes`` is the GPU memory that other processes and CUDA leave. A part of the memory left for the batch stays
    free, for fragments.
    """
    known = [peak for peak in peaks if peak.batch_size > 0 and any(need.batch_bytes > 0 for need in peak.needs)]
    if not known:
        return LargestBatch(why_not="No step was recorded whose batch made the memory rise.")
    complete = [peak for peak in known if peak.is_complete]
    step = max(complete or known, key=lambda peak: peak.batch_size)
    left = room_bytes - step.begin_bytes
    rooms = [(need, left - need.fixed_bytes) for need in step.needs]
    fit = [step.batch_size * (1 - FRAGMENTS) * room / need.batch_bytes for need, room in rooms if need.batch_bytes]
    if any(room < 0 for _, room in rooms):
        fit = [0]
    failed = [peak.batch_size - 1 for peak in known if not peak.is_complete]
    size = min([max(0, math.floor(min(fit))), *failed])
    return LargestBatch(size=size, is_bound=not step.is_complete)


def split(batch_size: int, fits: int, accumulate: int = 1) -> tuple[int, int]:
    """Return a batch size of at most ``fits``, and the number of batches over which to accumulate gradients.

    They keep the effective batch size. It is exact if at most twice the minimum number of parts divides it.
    """
    least = math.ceil(batch_size / fits)
    parts = next((parts for parts in range(least, 2 * least + 1) if batch_size % parts == 0), least)
    return math.ceil(batch_size / parts), parts * accumulate
