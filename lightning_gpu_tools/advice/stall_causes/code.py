"""code: the training step, validation or other code of the program hangs at the reported line.

Takes the stack of the training thread, its CPU time and the GPU's utilization. With several ranks, those of the first
rank that waits for no other.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_gpu_tools.advice.cause import Explanation, StallCause
from lightning_gpu_tools.advice.stall_words import does_where, during
from lightning_gpu_tools.training.phases import FORWARD
from lightning_gpu_tools.training.stall_facts import RankFacts, StallFacts
from lightning_gpu_tools.units import format_duration


def find(facts: StallFacts) -> Explanation:
    busy_percent = facts.gpu_busy_percent
    gpu = "" if busy_percent is None else f", and the GPU is {busy_percent:.0f} % busy"
    why = f"The training process {does_where(facts)}{gpu}."
    if not facts.stack:
        return Explanation(why, f"Check the code that runs {during(facts.phase)}.")
    return Explanation(why, "Check that line. The stack is below.")


def find_among_ranks(ranks: Sequence[RankFacts]) -> Explanation | None:
    """Return what blocks the first rank that waits for no other: the cause that it has found itself, if any."""
    behind = next((one for one in ranks if one.collective is None), None)
    if behind is None:
        return None
    why = behind.why or f"It has made no progress for {format_duration(behind.stuck_s)}."
    return Explanation(
        f"All ranks wait for rank {behind.rank}, at step {behind.step}, {during(behind.phase)}. {why}",
        behind.next_step or "Check the stack of that rank.",
        behind.rank,
        behind.cause or "",
    )


CAUSE = StallCause(
    says="the training step or validation hangs",
    change="check the line in the report",
    find=find,
    find_among_ranks=find_among_ranks,
    after=("gpu", "rank_silent"),
    verified_on="measurements",
    sick=StallFacts(phase=FORWARD, gpu_busy_percent=0.0, cpu_share=0.9),
    healthy=StallFacts(phase=FORWARD, gpu_busy_percent=100.0, cpu_share=0.9),
)
