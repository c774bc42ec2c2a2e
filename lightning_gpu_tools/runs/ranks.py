"""The facts that ranks exchange: speed, warnings, other nodes' GPUs, and each GPU's memory."""

import math
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import islice
from statistics import fmean, median
from typing import Any, TypeVar

import msgspec

from lightning_gpu_tools.advice.lost_time import slowest_rank
from lightning_gpu_tools.advice.memory_account import MemoryAccount, accounts
from lightning_gpu_tools.background import SafeReader
from lightning_gpu_tools.gpus.metrics import GpuSummary
from lightning_gpu_tools.gpus.readings import not_none
from lightning_gpu_tools.memory.readings import RankMemory
from lightning_gpu_tools.runs.run import Run, Timer
from lightning_gpu_tools.training import phases
from lightning_gpu_tools.training.rank_exchange import Entry, RankExchange, RankPlace
from lightning_gpu_tools.training.run_measurements import RankStep, SourceLine, StepBlock
from lightning_gpu_tools.units import number_ranges

_T = TypeVar("_T")

_MAX_LINES = 8  # our default: that a rank sends to rank 0
_MAX_TROUBLES = 8  # of other nodes at a time: these fit on a screen
_MIN_GPU_SAMPLES = 5  # our default: sampled steps of a GPU, or that all ranks have sampled, to compare ranks
_USUAL = 0.9  # our default: the share of sampled steps that count, shortest first


class Ranks:
    """The exchange of one rank with the others, from the start of training."""

    def __init__(self, name: str, place: RankPlace, store: Any, reader: SafeReader) -> None:
        self.steps: tuple[RankStep, ...] = ()  # in the entries of all ranks
        self._place = place
        self._reader = reader
        # Of the GPUs of other nodes:
        self._turns: dict[int, int] = {}  # the last entry received from each rank
        self._metrics: Mapping[str, float] = {}
        self._troubles: list[str] = []
        self.exchange = RankExchange(name, place, store, self._receive)

    def pids_on_node(self) -> frozenset[int] | None:
        """Return the PIDs of this job on the node; ``None`` until all ranks have published theirs."""
        pids = frozenset(entry["pid"] for entry in self._on_node())
        return pids if len(pids) >= min(self._place.local_ranks, self.exchange.ranks) else None

    def ranks_elsewhere(self, uuid: str | None) -> Mapping[int, int]:
        """Return PID -> rank of the ranks on this node that train on another GPU than this one."""
        return {entry["pid"]: entry["rank"] for entry in self._on_node() if entry["gpu"] != uuid}

    def _on_node(self) -> list[Entry]:
        return [entry for entry in self.exchange.entries() if entry["node"] == self._place.node]

    def finish(self, timeout_s: float) -> list[str]:
        """On rank 0, wait for the last entries of the others; return sentences about missing facts."""
        late = self.exchange.finish(timeout_s)
        if not late or not timeout_s:
            return []
        which = f"Rank{'s' * (len(late) > 1)} {number_ranges(late)} did not report within {timeout_s:.0f} s"
        return [f"{which} after the end. The report has only their earlier data."]

    def _receive(self, entries: Sequence[Entry]) -> None:
        """Process the entries of the ranks: on rank 0, in the thread of the exchange."""
        self.steps = steps_of(entries)
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
        return tuple(self._read("the GPUs of another node", GpuSummary, gpus))

    def memory_accounts(self, own: RankMemory | None, *, all_ranks: bool) -> tuple[MemoryAccount, ...]:
        """Return the use of each GPU's memory by all ranks, or, faster, by this rank only."""
        ranks = [] if own is None else [own]
        if all_ranks:
            others = (entry for entry in self.exchange.entries() if entry["rank"] != self._place.rank)
            memories = (entry["memory"] for entry in others if entry.get("memory"))
            ranks += self._read("the memory of another rank", RankMemory, memories)
        return accounts(ranks)

    def _read(self, what: str, kind: type[_T], entries: Iterable[Any]) -> list[_T]:
        found: list[_T | None] = []
        for entry in entries:
            time.sleep(0)  # releases the GIL to the training thread, if this is another thread
            found.append(self._reader.read(what, partial(msgspec.convert, entry, kind), None))
        return not_none(found)


def steps_of(entries: Sequence[Mapping[str, Any]]) -> tuple[RankStep, ...]:
    """Return the steps in the entries of ranks, if at least two have steady steps. Only the slowest has its lines."""
    published = [entry for entry in entries if entry.get("own_step") is not None]
    if len(published) < 2:
        return ()
    ranks = msgspec.convert([entry["own_step"] for entry in published], tuple[RankStep, ...])
    ranks = _with_waits(ranks, [entry.get("waits") or {} for entry in published])
    slowest, _ = slowest_rank(ranks) or (None, 0.0)
    return tuple(one if one is slowest else replace(one, lines=()) for one in ranks)


