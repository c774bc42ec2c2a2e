"""dataset: the training process itself loads data, and does not finish.

Takes the current phase of the training thread, and its stack.
"""

from lightning_gpu_tools.advice.findings import Cause, Findings, new_finding
from lightning_gpu_tools.advice.stalls import activity_phrase
from lightning_gpu_tools.training.phases import DATA_LOADING, EPOCH_START, base_phase
from lightning_gpu_tools.training.stall_facts import StallFacts


def find(facts: StallFacts) -> Findings:
    if base_phase(facts.phase) in (DATA_LOADING, EPOCH_START):
        yield new_finding(
            f"The training process itself loads data, and {activity_phrase(facts.process)}.",
            "Check __getitem__ of the dataset, and the sample that it loads.",
        )


CAUSE = Cause(
    says="training hangs while the training process itself loads data",
    change="check the line of the dataset in the report",
    find=find,
    verified_on="cpu",
)
