"""spike: this batch is much larger than others, or this step or a callback takes much more memory than other steps.

Compares the number of elements in this batch with the median batch, and the memory of this step, callback or checkpoint
with the largest earlier step.
"""

import math

from lightning_gpu_tools.advice.findings import SMALLER_STEP, Cause, Findings, Variant, new_finding
from lightning_gpu_tools.advice.out_of_memory import MIN_SHARE, ErrorFacts, levers, place_of
from lightning_gpu_tools.training.phases import CALLBACK, CHECKPOINT, LOGGING, OUTSIDE_LOOP, base_phase
from lightning_gpu_tools.units import format_bytes

_MIN_TIMES = 1.5  # our default: how many times the elements of the median batch, or the memory of other steps
_BETWEEN_STEPS = (CALLBACK, LOGGING, CHECKPOINT, OUTSIDE_LOOP)


def find(facts: ErrorFacts) -> Findings:
    oom = facts.oom
    taken, usual_bytes = facts.taken_bytes or 0, _usual_step_bytes(facts)
    least = max(MIN_SHARE * (facts.room_bytes or 0), facts.kept_bytes)  # that is worth reporting
    if base_phase(oom.phase) in _BETWEEN_STEPS:
        if facts.taken_bytes is not None and taken >= max(usual_bytes, least):
            yield new_finding(
                f"Work in {place_of(oom)} takes more than {format_bytes(taken)}, in addition to the memory when a step "
                "begins.",
                "Do it in parts, or on the CPU, and under torch.no_grad().",
            )
        return
    if facts.in_validation or not oom.batch_shape or not oom.usual_items or not facts.has_completed_step:
        return
    times = math.prod(oom.batch_shape) / oom.usual_items
    if times >= _MIN_TIMES:
        shape = " x ".join(map(str, oom.batch_shape))
        yield new_finding(
            f"This batch has {times:.3g} times as many elements as usual ({shape}; median {oom.usual_items:,.0f}).",
            "Limit the elements per batch: truncate long samples, or group samples of similar length.",
            levers(facts),
        )
    elif usual_bytes and taken >= max(_MIN_TIMES * usual_bytes, least):
        yield new_finding(
            f"Step {oom.step} takes more than {format_bytes(taken)}, {taken / usual_bytes:.3g} times as much as "
            f"earlier steps (at most {format_bytes(usual_bytes)}), with a batch of the same size.",
            "Find what only this step does: a rarely taken branch, a longer generation, or an evaluation in between.",
        )


def _usual_step_bytes(facts: ErrorFacts) -> int:
    """Return the most memory that a step has added to the memory at its start; 0 if unknown."""
    memory = facts.full_memory
    if memory is None or (last := memory.last_step) is None:
        return 0
    most = max(last.end.allocated_bytes, memory.peaks_bytes.get("training", 0))
    return max(most - last.begin.allocated_bytes, last.added_bytes)


CAUSE = Cause(
    rows=[
        Variant("This batch has ... times as many elements as usual", "limit the elements per batch"),
        Variant(
            "This step takes ... times as much as earlier steps, with a batch of the same size",
            "find what only this step does, at the line that asked for more",
        ),
        Variant(
            "A callback, a hook, or a checkpoint takes more than ..., in addition to the memory at the start of a step",
            "do it in parts, or on the CPU, and under `torch.no_grad()`",
        ),
    ],
    find=find,
    settings=SMALLER_STEP,
    verified_on="hardware",
)
