"""dead_worker: a worker of the DataLoader has exited, and training still waits for its batch.

Reads the state of the workers' processes (/proc).
"""

from __future__ import annotations

from lightning_gpu_tools.advice.cause import Explanation, StallCause
from lightning_gpu_tools.advice.stall_examples import a_worker
from lightning_gpu_tools.advice.stall_words import name_of
from lightning_gpu_tools.training.phases import DATA_LOADING
from lightning_gpu_tools.training.stall_facts import StallFacts


def find(facts: StallFacts) -> Explanation | None:
    ended = next((one for one in facts.workers if one.activity.has_ended), None)
    if ended is None:
        return None
    return Explanation(
        f"{name_of(ended)} of {len(facts.workers)} has exited, and training waits for a batch from it.",
        "Check its last output on the terminal. `dmesg` shows whether the kernel killed it.",
    )


CAUSE = StallCause(
    says="a worker has exited, and training still waits for its batch",
    change="check its last output on the terminal; see [below](#a-worker-died)",
    find=find,
    after=("swap",),
    verified_on="measurements",
    sick=StallFacts(phase=DATA_LOADING, workers=(a_worker(0, "events"), a_worker(1, None, "Z"))),
    healthy=StallFacts(phase=DATA_LOADING, workers=(a_worker(0, "events"), a_worker(1, "network"))),
)
