"""collective: all ranks wait for each other in collectives.

Reads the last collectives of each rank, with their sizes, from torch's flight recorder, and compares the first one that
has not completed. Without this record, compares where the stacks of the ranks wait. If ranks had different numbers of
batches in their last complete epochs, this is the reason.
"""

from collections import Counter

from lightning_gpu_tools.advice.findings import Cause, Findings, new_finding
from lightning_gpu_tools.advice.stalls import SAME_BATCHES, hanging_call
from lightning_gpu_tools.training.stall_facts import StallFacts
from lightning_gpu_tools.units import printable

_MAX_PLACES = 4  # in the report

_SAME_CALLS = (
    "Make the same calls with the same sizes on every rank: no self.log(..., sync_dist=True), "
    "trainer.save_checkpoint() or barrier behind an `if` on the rank."
)
_NETWORK = (
    "The network between them does not respond. Run once with TORCH_DISTRIBUTED_DEBUG=DETAIL and NCCL_DEBUG=INFO."
)


def find(facts: StallFacts) -> Findings:
    if len(facts.ranks) < 2 or any(rank.waits_in is None for rank in facts.ranks):
        return
    call = hanging_call(facts.ranks)
    details = "" if call is None else f" {call}"
    fewest, most = (choose(facts.ranks, key=lambda rank: rank.epoch_steps) for choose in (min, max))
    if 0 < fewest.epoch_steps < most.epoch_steps:
        why = f"Rank {fewest.rank} had {fewest.epoch_steps} batches in an epoch, rank {most.rank} {most.epoch_steps}."
        yield new_finding(f"{why}{details}", SAME_BATCHES, rank=fewest.rank)
        return
    calls = {rank.rank: str(rank.waits_in) for rank in facts.ranks}
    if call is not None and call.differs:
        calls.update(call.calls)
    if len({*calls.values()}) == 1 and (call is None or not call.missing):
        rank = facts.ranks[0]
        why = f"All {len(facts.ranks):,} ranks wait in {printable(rank.waits_in)}{rank.line} at step {rank.step}."
        yield new_finding(f"{why}{details}", _NETWORK)
        return
    places = [f"rank {rank.rank} in {printable(rank.waits_in)}{rank.line} at step {rank.step}" for rank in facts.ranks]
    shown = [*places[:_MAX_PLACES], *([f"and {len(places) - _MAX_PLACES:,} more"] if places[_MAX_PLACES:] else [])]
    counts = Counter(calls.values())
    different = [rank for rank, text in calls.items() if counts[text] == 1]
    yield new_finding(
        f"Ranks wait for each other in different calls: {'; '.join(shown)}.{details}",
        _SAME_CALLS,
        SAME_BATCHES,
        rank=different[0] if len(different) == 1 else None,
    )


CAUSE = Cause(
    says="ranks wait for each other in different collectives, with different sizes, or all in the same one",
    change="the same calls, sizes and numbers of batches on every rank; else check the network: `NCCL_DEBUG=INFO`",
    find=find,
    verified_on="simulated GPU",
)
