"""rank_silent: a rank no longer sends messages, because it was killed or stopped, or cannot run Python.

Reads the job's key-value store, to which each rank writes regularly: this rank has written nothing for a long time.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_gpu_tools.advice.cause import Explanation, StallCause
from lightning_gpu_tools.advice.collectives import BACKWARD_SYNC, others_wait
from lightning_gpu_tools.advice.stall_examples import a_rank
from lightning_gpu_tools.advice.stall_words import during
from lightning_gpu_tools.training.stall_facts import RankFacts
from lightning_gpu_tools.units import format_duration


def find_among_ranks(ranks: Sequence[RankFacts]) -> Explanation | None:
    silent = next((one for one in ranks if one.silent_s), None)
    if silent is None:
        return None
    return Explanation(
        f"Rank {silent.rank} (PID {silent.pid} on node {silent.node}) has been silent for "
        f"{format_duration(silent.silent_s)}, since step {silent.step}, {during(silent.phase)}; {others_wait(ranks)}.",
        "It was killed or stopped, or C code in it holds the GIL. Check its output, and `dmesg` on its node.",
        silent.rank,
    )


CAUSE = StallCause(
    says="a rank was killed or stopped, or C code in it holds the GIL",
    change="check its output, and `dmesg` on its node",
    find_among_ranks=find_among_ranks,
    after=("rank_left", "uneven_batches"),
    verified_on="cpu",
    sick=(a_rank(0, collective=BACKWARD_SYNC), a_rank(1, silent_s=30.0)),
    healthy=(a_rank(0, collective=BACKWARD_SYNC), a_rank(1)),
)
