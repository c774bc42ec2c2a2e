"""How the ranks of a job come to the same settings: each hears of the trials of all."""

from __future__ import annotations

from typing import Any, Protocol

from lightning_gpu_tools.training.rank_exchange import RankExchange

# A choice: the ranks wait for each other in every step, so one that comes so much later is gone.
_PATIENCE_S = 60.0


class Ranks(Protocol):
    """The training processes that must decide the same, because each waits for the others in every step."""

    count: int

    def gather(self, facts: dict[str, Any]) -> list[dict[str, Any]] | None:
        """Return the facts of all of them in the order of the ranks; ``None`` if one did not answer."""


class OneRank:
    """The ranks of a training that has one."""

    count = 1

    def gather(self, facts: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the facts."""
        return [facts]


class BoardOfRanks:
    """The ranks that meet on a notice board, at the end of each trial and at no other time."""

    def __init__(self, exchange: RankExchange) -> None:
        self.count = exchange.ranks
        self._exchange = exchange
        self._turn = 0

    def gather(self, facts: dict[str, Any]) -> list[dict[str, Any]] | None:
        """Return the facts of all ranks, which are the same on all; ``None`` if one is missing."""
        self._turn += 1
        self._exchange.publish(self._turn, **facts)
        everyones = self._exchange.read(self._turn, _PATIENCE_S)
        complete = len(everyones) == self.count and all(one["turn"] == self._turn for one in everyones)
        return everyones if complete else None
