"""dataset: the training process itself loads data, and does not finish.

Takes the current phase of the training thread, and its stack.
"""

from __future__ import annotations

from lightning_gpu_tools.advice.cause import Explanation, StallCause
from lightning_gpu_tools.advice.stall_words import does, that_line, where
from lightning_gpu_tools.training.phases import DATA_LOADING, EPOCH_START, VALIDATION, base_phase
from lightning_gpu_tools.training.stall_facts import StallFacts


def find(facts: StallFacts) -> Explanation | None:
    if base_phase(facts.phase) not in (DATA_LOADING, EPOCH_START):
        return None
    return Explanation(
        f"The training process {does(facts)} while it loads data{where(facts.stack)}.",
        f"Check {that_line(facts.stack, '__getitem__')} of the dataset.",
    )


CAUSE = StallCause(
    says="training hangs while the training process itself loads data",
    change="check the line in the report",
    find=find,
    after=("blocked_worker",),
    verified_on="cpu",
    sick=StallFacts(phase=DATA_LOADING),
    healthy=StallFacts(phase=VALIDATION),
)
