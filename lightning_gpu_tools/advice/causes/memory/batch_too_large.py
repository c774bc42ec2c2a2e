"""batch_too_large: the batch, in training or in validation, takes more memory than the model leaves.

Reads the counters of torch's allocator: the memory that the step took beyond what was there before it. A batch size
that fit before, in less memory, is not the cause. The largest batch that fits comes from a replay of the allocations of
recorded steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from lightning_gpu_tools.advice.cause import SMALLER_STEP, Cause
from lightning_gpu_tools.advice.examples import FLAT, GIB, STEPS_OF_64, counted_steps, failed
from lightning_gpu_tools.advice.findings import Finding, new_finding
from lightning_gpu_tools.advice.memory_remedies import (
    in_validation,
    largest_lines,
    largest_that_fits,
    levers,
    more_room,
    samples,
    smaller_batch,
)
from lightning_gpu_tools.advice.out_of_memory import MIN_SHARE, MemoryFacts, OutOfMemory
from lightning_gpu_tools.training.phases import TRAINING_STEP, VALIDATION, base_phase
from lightning_gpu_tools.training.run_measurements import COPY
from lightning_gpu_tools.units import format_bytes

_NEARLY = 1.1  # our default: if a step needs up to 10% more than any other, many steps barely fit


def find(facts: MemoryFacts) -> Iterator[Finding]:
    run, oom = facts
    if base_phase(oom.phase) not in (TRAINING_STEP, VALIDATION, COPY):
        return
    size, begin = samples(run, oom), None if oom.begin_bytes is None else oom.begin_bytes - oom.batch_bytes
    if size is None and not in_validation(oom) and run.loader is not None:
        size = run.loader.batch_size
    taken = None if oom.allocated_bytes is None or begin is None else oom.wanted_bytes - begin
    is_small = taken is not None and taken < max(MIN_SHARE * (oom.room_bytes or 0), oom.kept_bytes)
    if is_small or has_fitted(oom):
        return
    batch = f"{'In validation, the' if in_validation(oom) else 'The'} batch{f' of {size}' if size else ''}"
    why = f"{batch} does not fit."
    if taken is not None and begin is not None:
        why = f"{batch} takes more than {format_bytes(taken)}, in addition to {format_bytes(begin)} of fixed memory."
    if oom.has_completed_steps and not oom.has_completed_full_steps and oom.model.optimizer_bytes:
        later = format_bytes(oom.model.optimizer_bytes + oom.model.gradients_bytes)
        why += f" The first step fit because it had no optimizer states and no old gradients, which take {later}."
    if lines := largest_lines(oom):
        why += f" Most of it is allocated at {lines}."
    fits = largest_that_fits(run, oom)
    yield new_finding(
        "batch_too_large",
        why,
        [smaller_batch(run, oom, size, fits), levers(run, oom), more_room(oom)],
        {
            "batch_size": size,
            "batch_bytes": taken,
            "largest_batch_size": fits.size,
            "why_no_largest_batch_size": fits.why_not or None,
        },
    )


def has_fitted(oom: OutOfMemory) -> bool:
    """Return whether batches of this size fit before, in much less memory."""
    if not oom.has_completed_full_steps or oom.memory is None or not oom.batch_shape or in_validation(oom):
        return False
    is_usual = math.prod(oom.batch_shape) <= (oom.usual_items or 0)
    return is_usual and oom.wanted_bytes > _NEARLY * oom.memory.peak_bytes


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
