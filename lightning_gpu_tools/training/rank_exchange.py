"""Facts that the ranks of a job exchange without a collective; no rank waits long for one that is gone."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from lightning_gpu_tools.training import compat

# The ranks of a job end an epoch at almost the same time, because each step's gradients are averaged over all.
TIMEOUT_S = 5.0
_POLL_S = 0.005

_Connect = Callable[[], Any]


class RankExchange:
    """A board in the store that ``torch.distributed`` was started with; each rank has one entry on it.

    Writing and reading it are round trips of well under a millisecond to the host of rank 0, on no GPU and no stream.
    Its name is the same on every rank, and a new one for each fit. Where the ranks do not talk through
    ``torch.distributed``, this rank is all there is.

    Args:
        name: Of the board.
        rank: This one.
        ranks: How many there are.
        connect: Returns the store in which it is kept; ``None`` if they have none in common.
    """

    def __init__(self, name: str, *, rank: int, ranks: int, connect: _Connect = compat.default_store) -> None:
        self._rank = rank
        self._name = name
        self._mine: dict[str, Any] = {}
        self._missed: set[int] = set()
        self._store = connect() if ranks > 1 else None
        self._ranks = range(ranks) if self._store is not None else range(rank, rank + 1)

    def publish(self, turn: int, **facts: Any) -> None:
        """Publish facts that JSON can hold, added to those that this rank has published before.

        ``turn`` rises from one call to the next, alike on every rank.
        """
        self._mine = {**self._mine, **facts, "rank": self._rank, "turn": turn}
        if self._store is not None:
            try:
                self._store.set(self._key(self._rank), json.dumps(self._mine))
            except RuntimeError:  # rank 0, which kept it, has gone: no rank is left to read
                self._store = None

    def read(self, turn: int, timeout_s: float = 0.0) -> list[dict[str, Any]]:
        """Return what the ranks published last, by rank; a rank that never published anything is missing.

        Wait for those that have not come to this turn yet, at most so long, and never again for one that did not come.
        """
        until_s = time.monotonic() + timeout_s
        found = {}
        for rank in self._ranks:
            facts = self.read_one(rank)
            while (facts is None or facts["turn"] < turn) and rank not in self._missed and time.monotonic() < until_s:
                time.sleep(_POLL_S)
                facts = self.read_one(rank)
            if timeout_s and (facts is None or facts["turn"] < turn):
                self._missed.add(rank)
            if facts is not None:
                found[rank] = facts
        return list(found.values())

    @property
    def missed(self) -> list[int]:
        """Return the ranks that did not come in time."""
        return sorted(self._missed)

    @property
    def ranks(self) -> int:
        """How many ranks can be heard."""
        return len(self._ranks)

    def _key(self, rank: int) -> str:
        return f"lightning_gpu_tools/{self._name}/{rank}"

    def read_one(self, rank: int) -> dict[str, Any] | None:
        """Return what a rank published last, without waiting; ``None`` if nothing, or if it cannot be heard."""
        if rank == self._rank:
            return self._mine or None
        if self._store is None:
            return None
        try:
            # Asking for a key that is not there would wait for it.
            facts: dict[str, Any] | None = (
                json.loads(self._store.get(self._key(rank))) if self._store.check([self._key(rank)]) else None
            )
        except RuntimeError:  # the store's host has gone
            self._store = facts = None
        return facts
