"""swap: the machine has run out of memory and swaps.

Reads the kernel's counters of swapped pages, and of the time in which tasks waited for memory (/proc/pressure/memory).
"""

from __future__ import annotations

from lightning_gpu_tools.advice.cause import Explanation, StallCause
from lightning_gpu_tools.training.phases import FORWARD
from lightning_gpu_tools.training.stall_facts import StallFacts

# Our defaults.
_MIN_STALL_PERCENT = 20.0  # of ten seconds, in which every task waited for memory
_MIN_PAGES_PER_S = 10_000  # 40 MiB


def find(facts: StallFacts) -> Explanation | None:
    if facts.memory_stall_percent < _MIN_STALL_PERCENT and facts.swapped_pages_per_s < _MIN_PAGES_PER_S:
        return None
    swaps, percent = f"The machine swaps {facts.swapped_pages_per_s:,.0f} pages per second", facts.memory_stall_percent
    waited = f", and every task waited for memory in {percent:.0f} % of the last ten seconds" if percent >= 1 else ""
    return Explanation(
        f"{swaps}{waited}.",
        "End other programs (`ps aux --sort=-rss | head`), or use fewer workers (num_workers) or smaller batches.",
    )


CAUSE = StallCause(
    says="everything is slow, and the disk is busy",
    change="use fewer workers or smaller batches, or end other programs",
    find=find,
    verified_on="measurements",
    sick=StallFacts(phase=FORWARD, swapped_pages_per_s=30_000.0),
    healthy=StallFacts(phase=FORWARD, swapped_pages_per_s=300.0),
)
