"""The largest batch size that fits a GPU's memory, by what was measured at a smaller one. Pure; bytes throughout."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from lightning_gpu_tools.training.memory_readings import RankMemory

# loadtune's target: fill 80 % of the memory. Blocks are larger than the tensors in them, fragments remain between them,
# cuDNN's workspaces vary, and a batch size that fails costs more than one that is a little too small.
MARGIN = 0.20
# Our default, where the peak was in forward, so that no counter tells what backward needs for a moment beside what
# forward has left: three times what forward needed so. Its products have two results, each as large as their input.
_IN_BACKWARD = 3
# Phases in which a peak belongs to a step, as in ``RankMemory.peaks_bytes``.
_IN_STEPS = ("forward", "backward", "optimizer", "training")


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPeak:
    """The memory of a step with a batch of one size.

    Attributes:
        batch_size: Samples in the batch; where they differ in length, numbers in it.
        begin_bytes: In tensors when the step began, without the batch: what does not depend on it.
        peak_bytes: The most in tensors during the step.
        freed_bytes: What is freed between forward and backward: Lightning keeps the old gradients through forward.
        backward_bytes: The most that backward can have needed beside what is left then; ``None``: up to the peak.
        is_complete: Whether the step came to its end; otherwise it would have needed more.
    """

    batch_size: int
    begin_bytes: int
    peak_bytes: int
    freed_bytes: int = 0
    backward_bytes: int | None = None
    is_complete: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class LargestBatch:
    """The largest batch size that fits, or why it is not known.

    Attributes:
        size: In samples; 0 if not even one fits; ``None`` if it cannot be told.
        is_bound: Whether it is only known that larger ones do not fit.
        why_not: Why it cannot be told, as a sentence; empty if it can.
    """

    size: int | None = None
    is_bound: bool = False
    why_not: str = ""


def step_peak(memory: RankMemory, batch_bytes: int = 0, *, by_items: bool = False) -> StepPeak | None:
    """Return the peak of a rank's steps with the size of the last batch; ``None`` where no step tells.

    The optimizer's first step does not: it begins without the states that it makes. Of batches that differ in size, the
    last one may be smaller than the one of the peak, so that too little is found to fit, never too much.

    Args:
        memory: What the rank has counted.
        batch_bytes: Size of the batch, which is there when the step begins.
        by_items: Whether to count numbers in a batch, and not samples.
    """
    step, first = memory.last_step, memory.first_step
    if step is None or first is None or step.step <= first.step or not step.batch_shape or step.begin is None:
        return None
    in_steps = {phase: memory.peaks_bytes[phase] for phase in _IN_STEPS if phase in memory.peaks_bytes}
    begin = max(0, step.begin.allocated_bytes - batch_bytes)
    peak = max([*in_steps.values(), *(one.allocated_bytes for one in step.readings)])
    freed = min(begin, memory.holdings.gradients_kept_bytes) if memory.holdings is not None else 0
    backward = peak - (begin - freed)
    if in_steps.get("forward") == peak and step.after_forward is not None and step.before_backward is not None:
        held = step.before_backward.allocated_bytes - (begin - freed)
        backward = min(backward, held + _IN_BACKWARD * (peak - step.after_forward.allocated_bytes))
    return StepPeak(
        batch_size=math.prod(step.batch_shape) if by_items else step.batch_shape[0],
        begin_bytes=begin,
        peak_bytes=peak,
        freed_bytes=freed,
        backward_bytes=backward,
    )


def largest_batch(peaks: Iterable[StepPeak], room_bytes: float, total_bytes: int) -> LargestBatch:
    """Return the largest batch size whose step fits.

    The step with the largest batch decides: two points do not define a line, because with small batches the optimizer's
    step, or forward with the old gradients, is the peak, and with large ones backward. Beyond what is there when they
    begin, the memory of forward and of backward grows with the batch.

    Args:
        peaks: Of measured steps, from the second one on.
        room_bytes: What the tensors can have of the GPU: all that other processes, CUDA and its libraries leave.
        total_bytes: Size of the memory, of which a part stays free for rounding and fragments.
    """
    known = [peak for peak in peaks if peak.peak_bytes > peak.begin_bytes and peak.batch_size > 0]
    complete = [peak for peak in known if peak.is_complete]
    if not known:
        return LargestBatch(why_not="No step was measured whose batch made the memory rise.")
    step = max(complete or known, key=lambda peak: (peak.batch_size, peak.peak_bytes))
    room_bytes -= MARGIN * total_bytes
    left = step.begin_bytes - step.freed_bytes
    backward = step.peak_bytes - left if step.backward_bytes is None else step.backward_bytes
    parts = [(step.begin_bytes, step.peak_bytes - step.begin_bytes), (left, backward)]
    fit = [step.batch_size * (room_bytes - fixed) / for_batch for fixed, for_batch in parts if for_batch > 0]
    size = max(0, math.floor(min(fit)))
    failed = [peak.batch_size for peak in known if not peak.is_complete]
    if failed and size >= min(failed):  # what failed is proof
        size = min(failed) - 1
    return LargestBatch(size=size, is_bound=not step.is_complete)


def split(batch_size: int, fits: int, accumulate: int = 1) -> tuple[int, int]:
    """Return a batch size of at most ``fits``, and over how many batches to accumulate gradients with it.

    Together they keep the effective batch size, exactly where it can be divided into at most twice as many parts as
    are needed.
    """
    least = math.ceil(batch_size / fits)
    parts = next((parts for parts in range(least, 2 * least + 1) if batch_size % parts == 0), least)
    return math.ceil(batch_size / parts), parts * accumulate
