"""swap: the machine has run out of memory and swaps.

Reads the share of time in which every task of the machine waited for memory, from the kernel (/proc/pressure/memory).
"""

from lightning_gpu_tools.advice.findings import Cause, Findings, new_finding
from lightning_gpu_tools.training.stall_facts import StallFacts

_MIN_PERCENT = 20.0  # our default, of ten seconds in which every task waited for memory


def find(facts: StallFacts) -> Findings:
    if facts.memory_stall_percent >= _MIN_PERCENT:
        yield new_finding(
            "The machine swaps: in the last ten seconds, every task waited for memory "
            f"{facts.memory_stall_percent:.0f}% of the time.",
            "End other programs (`ps aux --sort=-rss | head`), or use fewer workers (num_workers) or smaller batches.",
        )


CAUSE = Cause(
    says="everything is slow, and the disk is busy",
    change="use fewer workers or smaller batches, or end other programs",
    find=find,
)
