"""batch_too_large: the batch, in training or in validation, takes more memory than the model leaves.

Reads the counters of torch's allocator: the memory that the step took beyond what was there before it. A batch size
that fit before, in less memory, is not the cause. The largest batch that fits comes from a replay of the allocations of
recorded steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from lightning_gpu_tools.advice.batch_size import bound_by_failure, largest_batch, split
from lightning_gpu_tools.advice.examples import FLAT, GIB, STEPS_OF_64, counted_steps, failed
from lightning_gpu_tools.advice.findings import SMALLER_STEP, Cause, Finding, holding, new_finding
from lightning_gpu_tools.advice.out_of_memory import (
    MIN_SHARE,
    MemoryFacts,
    begin_bytes,
    has_completed_steps,
    in_validation,
    kept_bytes,
    levers,
    more_room,
    room_bytes,
    taken_bytes,
    wanted_bytes,
)
from lightning_gpu_tools.memory.readings import OutOfMemory
from lightning_gpu_tools.training.phases import TRAINING_STEP, VALIDATION, base_phase
from lightning_gpu_tools.training.run_measurements import COPY, RunMeasurements
from lightning_gpu_tools.units import format_bytes

_PART_OF_BOUND = 0.5  # our default: what to try of an upper bound, because the rest of the failed step is unknown
_NEARLY = 1.1  # our default: if a step needs up to 10% more than any other, many steps barely fit


def find(facts: MemoryFacts) -> Iterator[Finding]:
    run, oom = facts
    if base_phase(oom.phase) not in (TRAINING_STEP, VALIDATION, COPY):
        return
    size, room, begin, taken = _samples(run, oom), room_bytes(oom), begin_bytes(oom), taken_bytes(oom)
    # The batch is on the GPU when a step begins.
    begin = None if begin is None else begin - oom.batch_bytes
    taken = None if taken is None else taken + oom.batch_bytes
    if size is None and not in_validation(oom) and run.loader is not None:
        size = run.loader.batch_size
    is_small = taken is not None and taken < max(MIN_SHARE * (room or 0), kept_bytes(oom))
    if is_small or has_fitted(oom):
        return
    batch = f"{'In validation, the' if in_validation(oom) else 'The'} batch{f' of {size}' if size else ''}"
    why = f"{batch} does not fit."
    if taken is not None and begin is not None:
        why = f"{batch} takes more than {format_bytes(taken)}, in addition to {format_bytes(begin)} of fixed memory."
    if has_completed_steps(oom) and not has_completed_steps(oom, full=True) and oom.model.optimizer_bytes:
        later = format_bytes(oom.model.optimizer_bytes + oom.model.gradients_bytes)
        why += f" The first step fit because it had no optimizer states and no old gradients, which take {later}."
    at_peak = () if oom.memory is None or in_validation(oom) else oom.memory.peak_lines
    if lines := holding(at_peak or oom.lines):
        why += f" Most of it is allocated at {lines}."
    # Judge the largest batch by a replay of recorded steps, or else by the failed one, which is an upper bound.
    why_unknown, by_record, fits = "", None, None
    if oom.batch_shape and _samples(run, oom) is None:
        why_unknown = "The first dimension of the first tensor of a batch is not its samples."
    elif room is not None:
        if oom.memory is not None and oom.memory.recorded and not in_validation(oom):
            # The advice is more batches with the same effective size, so gradients stay.
            by_record = largest_batch(oom.memory.recorded, room, run.batch_bytes or 0, keeps_gradients=True)
            if by_record is not None and oom.batch_shape:
                by_record = min(by_record, oom.batch_shape[0] - 1)
        fits = by_record
        if by_record is None and oom.batch_shape and begin is not None and taken is not None and taken > 0:
            # The first step of the optimizer will take memory as well.
            fixed = begin if in_validation(oom) else max(begin, oom.model.model_bytes)
            fits = bound_by_failure(oom.batch_shape[0], taken, fixed, room)
    yield new_finding(
        why,
        [
            _smaller_batch(run, oom, size, fits, is_bound=by_record is None),
            why_unknown,
            levers(run, oom),
            more_room(oom),
        ],
        {"batch_size": size, "batch_bytes": taken, "largest_batch_size": fits},
    )


def _samples(run: RunMeasurements, oom: OutOfMemory) -> int | None:
    """Return the number of samples in the batch; ``None`` if they are not the first dimension of its first tensor."""
    size = oom.batch_shape[0] if oom.batch_shape else None
    known = None if run.loader is None or in_validation(oom) else run.loader.batch_size
    return None if size is None or (known is not None and size > known) else size


def _smaller_batch(
    run: RunMeasurements, oom: OutOfMemory, size: int | None, fits: int | None, *, is_bound: bool
) -> str:
    """Return advice on the batch size to set, if ``fits`` samples fit, or at most as many."""
    where = " of the validation loader" if in_validation(oom) else ""
    if size is None or fits is None:
        return f"Lower the batch size{where}{f' (now {size})' if size else ''}."
    if fits < 1:
        return "Based on measured memory, not even a batch of 1 fits."
    known = f"About {fits} fit" if is_bound else f"{fits} fit, based on measured memory"
    goal = math.ceil(_PART_OF_BOUND * fits) if is_bound else fits
    more = ", or fewer: the failed step did not finish" if is_bound else ""
    if in_validation(oom) or run.stage != "fit":
        return f"Set batch_size={goal}{where} (now {size}). {known}{more}."
    smaller, accumulate = split(size, goal, run.accumulate_grad_batches)
    if run.has_trainer:
        keep = f"accumulate_grad_batches={accumulate} (now {run.accumulate_grad_batches})"
    else:
        keep = f"call optimizer.step() after every {accumulate} batches, with the loss divided by {accumulate},"
    return f"Set batch_size={smaller} (now {size}), and {keep} to keep the effective batch size. {known}{more}."


def has_fitted(oom: OutOfMemory) -> bool:
    """Return whether batches of this size fit before, in much less memory."""
    if oom.memory is None or not has_completed_steps(oom, full=True) or not oom.batch_shape or in_validation(oom):
        return False
    is_usual = math.prod(oom.batch_shape) <= (oom.usual_items or 0)
    return is_usual and wanted_bytes(oom) > _NEARLY * oom.memory.peak_bytes


CAUSE = Cause(
    says="The batch of ... takes more than ..., in addition to ... of fixed memory; in training or in validation",
    change="the `batch_size` in the advice, with the `accumulate_grad_batches` that keeps the effective batch size; "
    "or activation checkpointing or `bf16-mixed`, each with the memory that it frees",
    find=find,
    settings=SMALLER_STEP,
    verified_on="hardware",
    sick=failed(begins=FLAT, batch_shape=(32, 512), memory=counted_steps(16, 8 * GIB, 18 * GIB)),
    healthy=failed(begins=FLAT, batch_shape=(64, 512), usual_items=64 * 512, memory=STEPS_OF_64),
)
