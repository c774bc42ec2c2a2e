"""The collectives in which ranks wait for each other, by their stacks, and phrases about these ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from lightning_gpu_tools.training.phases import RANK_WAIT, base_phase
from lightning_gpu_tools.training.stall_facts import Frame, RankFacts, users_frame
from lightning_gpu_tools.units import number_ranges, printable

SAVE_CHECKPOINT = "saving a checkpoint"
SYNC_DIST = "self.log(..., sync_dist=True)"
COMPUTE_METRIC = "computing a metric"
SIGNAL_CHECK = "the check for signals"
END_OF_EPOCH = "the end of the epoch"
BACKWARD_SYNC = "backward"
FORWARD_SYNC = "DistributedDataParallel's forward"

# The files of torch's collectives.
_COLLECTIVE_FILES = tuple(
    f"torch/distributed/{name}.py" for name in ("distributed_c10d", "c10d_logger", "_functional_collectives")
)
# Keyed by functions on the stack; the first match counts.
_COLLECTIVES = {
    ("save_checkpoint",): SAVE_CHECKPOINT,
    ("_sync_ddp_if_available", "_sync_ddp", "sync_ddp"): SYNC_DIST,
    ("gather_all_tensors",): COMPUTE_METRIC,
    ("_broadcast_sigterm_tensor", "_sigterm_notifier_fn"): SIGNAL_CHECK,
    ("on_train_epoch_end", "on_advance_end"): END_OF_EPOCH,
    ("_engine_run_backward",): BACKWARD_SYNC,
    ("_sync_buffers", "_pre_forward"): FORWARD_SYNC,
}
_OF_EVERY_RANK = (BACKWARD_SYNC, FORWARD_SYNC, SIGNAL_CHECK)
_OF_ONE_RANK = (SAVE_CHECKPOINT, SYNC_DIST, COMPUTE_METRIC, END_OF_EPOCH)  # often reached by one rank only


def collective_of(stack: Sequence[Frame], phase: str, ranks: int) -> str | None:
    """Return the name of the collective in which a rank waits for the others; ``None`` if it does not wait."""
    if ranks < 2:
        return None
    names = [frame.function for frame in stack]
    calls = [frame.function for frame in stack if frame.file.endswith(_COLLECTIVE_FILES)]
    if not (base_phase(phase) == RANK_WAIT or calls or "_engine_run_backward" in names[-2:]):
        return None
    for functions, words in _COLLECTIVES.items():
        if any(name in functions for name in names):
            return words
    frame = users_frame(tuple(stack))
    innermost = next((name for name in reversed(calls) if name != "wrapper"), "a collective")
    return innermost + ("" if frame is None else f" in {frame.function}")


def first_ended(ranks: Sequence[RankFacts]) -> RankFacts | None:
    """Return the first rank whose training has ended."""
    return next((one for one in ranks if one.ended is not None), None)


def still_there(ranks: Sequence[RankFacts]) -> list[RankFacts]:
    """Return the ranks that have neither ended nor fallen silent."""
    return [one for one in ranks if one.ended is None and not one.silent_s]


def others_wait(ranks: Sequence[RankFacts]) -> str:
    """Return a phrase about the ranks that wait for a missing rank: ``"ranks 0, 1 and 2 wait for it"``."""
    here = still_there(ranks)
    return f"{_names(here)} wait{'s' * (len(here) == 1)} for it"


class WaitingRanks(NamedTuple):
    """Ranks that all wait in a collective."""

    odd: RankFacts  # if they wait in different places, the rank whose place the fewest share
    rest: list[RankFacts]  # those that wait elsewhere

    @property
    def place(self) -> str:
        """The place where the odd rank waits, as text."""
        return f"{printable(self.odd.collective)} at step {self.odd.step}"

    @property
    def places(self) -> str:
        """The places where ranks wait, as a sentence without a period."""
        words = f"Ranks wait in different places: rank {self.odd.rank} in {self.place}"
        if not self.rest:
            return words
        return f"{words}, {_names(self.rest)} in {printable(self.rest[0].collective)} at step {self.rest[0].step}"


def all_waiting(ranks: Sequence[RankFacts]) -> WaitingRanks | None:
    """Return the ranks if all of them wait for others, else ``None``."""
    if len(still_there(ranks)) < len(ranks) or any(one.collective is None for one in ranks):
        return None
    counts = Counter(one.collective for one in ranks)
    # Of two ranks that differ, the odd one is in a collective that not every rank has to reach.
    odd = min(ranks, key=lambda one: (*_rarity(one), counts[one.collective], one.rank))
    return WaitingRanks(odd, [one for one in ranks if one.collective != odd.collective])


def _rarity(one: RankFacts) -> tuple[bool, bool]:
    return one.collective in _OF_EVERY_RANK, one.collective not in _OF_ONE_RANK


def _names(ranks: Sequence[RankFacts]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {number_ranges(one.rank for one in ranks)}"
