"""callback: a callback, a logger or a model hook does not return.

Takes the current phase of the training thread, and its stack.
"""

from __future__ import annotations

from lightning_gpu_tools.advice.cause import Explanation, StallCause
from lightning_gpu_tools.advice.stall_words import does_where, that_line
from lightning_gpu_tools.training.phases import CALLBACK, LOGGING, VALIDATION
from lightning_gpu_tools.training.stall_facts import StallFacts
from lightning_gpu_tools.units import printable


def find(facts: StallFacts) -> Explanation | None:
    base, _, name = facts.phase.partition("/")
    if base not in (CALLBACK, LOGGING) or not name:
        return None
    name = printable(name)
    return Explanation(
        f"{name} {does_where(facts)}.", f"Check {that_line(facts.stack, 'its code')}, or train without {name}."
    )


CAUSE = StallCause(
    says="training hangs in a callback, a logger or a model hook",
    change="check the line in the report: often a network call without a timeout",
    find=find,
    after=("blocked_worker",),
    verified_on="cpu",
    sick=StallFacts(phase=f"{LOGGING}/WandbLogger"),
    healthy=StallFacts(phase=VALIDATION),
)
