"""code: a callback, a logger, the training step, validation or other code hangs at the reported line.

Takes the stack of the training thread and its CPU time.
"""

from lightning_gpu_tools.advice.findings import Cause, Findings, new_finding
from lightning_gpu_tools.advice.stalls import activity_phrase
from lightning_gpu_tools.training.stall_facts import StallFacts


def find(facts: StallFacts) -> Findings:
    yield new_finding(
        f"The training process {activity_phrase(facts.process)}.",
        "Check that code: often it calls a network or another process without a timeout.",
    )


CAUSE = Cause(
    says="training hangs in a callback, a logger, a model hook, the training step or validation",
    change="check the line in the report: often a network call without a timeout",
    find=find,
    verified_on="cpu",
)
