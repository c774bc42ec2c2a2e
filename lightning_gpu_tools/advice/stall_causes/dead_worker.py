"""dead_worker: a worker of the DataLoader has ended, and training still waits for its batch.

By the state of the workers' processes (/proc).
"""

from __future__ import annotations

from lightning_gpu_tools.advice.stall_cause import Explanation, StallCause
from lightning_gpu_tools.advice.stall_examples import a_worker
from lightning_gpu_tools.advice.stalled_workers import name_of
from lightning_gpu_tools.training.phases import DATA_LOADING
from lightning_gpu_tools.training.stall_facts import StallFacts


def find(facts: StallFacts) -> Explanation | None:
    ended = next((one for one in facts.workers if one.activity.has_ended), None)
    if ended is None:
        return None
    return Explanation(
        "dead_worker",
        f"{name_of(ended)} of {len(facts.workers)} has ended, and training waits for a batch from it.",
        "See its last words on the terminal. `dmesg` says whether the kernel has killed it.",
    )


CAUSE = StallCause(
    name="dead_worker",
    seen_as="a worker has ended, and its batch is still waited for",
    change="its last words on the terminal; see [below](#a-worker-died)",
    find=find,
    after=("swap",),
    verified_on="measurements",
    sick=StallFacts(phase=DATA_LOADING, workers=(a_worker(0, "events"), a_worker(1, None, "Z"))),
    healthy=StallFacts(phase=DATA_LOADING, workers=(a_worker(0, "events"), a_worker(1, "network"))),
)
