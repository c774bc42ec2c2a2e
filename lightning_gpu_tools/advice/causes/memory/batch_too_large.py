"""batch_too_large: the batch, in training or in validation, takes more memory than the model leaves.

Reads the counters of torch's allocator: the memory that the step took beyond what was there before it. A batch size
that fit before, in less memory, is not the cause. The largest batch that fits comes from a replay of the allocations of
recorded steps.
"""

import math

from lightning_gpu_tools.advice.batch_size import bound_by_failure, largest_batch, split
from lightning_gpu_tools.advice.findings import SMALLER_STEP, Cause, Findings, holding, new_finding
from lightning_gpu_tools.advice.out_of_memory import MIN_SHARE, ErrorFacts, another_gpu, levers
from lightning_gpu_tools.training.phases import TRAINING_STEP, VALIDATION, base_phase
from lightning_gpu_tools.training.run_measurements import COPY
from lightning_gpu_tools.units import format_bytes

_PART_OF_BOUND = 0.5  # our default: what to try of an upper bound, because the rest of the failed step is unknown
_NEARLY = 1.1  # our default: if a step needs up to 10% more than any other, many steps barely fit


def find(facts: ErrorFacts) -> Findings:
    run, oom = facts
    if base_phase(oom.phase) not in (TRAINING_STEP, VALIDATION, COPY) or has_fitted(facts):
        return
    shape, set_size = oom.batch_shape or (), None
    if run.loader is not None and not facts.in_validation:
        set_size = run.loader.batch_size
    # The first dimension of a tensor with more rows than the batch has samples is something else.
    has_samples = bool(shape) and shape[0] <= (set_size or math.inf)
    size = shape[0] if has_samples else set_size
    # The batch is on the GPU when a step begins.
    begin = None if oom.begin_bytes is None else oom.begin_bytes - oom.batch_bytes
    taken = None if facts.taken_bytes is None else facts.taken_bytes + oom.batch_bytes
    if taken is not None and taken < max(MIN_SHARE * (facts.room_bytes or 0), facts.kept_bytes):
        return
    batch = f"{'In validation, the' if facts.in_validation else 'The'} batch{f' of {size}' if size else ''}"
    why = f"{batch} does not fit."
    if taken is not None and begin is not None:
        why = f"{batch} takes more than {format_bytes(taken)}, in addition to {format_bytes(begin)} of fixed memory."
    at_peak = () if oom.memory is None or facts.in_validation else oom.memory.peak_lines
    if lines := holding(at_peak or oom.lines):
        why += f" Most of it is allocated at {lines}."
    fits, is_bound = _largest(facts, size, begin, taken) if size and has_samples else (None, False)
    smaller = _smaller_batch(facts, size, fits, is_bound=is_bound)
    yield new_finding(why, smaller, levers(facts), another_gpu(facts), batch_size=size, largest_batch_size=fits)


def _largest(facts: ErrorFacts, size: int, begin: int | None, taken: int | None) -> tuple[int | None, bool]:
    """Return the largest batch that fits, and whether it is only an upper bound; ``None`` if unknown."""
    run, oom = facts
    room, in_training = facts.room_bytes, not facts.in_validation
    if room is not None and oom.memory is not None and oom.memory.recorded and in_training:
        # The advice is more batches with the same effective size, so gradients stay.
        fits = largest_batch(oom.memory.recorded, room, run.batch_bytes or 0, keeps_gradients=True)
        if fits is not None:
            return min(fits, size - 1), False
    if room is None or begin is None or not taken:
        return None, False
    # The first step of the optimizer will take memory as well.
    fixed = max(begin, oom.model.model_bytes) if in_training else begin
    return bound_by_failure(size, taken, fixed, room), True


def _smaller_batch(facts: ErrorFacts, size: int | None, fits: int | None, *, is_bound: bool) -> str:
    """Return advice on the batch size to set, if ``fits`` samples fit, or at most as many."""
    run, where = facts.run, " of the validation loader" if facts.in_validation else ""
    if size is None or fits is None:
        return f"Lower the batch size{where}{f' (now {size})' if size else ''}."
    if fits < 1:
        return "Based on measured memory, not even a batch of 1 fits."
    goal, known = fits, f"{fits} fit, based on measured memory"
    if is_bound:
        goal, known = math.ceil(_PART_OF_BOUND * fits), f"About {fits} fit, or fewer: the failed step did not finish"
    if facts.in_validation or run.stage != "fit":
        return f"Set batch_size={goal}{where} (now {size}). {known}."
    smaller, accumulate = split(size, goal, run.accumulate_grad_batches)
    keep = f"call optimizer.step() after every {accumulate} batches, with the loss divided by {accumulate},"
    if run.has_trainer:
        keep = f"accumulate_grad_batches={accumulate} (now {run.accumulate_grad_batches})"
    return f"Set batch_size={smaller} (now {size}), and {keep} to keep the effective batch size. {known}."


def has_fitted(facts: ErrorFacts) -> bool:
    """Return whether batches of this size fit before, in much less memory."""
    oom, memory = facts.oom, facts.full_memory
    if memory is None or not oom.batch_shape or facts.in_validation:
        return False
    is_usual = math.prod(oom.batch_shape) <= (oom.usual_items or 0)
    return is_usual and facts.wanted_bytes > _NEARLY * memory.peak_bytes


CAUSE = Cause(
    says="The batch of ... takes more than ..., in addition to ... of fixed memory; in training or in validation",
    change="the `batch_size` in the advice, with gradients accumulated; or activation checkpointing, or `bf16-mixed`",
    find=find,
    settings=SMALLER_STEP,
    verified_on="hardware",
)
