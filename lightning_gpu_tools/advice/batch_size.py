"""The largest batch size that fits a GPU's memory, by what was measured at a smaller one. Bytes throughout."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from lightning_gpu_tools.training.memory_readings import RankMemory

MARGIN = 0.20  # loadtune's, for rounding, fragments and cuDNN's workspaces
# Our default where a peak in forward hides what backward needs for a moment, by what forward needed so: products have
# two results in backward, each as large as their input.
_IN_BACKWARD = 3
_IN_STEPS = ("forward", "backward", "optimizer", "training")


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPeak:
    """The memory of a step with a batch of one size."""

    batch_size: int  # in samples, or in numbers where samples differ in length
    begin_bytes: int  # in tensors when the step began, without the batch
    peak_bytes: int
    freed_bytes: int = 0  # before backward: Lightning keeps the old gradients through forward
    backward_bytes: int | None = None  # the most backward needed beside what is left then; None: up to the peak
    is_complete: bool = True  # otherwise it failed, and would have needed more


@dataclass(frozen=True, kw_only=True, slots=True)
class LargestBatch:
    """The largest batch size that fits, or why it is not known."""

    size: int | None = None  # 0: not even one sample fits
    is_bound: bool = False  # it is only known that larger ones do not fit
    why_not: str = ""  # why there is no size, as a sentence


def step_peak(memory: RankMemory, batch_bytes: int = 0, *, by_items: bool = False) -> StepPeak | None:
    """Return the peak of a rank's steps with the size of the last batch, in samples or in numbers.

    ``None`` without a step after the first one, which begins without the optimizer's states. Where batches differ in
    size, too little is found to fit, never too much.
    """
    step, first = memory.last_step, memory.first_step
    if step is None or first is None or step.step <= first.step or not step.batch_shape or step.begin is None:
        return None
    in_steps = {phase: memory.peaks_bytes[phase] for phase in _IN_STEPS if phase in memory.peaks_bytes}
    begin = max(0, step.begin.allocated_bytes - batch_bytes)
    peak = max([*in_steps.values(), *(one.allocated_bytes for one in step.readings)])
    freed = min(begin, memory.holdings.gradients_kept_bytes) if memory.holdings is not None else 0
    left = begin - freed
    backward = peak - left
    if in_steps.get("forward") == peak and step.after_forward is not None and step.before_backward is not None:
        for_a_moment = _IN_BACKWARD * (peak - step.after_forward.allocated_bytes)
        backward = min(backward, step.before_backward.allocated_bytes - left + for_a_moment)
    return StepPeak(
        batch_size=math.prod(step.batch_shape) if by_items else step.batch_shape[0],
        begin_bytes=begin,
        peak_bytes=peak,
        freed_bytes=freed,
        backward_bytes=backward,
    )


def largest_batch(peaks: Iterable[StepPeak], room_bytes: float) -> LargestBatch:
    """Return the largest batch size whose step fits.

    The step with the largest batch decides, not a line through two: with small batches the peak is in the optimizer or
    in forward, with large ones in backward. ``room_bytes`` is what other processes and CUDA leave of the GPU; a fifth
    of that stays free.
    """
    known = [peak for peak in peaks if peak.peak_bytes > peak.begin_bytes and peak.batch_size > 0]
    if not known:
        return LargestBatch(why_not="No step was measured whose batch made the memory rise.")
    complete = [peak for peak in known if peak.is_complete]
    step = max(complete or known, key=lambda peak: (peak.batch_size, peak.peak_bytes))
    room_bytes *= 1 - MARGIN
    left = step.begin_bytes - step.freed_bytes
    backward = step.peak_bytes - left if step.backward_bytes is None else step.backward_bytes
    parts = [(step.begin_bytes, step.peak_bytes - step.begin_bytes), (left, backward)]
    fit = [step.batch_size * (room_bytes - fixed) / for_batch for fixed, for_batch in parts if for_batch > 0]
    failed = [peak.batch_size - 1 for peak in known if not peak.is_complete]
    size = min([max(0, math.floor(min(fit))), *failed])
    return LargestBatch(size=size, is_bound=not step.is_complete)


def split(batch_size: int, fits: int, accumulate: int = 1) -> tuple[int, int]:
    """Return a batch size of at most ``fits``, and over how many batches to accumulate gradients with it.

    They keep the effective batch size, exactly where at most twice as many parts as needed divide it.
    """
    least = math.ceil(batch_size / fits)
    parts = next((parts for parts in range(least, 2 * least + 1) if batch_size % parts == 0), least)
    return math.ceil(batch_size / parts), parts * accumulate
