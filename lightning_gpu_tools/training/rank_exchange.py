"""What each rank of a job tells rank 0, without a collective: nobody ever waits long for a rank that is gone."""

from __future__ import annotations

import json
import time
from typing import Any

import torch.distributed

# The ranks of a job end an epoch at almost the same time, because each step's gradients are averaged over all.
PATIENCE_S = 5.0
_POLL_S = 0.005


class RankExchange:
    """A notice board in the store that ``torch.distributed`` was started with; each rank has one place on it.

    Writing and reading it are round trips of well under a millisecond to the host of rank 0, on no GPU and no stream.

    Args:
        name: Of the board; the same on every rank, and a new one for each fit.
        rank: This rank, counted over all nodes.
        ranks: How many there are. Where they do not talk through ``torch.distributed``, this rank is all there is.
    """

    def __init__(self, name: str, *, rank: int, ranks: int) -> None:
        self._rank = rank
        self._name = name
        self._mine: dict[str, Any] = {}
        self._missed: set[int] = set()
        shared = torch.distributed.is_available() and torch.distributed.is_initialized() and ranks > 1
        self._ranks = range(ranks) if shared else range(self._rank, self._rank + 1)
        # torch has no public name for it; it is what torch.distributed.init_process_group met the others in.
        self._store = torch.distributed.distributed_c10d._get_default_store() if shared else None

    def tell(self, turn: int, **facts: Any) -> None:
        """Put facts that JSON can hold on this rank's place, over what it told before.

        Args:
            turn: Rises from one call to the next, alike on every rank.
            **facts: What to tell.
        """
        self._mine = {**self._mine, **facts, "rank": self._rank, "turn": turn}
        if self._store is not None:
            try:
                self._store.set(self._key(self._rank), json.dumps(self._mine))
            except RuntimeError:  # rank 0 has gone, which kept it: nobody is left to read
                self._store = None

    def read(self, turn: int, patience_s: float = 0.0) -> list[dict[str, Any]]:
        """Return what the ranks told last, by rank; a rank that never told anything is missing.

        Args:
            turn: Wait for those who have not come so far...
            patience_s: ...but not longer than this, and only once for a rank that lets one wait in vain.
        """
        until_s = time.monotonic() + patience_s
        found = {}
        for rank in self._ranks:
            facts = self._read_one(rank)
            while (facts is None or facts["turn"] < turn) and rank not in self._missed and time.monotonic() < until_s:
                time.sleep(_POLL_S)
                facts = self._read_one(rank)
            if patience_s and (facts is None or facts["turn"] < turn):
                self._missed.add(rank)
            if facts is not None:
                found[rank] = facts
        return list(found.values())

    @property
    def missed(self) -> list[int]:
        """Return the ranks that were waited for in vain."""
        return sorted(self._missed)

    @property
    def ranks(self) -> int:
        """How many ranks can be heard."""
        return len(self._ranks)

    def _key(self, rank: int) -> str:
        return f"lightning_gpu_tools/{self._name}/{rank}"

    def _read_one(self, rank: int) -> dict[str, Any] | None:
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
