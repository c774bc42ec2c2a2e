"""uneven_batches: a rank had fewer batches than the others, and has finished its epoch or its training.

Reads the job's key-value store, where each rank writes its epoch, its step, the length of its last complete epoch, and
where it waits.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_gpu_tools.advice.cause import Explanation, StallCause
from lightning_gpu_tools.advice.collectives import (
    BACKWARD_SYNC,
    END_OF_EPOCH,
    all_waiting,
    first_ended,
    others_wait,
    still_there,
)
from lightning_gpu_tools.advice.stall_examples import a_rank
from lightning_gpu_tools.training.stall_facts import RankFacts

_SAME_BATCHES = (
    "Give every rank the same number of batches: DistributedSampler(dataset, drop_last=True), or "
    "Trainer(limit_train_batches=...). Shard an IterableDataset by rank."
)


def find_among_ranks(ranks: Sequence[RankFacts]) -> Explanation | None:
    ended, waiting = first_ended(ranks), all_waiting(ranks)
    if ended is not None and ended.has_completed:
        furthest = max((one.step for one in still_there(ranks)), default=ended.step)
        finished = f"Rank {ended.rank} finished training after {ended.step} steps"
        why = f"{finished}; {others_wait(ranks)} at step {furthest}."
        return Explanation(why, _SAME_BATCHES, ended.rank)
    if waiting is None:
        return None
    fewest, most = (choose(ranks, key=lambda one: one.epoch_steps) for choose in (min, max))
    if 0 < fewest.epoch_steps < most.epoch_steps:
        lengths = (
            f"Rank {fewest.rank} had {fewest.epoch_steps} batches in an epoch, rank {most.rank} {most.epoch_steps}"
        )
        return Explanation(f"{lengths}.", _SAME_BATCHES, fewest.rank)
    is_at_end = waiting.odd.collective == END_OF_EPOCH and waiting.rest
    if not is_at_end and len({one.epoch for one in ranks}) == 1:
        return None
    return Explanation(f"{waiting.places}.", _SAME_BATCHES, waiting.odd.rank)


CAUSE = StallCause(
    says="training hangs at the end of an epoch: a rank had fewer batches",
    change="`DistributedSampler(dataset, drop_last=True)`, `limit_train_batches`; shard an `IterableDataset` by rank",
    find_among_ranks=find_among_ranks,
    verified_on="cpu",
    sick=(a_rank(0, collective=BACKWARD_SYNC), a_rank(1, collective=BACKWARD_SYNC, epoch=2)),
    healthy=(a_rank(0, collective=BACKWARD_SYNC), a_rank(1, collective=BACKWARD_SYNC)),
)
