"""blocked_worker: one worker of the DataLoader does not finish its batch.

Reads the state, CPU time and system call of each worker (/proc), and the Python stacks of forked workers, to find the
worker that has to deliver the next batch.
"""

from __future__ import annotations

from lightning_gpu_tools.advice.cause import Explanation, StallCause
from lightning_gpu_tools.advice.stall_examples import a_worker
from lightning_gpu_tools.advice.stall_words import awaited_of, does_where, is_idle, name_of, that_line
from lightning_gpu_tools.training.phases import DATA_LOADING
from lightning_gpu_tools.training.stall_facts import StallFacts


def find(facts: StallFacts) -> Explanation | None:
    workers = facts.workers
    if not workers:
        return None
    awaited = awaited_of(workers)
    idle, others = sum(one is not awaited and is_idle(one) for one in workers), len(workers) - 1
    which = f"{idle} of the other {others}" if idle < others else f"The other {others}" if others > 1 else "The other"
    rest = f" {which} worker{'s' * (others > 1)} {'is' if idle == 1 else 'are'} idle." if idle else ""
    return Explanation(
        f"{name_of(awaited)} of {len(workers)} {does_where(awaited)}. It has to deliver the next batch.{rest}",
        f"Check {that_line(awaited.stack, '__getitem__')} of the dataset, and the sample that it loads. "
        "DataLoader(timeout=60) raises an error instead.",
    )


CAUSE = StallCause(
    says="GPU-Util is 0 %; one worker of the DataLoader waits or computes, and the others are idle",
    change="check the line of the dataset in the report, and the sample that it loads; `DataLoader(timeout=60)`",
    find=find,
    after=("deadlocked_workers",),
    verified_on="cpu",
    sick=StallFacts(phase=DATA_LOADING, workers=(a_worker(0, "lock"), a_worker(1, "time", awaited=True))),
    healthy=StallFacts(phase=DATA_LOADING),
)
