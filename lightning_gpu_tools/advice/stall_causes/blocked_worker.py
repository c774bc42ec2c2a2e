"""blocked_worker: one worker of the DataLoader does not finish its batch.

By the state, CPU time and system call of each worker (/proc), and by the Python stacks of forked workers, for the one
that has to deliver the next batch.
"""

from __future__ import annotations

from lightning_gpu_tools.advice.stall_cause import Explanation, StallCause
from lightning_gpu_tools.advice.stall_examples import a_worker
from lightning_gpu_tools.advice.stall_words import does_where
from lightning_gpu_tools.advice.stalled_workers import awaited_of, is_idle, name_of
from lightning_gpu_tools.training.phases import DATA_LOADING
from lightning_gpu_tools.training.stall_facts import StallFacts


def find(facts: StallFacts) -> Explanation | None:
    workers = facts.workers
    if not workers:
        return None
    awaited = awaited_of(workers)
    idle = sum(one is not awaited and is_idle(one) for one in workers)
    rest = f" {idle} of the {len(workers) - 1} others have nothing to do." if idle else ""
    return Explanation(
        "blocked_worker",
        f"{name_of(awaited)} of {len(workers)} {does_where(awaited)}. The next batch has to come from it.{rest}",
        "Look at that line of the dataset, and at the sample that it loads. DataLoader(timeout=60) turns this into an "
        "error.",
    )


CAUSE = StallCause(
    name="blocked_worker",
    seen_as="GPU-Util is 0 %; one worker of the DataLoader waits or computes, the others have nothing to do",
    change="the line of the dataset that is named, or the sample; `timeout=60` of the DataLoader",
    find=find,
    after=("deadlocked_workers",),
    verified_on="cpu",
    sick=StallFacts(phase=DATA_LOADING, workers=(a_worker(0, "lock"), a_worker(1, "time", awaited=True))),
    healthy=StallFacts(phase=DATA_LOADING),
)
