"""collective_on_one_rank: ranks wait in different places, because only one has called a collective.

Compares the stacks of all ranks, which wait in different collectives.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_gpu_tools.advice.cause import Explanation, StallCause
from lightning_gpu_tools.advice.collectives import (
    BACKWARD_SYNC,
    COMPUTE_METRIC,
    SAVE_CHECKPOINT,
    SYNC_DIST,
    all_waiting,
)
from lightning_gpu_tools.advice.open_collectives import open_collective
from lightning_gpu_tools.advice.stall_examples import a_rank
from lightning_gpu_tools.training.stall_facts import RankFacts

_CALL_ON_EVERY_RANK = {
    SAVE_CHECKPOINT: "Call trainer.save_checkpoint() on every rank: Lightning writes only on rank 0.",
    SYNC_DIST: (
        "Call self.log(..., sync_dist=True) on every rank in every step. To log on one rank only, set "
        "rank_zero_only=True instead."
    ),
    COMPUTE_METRIC: "Call compute() on every rank, and log its value on rank 0.",
}


def find_among_ranks(ranks: Sequence[RankFacts]) -> Explanation | None:
    waiting = all_waiting(ranks)
    if waiting is None or not waiting.rest:
        return None
    odd, held_up = waiting.odd, open_collective(ranks)
    if held_up is not None and held_up.differs and odd.collective not in _CALL_ON_EVERY_RANK:
        return None
    why = f"{waiting.places}. Every rank has to call a collective."
    call = _CALL_ON_EVERY_RANK.get(str(odd.collective), "Call it on every rank, outside of any `if` on the rank.")
    return Explanation(why, call, odd.rank)


CAUSE = StallCause(
    says="ranks wait in different places: `self.log(..., sync_dist=True)`, `save_checkpoint()` or a barrier behind "
    "`if rank == 0`",
    change="call it on every rank",
    find_among_ranks=find_among_ranks,
    after=("uneven_batches",),
    verified_on="cpu",
    sick=(a_rank(0, collective="barrier in save"), *(a_rank(i, collective=BACKWARD_SYNC) for i in (1, 2))),
    healthy=tuple(a_rank(i, collective="barrier in save") for i in range(3)),
)
