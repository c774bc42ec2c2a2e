"""storage: the training process, or a worker of the DataLoader, waits for a file system that does not respond.

Reads the state (D) and the system call of the training process and the workers (/proc).
"""

from __future__ import annotations

from lightning_gpu_tools.advice.cause import Explanation, StallCause
from lightning_gpu_tools.advice.stall_words import awaited_of, does_where, name_of
from lightning_gpu_tools.training.phases import VALIDATION
from lightning_gpu_tools.training.stall_facts import Activity, StallFacts

_CHECK = "Check the mount with `ls`, `df` and `dmesg`. Copy the data to a local disk, or write checkpoints to one."


def find(facts: StallFacts) -> Explanation | None:
    workers = facts.workers
    if not workers:
        if facts.activity is None or facts.activity.waits_for != "storage":
            return None
        return Explanation(f"The training process {does_where(facts)}.", _CHECK)
    waiting = [one for one in workers if one.activity.waits_for == "storage"]
    if not waiting:
        return None
    awaited = awaited_of(workers)
    one = awaited if awaited in waiting else waiting[0]
    why = f"{len(waiting)} of {len(workers)} workers wait for storage. {name_of(one)} {does_where(one)}."
    return Explanation(why, _CHECK)


CAUSE = StallCause(
    says="processes are in state `D`, or in a file system call that does not return",
    change="check the mount with `ls`, `df` and `dmesg`; copy the data to a local disk",
    find=find,
    after=("dead_worker",),
    verified_on="cpu",
    sick=StallFacts(phase=VALIDATION, activity=Activity(1, "D", "storage", "/nfs/x", 0.0)),
    healthy=StallFacts(phase=VALIDATION, activity=Activity(1, "S", "network", None, 0.0)),
)
