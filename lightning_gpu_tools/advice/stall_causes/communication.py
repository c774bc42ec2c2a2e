"""communication: all ranks wait for each other in the same place.

Compares the stacks of all ranks. Without the others' stacks, a rank reports only that it waits.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_gpu_tools.advice.cause import Explanation, StallCause
from lightning_gpu_tools.advice.collectives import BACKWARD_SYNC, all_waiting
from lightning_gpu_tools.advice.open_collectives import open_collective
from lightning_gpu_tools.advice.stall_examples import a_rank
from lightning_gpu_tools.advice.stall_words import where
from lightning_gpu_tools.training.phases import DATA_LOADING, RANK_WAIT, base_phase
from lightning_gpu_tools.training.stall_facts import RankFacts, StallFacts


def find(facts: StallFacts) -> Explanation | None:
    if base_phase(facts.phase) != RANK_WAIT:
        return None
    why = f"This rank waits for others{where(facts.stack)}."
    return Explanation(why, "Check the output of the other ranks.")


def find_among_ranks(ranks: Sequence[RankFacts]) -> Explanation | None:
    waiting = all_waiting(ranks)
    if waiting is None:
        return None
    or_shapes = ", or shapes differ" if open_collective(ranks) is None else ""
    return Explanation(
        f"All {len(ranks):,} ranks wait in {waiting.place}.",
        f"The network between them does not respond{or_shapes}. Run once with TORCH_DISTRIBUTED_DEBUG=DETAIL and "
        "NCCL_DEBUG=INFO.",
    )


CAUSE = StallCause(
    says="all ranks wait in the same place",
    change="check the network; `TORCH_DISTRIBUTED_DEBUG=DETAIL`, `NCCL_DEBUG=INFO`",
    find=find,
    find_among_ranks=find_among_ranks,
    after=("blocked_worker", "collective_mismatch"),
    verified_on="measurements",
    sick=(a_rank(0, collective=BACKWARD_SYNC), a_rank(1, collective=BACKWARD_SYNC)),
    healthy=(a_rank(0, collective=BACKWARD_SYNC), a_rank(1, phase=DATA_LOADING)),
)
