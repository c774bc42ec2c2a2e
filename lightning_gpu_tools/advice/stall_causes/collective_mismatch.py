"""collective_mismatch: ranks call different collectives, or pass different sizes to the same one.

Reads the last collectives of each rank, with their sizes, from torch's flight recorder, and compares the first one that
has not completed.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_gpu_tools.advice.cause import Explanation, StallCause
from lightning_gpu_tools.advice.collectives import BACKWARD_SYNC
from lightning_gpu_tools.advice.open_collectives import open_collective
from lightning_gpu_tools.advice.stall_examples import a_call, a_group, a_rank
from lightning_gpu_tools.training.stall_facts import RankFacts


def find_among_ranks(ranks: Sequence[RankFacts]) -> Explanation | None:
    held_up = open_collective(ranks)
    if held_up is None or not held_up.differs:
        return None
    return Explanation(
        "Ranks do not call the same collective, so it completes on none of them.",
        "Call the same collectives in the same order and with the same sizes on every rank. Check for collectives "
        "behind an `if` on the rank, loops of different lengths, and parameters that only one rank uses.",
        held_up.odd,
    )


CAUSE = StallCause(
    says="ranks wait for each other in different collectives, or with different sizes",
    change="the same collectives in the same order and with the same sizes on every rank",
    find_among_ranks=find_among_ranks,
    after=("collective_on_one_rank", "rank_silent"),
    verified_on="simulated GPU",
    sick=tuple(
        a_rank(i, collective=BACKWARD_SYNC, groups=a_group(a_call(3, is_done=True), a_call(4, size=7 - i)))
        for i in range(2)
    ),
    healthy=tuple(a_rank(i, collective=BACKWARD_SYNC, groups=a_group(a_call(4))) for i in range(2)),
)