def _with_waits(ranks: tuple[RankStep, ...], waits: Sequence[Mapping[str, Any]]) -> tuple[RankStep, ...]:
    """Add the waits of GPUs for other ranks, from each rank's ``own_facts``."""
    if all(rank.wait_s is not None for rank in ranks) or not all(waits):
        return ranks
    # Both are lower bounds: sampled steps may miss rare waits, and hosts wait for the rank that is last on average.
    late_s: list[float | None] = [None] * len(ranks)
    least_host_s = min(one["of_host_s"] for one in waits)
    if any(one["of_host_s"] for one in waits):  # a host also waits for its own GPU's work, which is not for others
        late_s = [
            max(0.0, min(one["of_host_s"] - least_host_s, one["step_s"] - rank.own_step_s))
            for rank, one in zip(ranks, waits, strict=True)
        ]
    sending_s = None
    by_step: list[dict[str, float]] = [one["by_step"] for one in waits]
    steps = set.intersection(*map(set, by_step))
    if len(steps) >= _MIN_GPU_SAMPLES:
        least_s = {step: min(one_s[step] for one_s in by_step) for step in steps}
        sending_s = median(least_s.values())
        sampled_s = [_usual_s(one_s[step] - least_s[step] for step in steps) for one_s in by_step]
        late_s = [max(not_none(both_s)) for both_s in zip(late_s, sampled_s, strict=True)]
    return tuple(
        replace(rank, others_late_s=one_s, wait_s=None if sending_s is None or one_s is None else sending_s + one_s)
        for rank, one_s in zip(ranks, late_s, strict=True)
    )


def own_facts(run: Run, timer: Timer, lines: Iterable[SourceLine]) -> dict[str, Any]:
    """Return this rank's ``RankStep`` with its most frequent lines, as ``own_step``: ``None`` before steady steps.

    With a GPU, ``waits`` has the times that tell, next to those of other ranks, how long this rank waits for them.
    """
    clock = timer.clock
    if not clock.blocks:
        return {"own_step": None}
    total, idle, gpu_s = sum(clock.blocks, StepBlock()), clock.gpu_idle(), _own_gpu_s(run, timer)
    parts = ["data_loading", "host_to_device_copy"]
    if not gpu_s and (run.is_plain_ddp or run.gpus):  # over NCCL, the host waits for no rank within these
        parts += ["forward", "optimizer", *([] if timer.rank_waits.unseen else ["backward"])]
    outside_step_s = {
        phase: seconds / max(1, clock.steps)
        for phase, seconds in clock.seconds.items()
        if phases.is_outside_step(phase) or phase == phases.EPOCH_START
    }
    of_parts = _by_part(total.phase_s)
    phase_s = {**{part: of_parts[part] / total.steps for part in parts}, **outside_step_s, **gpu_s}
    wait_s = of_parts[phases.RANK_WAIT] / total.steps
    # Without those at which it waits for other ranks.
    own_lines = (line for line in lines if phases.base_phase(line.phase) != phases.RANK_WAIT)
    own = RankStep(
        rank=run.place.rank,
        node=run.place.node,
        own_step_s=sum(phase_s.values()),
        phase_s={phase: round(seconds, 9) for phase, seconds in phase_s.items()},
        wait_s=None if run.gpus else wait_s,
        lines=tuple(islice(own_lines, _MAX_LINES)),
        gpu=None if run.gpu is None else run.gpu.index,
    )
    if run.gpu is None:
        return {"own_step": asdict(own)}
    by_step = idle.rank_wait_s if gpu_s and idle is not None else {}
    waits = {
        "by_step": {str(step): round(seconds, 6) for step, seconds in by_step.items()},
        "of_host_s": wait_s,
        "step_s": total.wall_s / total.steps,
    }
    return {"own_step": asdict(own), "waits": waits}


def _by_part(phase_s: Mapping[str, float]) -> defaultdict[str, float]:
    """Return the time by part of a step. Zeroing and clipping gradients belongs to the optimizer."""
    found: defaultdict[str, float] = defaultdict(float)
    for phase, seconds in phase_s.items():
        part = phases.base_phase(phase)
        if phase.startswith(f"{phases.TRAINING_STEP}/"):
            part = "forward" if phase == phases.FORWARD else "backward" if phases.is_backward(phase) else "optimizer"
        found[part] += seconds
    return found


def _own_gpu_s(run: Run, timer: Timer) -> dict[str, float]:
    """Return the GPU's own times for the parts of a step; empty if it waits for other ranks within them.

    A GPU that waits in forward, such as for SyncBatchNorm's statistics, also waits in backward.
    """
    idle, waits = timer.clock.gpu_idle(), timer.rank_waits
    if not run.is_plain_ddp or waits.unseen_on_gpu or any(map(waits.waited_within, (phases.FORWARD, phases.OPTIMIZER))):
        return {}
    if idle is None or len(idle.steps_s) < _MIN_GPU_SAMPLES:
        return {}
    if phases.BACKWARD not in idle.steps_s[-1]:  # it is inside a CUDA graph, and so is the wait
        return {}
    own = (phases.FORWARD, phases.BACKWARD, phases.OPTIMIZER)
    return {phase.partition("/")[2]: _usual_s(step.get(phase, 0.0) for step in idle.steps_s) for phase in own}


def _usual_s(sampled_s: Iterable[float]) -> float:
    """Return the mean of sampled steps without the longest 10%, because one outlier distorts the mean of a few."""
    seconds = sorted(sampled_s)
    return fmean(seconds[: math.ceil(_USUAL * len(seconds))])
