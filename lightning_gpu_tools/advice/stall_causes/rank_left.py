"""rank_left: training on one rank has ended with an error that was caught, and the others wait for it.

Reads the job's key-value store, where each rank writes how its training has ended.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_gpu_tools.advice.cause import Explanation, StallCause
from lightning_gpu_tools.advice.collectives import BACKWARD_SYNC, first_ended, others_wait
from lightning_gpu_tools.advice.stall_examples import a_rank
from lightning_gpu_tools.training.stall_facts import RankFacts
from lightning_gpu_tools.units import printable


def find_among_ranks(ranks: Sequence[RankFacts]) -> Explanation | None:
    left = first_ended(ranks)
    if left is None or left.has_completed:
        return None
    advice = "Let the error end the process: do not catch it, or call sys.exit(), on one rank only."
    if (left.ended or "").startswith("out of memory"):
        advice = f"Rank {left.rank} has printed what filled its memory, and what to change. {advice}"
    return Explanation(
        f"Rank {left.rank} stopped training at step {left.step} ({printable(left.ended)}); {others_wait(ranks)}.",
        advice,
        left.rank,
    )


CAUSE = StallCause(
    says="one rank stopped training with an error that was caught, or by `sys.exit`; the others wait for it",
    change="let the error end the process",
    find_among_ranks=find_among_ranks,
    verified_on="cpu",
    sick=(a_rank(0, collective=BACKWARD_SYNC), a_rank(1, ended="stopped by SystemExit at step 3")),
    healthy=(a_rank(0, collective=BACKWARD_SYNC), a_rank(1, ended="completed")),
)
