"""deadlocked_workers: each worker of the DataLoader waits for a lock that was held when it was forked.

Reads the system calls of all workers (/proc): each waits for a lock (futex) and computes nothing.
"""

from __future__ import annotations

from lightning_gpu_tools.advice.cause import Explanation, StallCause
from lightning_gpu_tools.advice.stall_examples import a_worker
from lightning_gpu_tools.advice.stall_words import awaited_of, is_idle, where
from lightning_gpu_tools.training.phases import DATA_LOADING
from lightning_gpu_tools.training.stall_facts import StallFacts


def find(facts: StallFacts) -> Explanation | None:
    workers = facts.workers
    if len(workers) < 2 or not all(is_idle(one) and one.activity.waits_for == "lock" for one in workers):
        return None
    return Explanation(
        f"All {len(workers)} workers wait for a lock{where(awaited_of(workers).stack)}. "
        "A process that was forked while a thread held a lock waits for it forever.",
        'Set multiprocessing_context="spawn" or "forkserver", or call cv2.setNumThreads(0) first. Start no threads '
        "before the DataLoader starts its workers.",
    )


CAUSE = StallCause(
    says="only with workers, training hangs at the first batch or the sanity check: all of them wait for a lock "
    "that a thread held when they were forked",
    change='`multiprocessing_context="spawn"`, `cv2.setNumThreads(0)`, no threads before the workers start',
    find=find,
    after=("storage",),
    verified_on="cpu",
    sick=StallFacts(phase=DATA_LOADING, workers=(a_worker(0, "lock"), a_worker(1, "lock"))),
    healthy=StallFacts(phase=DATA_LOADING, workers=(a_worker(0, "lock"), a_worker(1, "events"))),
)
