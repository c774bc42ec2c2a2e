"""The type of a cause of a stall. The folder ``stall_causes`` has a file for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lightning_gpu_tools.advice.cause import AnyCause
from lightning_gpu_tools.training.stall_facts import RankFacts, StallFacts


class Explanation(NamedTuple):
    """The reason why training has stalled."""

    cause: str  # the name of a StallCause
    why: str  # in sentences
    next_step: str
    rank: int | None = None  # the rank that is behind


@dataclass(frozen=True, kw_only=True)
class StallCause(AnyCause):
    """One reason why training makes no progress. The first one found counts."""

    # Both return why a process, or several ranks, have stalled; None if this is not the reason.
    find: Callable[[StallFacts], Explanation | None] | None = None
    find_among_ranks: Callable[[Sequence[RankFacts]], Explanation | None] | None = None
