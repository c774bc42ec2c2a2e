"""Exchange of facts between the ranks of a job without a collective, through their rendezvous store.

Rank 0 reads the entries of all ranks with one request, in a thread.
"""

import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterable
from time import monotonic  # by name: a program's tests may replace those of `time`
from typing import Any, NamedTuple

from typing_extensions import override

from lightning_gpu_tools.background import BackgroundJobs

# Our defaults.
TIMEOUT_S = 5.0  # total wait for all ranks when training ends; they end almost at the same time
# Interval of publishing, and then reading: the first, its growth factor, the longest.
_FIRST_S, _LONGER, _EVERY_S = 0.25, 1.5, 60.0
_POLL_S = 0.005
_ANSWER_S = 1.0  # wait for the store after a failure

Entry = dict[str, Any]


class RankPlace(NamedTuple):
    """The place of this process in its job."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0  # on its node
    node: int = 0
    local_ranks: int = 1  # on its node


class Board:
    """A board on which each rank of a job has one entry that the others can read. No call waits for another rank.

    An entry holds ``rank``, ``node``, an increasing ``turn``, and the posted facts. ``name`` is a new one for each run,
    because entries stay in the store.
    """

    def __init__(self, name: str, place: RankPlace, store: Any) -> None:
        self.entries: dict[int, Entry] = {}  # by rank, the last entry that was read
        self._place = place
        # torchrun keeps its store when it starts the ranks again.
        self._name = f"lightning_gpu_tools/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}/{name}"
        self._store = store if place.world_size > 1 else None
        self._turn = 0
        self._there: set[str] = set()

    @property
    def is_shared(self) -> bool:
        """Whether the entries of other ranks can be read."""
        return self._store is not None

    def post(self, **facts: Any) -> None:
        """Replace this rank's entry with facts for JSON."""
        place = self._place
        self._turn += 1
        entry = {"rank": place.rank, "node": place.node, "turn": self._turn, **facts}
        self.entries[place.rank] = entry
        if self._store is not None:
            try:
                self._store.set(f"{self._name}/{place.rank}", json.dumps(entry))
            except RuntimeError:  # the store's host is gone
                self._store = None

    def read(self, ranks: Iterable[int]) -> None:
        """Read the entries of these ranks in one request."""
        keys, store = [f"{self._name}/{rank}" for rank in ranks], self._store
        if store is None:
            return
        try:
            new = [key for key in keys if key not in self._there]
            if new and not store.check(new):  # getting a key that has no value would block
                new = [key for key in new if store.check([key])]
            self._there.update(new)
            there = [key for key in keys if key in self._there]
            values: list[bytes] = store.multi_get(there) if there else []
        except RuntimeError:
            self._store = None
            return
        for value in values:
            entry = json.loads(value)
            self.entries[entry["rank"]] = entry
            time.sleep(0)  # releases the GIL to the training thread

    def read_all(self) -> None:
        """Read the entries of all other ranks."""
        self.read(rank for rank in range(self._place.world_size) if rank != self._place.rank)


class RankExchange(BackgroundJobs):
    """A thread that publishes the facts of this rank and gathers those of other ranks.

    On rank 0, the thread calls ``receive`` with all entries that it has gathered.
    """

    def __init__(
        self, name: str, place: RankPlace, store: Any, receive: Callable[[list[Entry]], None] = lambda entries: None
    ) -> None:
        super().__init__()
        self.wanted = False  # whether it is time to publish again
        self._receive = receive
        self._place = place
        self._board = Board(name, place, store)
        self._facts: dict[str, Any] = {}
        self._is_new = False
        self._interval_s = _FIRST_S
        self._wanted_s = monotonic() + _FIRST_S

    @property
    def ranks(self) -> int:
        """Number of ranks whose entries can be read."""
        return self._place.world_size if self._board.is_shared else 1

    def entries(self) -> list[Entry]:
        """Return the last entry read from each rank, by rank. Ranks other than 0 read only their own node."""
        return [entry for _, entry in sorted(self._board.entries.copy().items())]

    def publish(self, **facts: Any) -> None:
        """Publish facts in addition to the previous ones; see ``Board.post``."""
        self.wanted = False
        self._facts = {**self._facts, **facts}
        self._is_new = True
        if not self._board.is_shared:
            self._board.post(**self._facts)
        elif self._thread is None:
            self.add("Exchanging facts with other ranks", self._exchange)
        else:
            self.run_now()

    def finish(self, timeout_s: float) -> list[int]:
        """Publish once more, wait on rank 0 for the other ranks, and return those that are missing."""
        self._facts = {"is_last": True, **self._facts}
        until_s, has_ended = monotonic() + timeout_s, threading.Event()

        def gather() -> float:
            self._board.post(**self._facts)
            while self._late() and self._board.is_shared and monotonic() < until_s:
                time.sleep(_POLL_S)
                self._board.read(self._late())
            if self._place.rank == 0:
                self._receive(self.entries())
            has_ended.set()
            return math.inf

        if self._board.is_shared:
            self.add("Gathering the last facts of other ranks", gather)
            has_ended.wait(max(timeout_s, _ANSWER_S))
        else:
            gather()
        super().close(_ANSWER_S if has_ended.is_set() else 0.0)
        return self._late()

    @override
    def close(self, timeout_s: float = _ANSWER_S) -> None:
        super().close(timeout_s)

    def _late(self) -> list[int]:
        ranks = () if self._place.rank else range(1, self._place.world_size)
        return [rank for rank in ranks if not self._board.entries.get(rank, {}).get("is_last")]

    # In the thread

    def _exchange(self) -> float:
        if self._is_new:
            self._is_new = False
            self._board.post(**self._facts)
        now_s = monotonic()
        if now_s >= self._wanted_s:
            self.wanted = True
            self._interval_s = min(_LONGER * self._interval_s, _EVERY_S)
            self._wanted_s = now_s + self._interval_s
            if self._place.rank == 0:
                self._board.read_all()
                self._receive(self.entries())
            elif self._place.local_rank == 0:
                place = self._place
                self._board.read(range(place.rank, min(place.rank + place.local_ranks, place.world_size)))
        return self._wanted_s - monotonic()
