"""The facts that ranks exchange: speed, warnings, other nodes' GPUs, each GPU's memory, and contexts."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, TypeVar

import msgspec

from lightning_gpu_tools.advice.memory_account import MemoryAccount, account_for
from lightning_gpu_tools.gpus.metrics import GpuSample, GpuSummary
from lightning_gpu_tools.gpus.readings import not_none
from lightning_gpu_tools.memory.readings import RankMemory
from lightning_gpu_tools.runs.run import gpu_readings
from lightning_gpu_tools.runs.run_recorder import RunRecorder
from lightning_gpu_tools.training.rank_exchange import Entry, RankExchange
from lightning_gpu_tools.training.run_measurements import RunMeasurements
from lightning_gpu_tools.units import number_ranges

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryShare:
    """One rank's facts about GPU memory."""

    gpu: tuple[int, int, str]  # on which it trains: node, index and UUID
    memory: RankMemory  # its own counts there
    samples: tuple[GpuSample, ...] = ()  # of the GPUs of its node, if this rank polls the driver
    own_pids: tuple[int, ...] | None = None  # the driver's PIDs of this job on its node, as far as known


def own_share(recorder: RunRecorder) -> MemoryShare | None:
    """Return this rank's facts about GPU memory; ``None`` without a GPU, or if nothing could be counted."""
    return recorder.facts.read("the use of the GPU's memory", partial(_own_share, recorder), None)


def _own_share(recorder: RunRecorder) -> MemoryShare | None:
    run, memory = recorder.run, None if recorder.memory is None else recorder.memory.facts()
    if memory is None or run.gpu is None:
        return None
    (gpu,) = gpu_readings([run.gpu])
    share = MemoryShare(gpu=(run.place.node, gpu.index, str(gpu.uuid)), memory=memory)
    if recorder.gpus is None:
        return share
    own_pids = recorder.gpus.own_pids
    samples = tuple(recorder.gpus.noted_memory())
    return replace(share, samples=samples, own_pids=None if own_pids is None else tuple(sorted(own_pids)))


def accounts(shares: Sequence[MemoryShare]) -> tuple[MemoryAccount, ...]:
    """Return the use of each GPU's memory."""
    drivers = {(share.gpu[0], sample.uuid): (sample, share.own_pids) for share in shares for sample in share.samples}
    ranks: defaultdict[tuple[int, int, str], list[RankMemory]] = defaultdict(list)
    for share in shares:
        ranks[share.gpu].append(share.memory)
    return tuple(
        account_for(gpu, memories, *drivers.get((gpu[0], gpu[2]), (None, None)))
        for gpu, memories in sorted(ranks.items(), key=lambda item: item[0])
    )


_MAX_LOGGED_RANKS = 64  # our default: eight machines with eight GPUs, each with a dozen metrics
_MAX_TROUBLES = 8  # of other nodes at a time: these fit on a screen


class Ranks:
    """The exchange of one rank with the others, from the start of training.

    If ``is_monitored``, GPUs of other nodes are published for loggers and the report.
    """

    def __init__(self, name: str, store: Any, recorder: RunRecorder, *, is_monitored: bool) -> None:
        self.recorder = recorder
        self._place = recorder.run.place
        self._is_monitored = is_monitored
        self._pids: frozenset[int] | None = None
        # Of the GPUs of other nodes:
        self._turns: dict[int, int] = {}  # the last entry received from each rank
        self._metrics: Mapping[str, float] = {}
        self._troubles: list[str] = []
        self.exchange = RankExchange(name, self._place, store, self._receive)
        self.exchange.publish(pid=os.getpid(), contexts=[*map(asdict, recorder.own_contexts())])

    def pids_on_node(self) -> frozenset[int] | None:
        """Return the PIDs of this job on the node; ``None`` until all ranks have published theirs."""
        if self._pids is None:
            pids = [entry["pid"] for entry in self.exchange.entries() if entry["node"] == self._place.node]
            if len(pids) >= min(self._place.local_ranks, self.exchange.ranks):
                self._pids = frozenset(pids)
        return self._pids

    def publish(self, *, at_end: bool = False) -> None:
        """Publish this rank's speed; the first rank of every other node also publishes its GPUs."""
        if self._place.world_size == 1:
            return
        recorder, gpus = self.recorder, self.recorder.gpus
        facts = recorder.own_entry()
        if self._is_monitored and gpus is not None and self._place.rank != 0:
            metrics, facts["troubles"] = gpus.take_metrics()
            facts["metrics"] = metrics if self._place.world_size <= _MAX_LOGGED_RANKS else {}
            summaries = gpus.summaries(at_end=at_end)
            facts["gpus"] = [asdict(replace(gpu, timelines={})) for gpu in summaries]
        share = own_share(recorder)
        if share is not None:  # without the long part
            share = replace(share, memory=replace(share.memory, recorded=None))
            facts["memory"] = asdict(share)
        self.exchange.publish(**facts)

    def finish(self, timeout_s: float) -> list[str]:
        """Publish one last time, and on rank 0 wait for the others; return sentences about missing facts."""
        self.publish(at_end=True)
        late = self.exchange.finish(timeout_s)
        if not late or not timeout_s:
            return []
        ranks = f"Rank{'s' * (len(late) > 1)} {number_ranges(late)}"
        end = "after the end. The report has only their earlier data."
        return [f"{ranks} did not report within {timeout_s:.0f} s {end}"]

    def _receive(self, entries: Sequence[Entry]) -> None:
        """Process the entries of the ranks: on rank 0, in the thread of the exchange."""
        self.recorder.receive(entries)
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
        found: _T | None = self.recorder.facts.read(what, partial(msgspec.convert, facts, kind), None)
        return found

    def memory_accounts(self, own: MemoryShare | None, *, all_ranks: bool) -> tuple[MemoryAccount, ...]:
        """Return the use of each GPU's memory by all ranks, or, faster, by this rank only."""
        shares = [] if own is None else [own]
        if all_ranks:
            others = (entry for entry in self.exchange.entries() if entry["rank"] != self._place.rank)
            received = (entry["memory"] for entry in others if entry.get("memory"))
            shares += not_none(self._read("the memory of another rank", MemoryShare, share) for share in received)
        return accounts(shares)

    def are_missing(self, measured: RunMeasurements) -> bool:
        """Return whether it is too early to judge, because rank 0 lacks the speed of other ranks."""
        return self._place.rank == 0 and self.exchange.ranks > max(1, len(measured.ranks))
