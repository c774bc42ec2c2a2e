"""The type of a cause of a stall. The folder ``stall_causes`` has a file for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lightning_gpu_tools.advice.cause import Machine
from lightning_gpu_tools.training.stall_facts import RankFacts, StallFacts


class Explanation(NamedTuple):
    """The reason why training has stalled."""

    cause: str  # the name of a StallCause
    why: str  # in sentences
    next_step: str
    rank: int | None = None  # the rank that is behind


@dataclass(frozen=True, kw_only=True)
class StallCause:
    """One reason why training makes no progress.

    Attributes:
        name: The value of ``Stall.cause``, and the name of its file.
        seen_as: The symptom that a user sees, as a cell of the table in docs/hanging_training.md.
        change: The change to make, as another cell of that table.
        find: Returns why a single process has stalled; ``None`` if this is not the reason.
        find_among_ranks: Returns why several ranks have stalled; ``None`` if this is not the reason.
        after: Causes that are judged earlier. The first one found counts.
        verified_on: The best machine on which the package found it in a real run.
        sick: A process, or ranks, stalled for this reason.
        healthy: Similar ones, stalled for another reason.
    """

    name: str
    seen_as: str
    change: str
    find: Callable[[StallFacts], Explanation | None] | None = None
    find_among_ranks: Callable[[Sequence[RankFacts]], Explanation | None] | None = None
    after: Sequence[str] = ()
    verified_on: Machine
    sick: StallFacts | Sequence[RankFacts]
    healthy: StallFacts | Sequence[RankFacts]
