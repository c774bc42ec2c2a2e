"""storage: training waits for a file system that does not respond.

Reads the state (D) and the system call of the training process, or of the worker of the DataLoader that has to deliver
the next batch (/proc).
"""

from lightning_gpu_tools.advice.findings import Cause, Findings, new_finding
from lightning_gpu_tools.advice.stalls import activity_phrase
from lightning_gpu_tools.training.stall_facts import StallFacts


def find(facts: StallFacts) -> Findings:
    process = facts.workers[facts.awaited_worker] if facts.workers else facts.process
    if process.waits_for == "storage":
        name = f"Worker {facts.awaited_worker} (PID {process.pid})" if facts.workers else "The training process"
        yield new_finding(
            f"{name} {activity_phrase(process)}.",
            "Check the mount with `ls`, `df` and `dmesg`.",
            "Copy the data to a local disk, or write checkpoints to one.",
        )


CAUSE = Cause(
    says="a process is in state `D`, or in a file system call that does not return",
    change="check the mount with `ls`, `df` and `dmesg`; copy the data to a local disk",
    find=find,
    verified_on="cpu",
)
