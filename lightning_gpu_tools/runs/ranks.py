"""The facts that ranks exchange: speed, warnings, other nodes' GPUs, each GPU's memory, and contexts."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec

from lightning_gpu_tools.advice.memory_account import MemoryAccount, accounts
from lightning_gpu_tools.gpus.metrics import GpuSummary
from lightning_gpu_tools.gpus.readings import not_none
from lightning_gpu_tools.memory.readings import RankMemory
from lightning_gpu_tools.runs.rank_entries import Received, received
from lightning_gpu_tools.training.rank_exchange import Entry, RankExchange, RankPlace
from lightning_gpu_tools.training.run_measurements import RunMeasurements
from lightning_gpu_tools.training.safe_reader import SafeReader
from lightning_gpu_tools.units import number_ranges

_T = TypeVar("_T")


_MAX_TROUBLES = 8  # of other nodes at a time: these fit on a screen


class Ranks:
    """The exchange of one rank with the others, from the start of training."""

    def __init__(self, name: str, place: RankPlace, store: Any, reader: SafeReader) -> None:
        self.received = Received()
        self._place = place
        self._reader = reader
        self._pids: frozenset[int] | None = None
        # Of the GPUs of other nodes:
        self._turns: dict[int, int] = {}  # the last entry received from each rank
        self._metrics: Mapping[str, float] = {}
        self._troubles: list[str] = []
        self.exchange = RankExchange(name, place, store, self._receive)

    def pids_on_node(self) -> frozenset[int] | None:
        """Return the PIDs of this job on the node; ``None`` until all ranks have published theirs."""
        if self._pids is None:
            pids = [entry["pid"] for entry in self.exchange.entries() if entry["node"] == self._place.node]
            if len(pids) >= min(self._place.local_ranks, self.exchange.ranks):
                self._pids = frozenset(pids)
        return self._pids

    def finish(self, timeout_s: float) -> list[str]:
        """On rank 0, wait for the last entries of the others; return sentences about missing facts."""
        late = self.exchange.finish(timeout_s)
        if not late or not timeout_s:
            return []
        ranks = f"Rank{'s' * (len(late) > 1)} {number_ranges(late)}"
        end = "after the end. The report has only their earlier data."
        return [f"{ranks} did not report within {timeout_s:.0f} s {end}"]

    def _receive(self, entries: Sequence[Entry]) -> None:
        """Process the entries of the ranks: on rank 0, in the thread of the exchange."""
        self.received = received(entries, self._place.rank)
        for entry in entries:
            if "metrics" in entry and entry["turn"] > self._turns.get(entry["rank"], 0):
                self._turns[entry["rank"]] = entry["turn"]
                self._metrics = {**self._metrics, **entry["metrics"]}
                self._troubles = [*self._troubles, *entry["troubles"]]

    def take_metrics(self) -> tuple[Mapping[str, float], list[str]]:
        """Return the metrics of other nodes' GPUs received since the last call, and warnings about them."""
        metrics, self._metrics = self._metrics, {}
        troubles, self._troubles = self._troubles, []
        return metrics, troubles[:_MAX_TROUBLES]

    def gpus_of_other_nodes(self) -> tuple[GpuSummary, ...]:
        """Return the GPUs in the latest entries of other nodes."""
        gpus = (gpu for entry in self.exchange.entries() for gpu in entry.get("gpus", ()))
        return tuple(not_none(self._read("the GPUs of another node", GpuSummary, gpu) for gpu in gpus))

    def _read(self, what: str, kind: type[_T], facts: Any) -> _T | None:
        time.sleep(0)  # releases the GIL to the training thread, if this is another thread
        found: _T | None = self._reader.read(what, partial(msgspec.convert, facts, kind), None)
        return found

    def memory_accounts(self, own: RankMemory | None, *, all_ranks: bool) -> tuple[MemoryAccount, ...]:
        """Return the use of each GPU's memory by all ranks, or, faster, by this rank only."""
        ranks = [] if own is None else [own]
        if all_ranks:
            others = (entry for entry in self.exchange.entries() if entry["rank"] != self._place.rank)
            received = (entry["memory"] for entry in others if entry.get("memory"))
            ranks += not_none(self._read("the memory of another rank", RankMemory, memory) for memory in received)
        return accounts(ranks)

    def are_missing(self, measured: RunMeasurements) -> bool:
        """Return whether it is too early to judge, because rank 0 lacks the speed of other ranks."""
        return self._place.rank == 0 and self.exchange.ranks > max(1, len(measured.ranks))
