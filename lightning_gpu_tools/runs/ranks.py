"""The facts that ranks exchange: speed, warnings, other nodes' GPUs, and each GPU's memory."""

import math
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
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
from lightning_gpu_tools.training.phases import (
    BACKWARD,
    EPOCH_START,
    FORWARD,
    OPTIMIZER,
    RANK_WAIT,
    TRAINING_STEP,
    base_phase,
    is_backward,
    is_outside_step,
)
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
        # In the entries of all ranks:
        self.steps: tuple[RankStep, ...] = ()
        self.batch_sizes: list[int] = []  # in samples: the largest that fits each rank's GPU
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

    def ranks_elsewhere(self, uuid: str | None) -> Mapping[int, int]:
        """Return PID -> rank of the ranks on this node that train on another GPU than this one."""
        entries = self.exchange.entries()
        on_node = (entry for entry in entries if entry["node"] == self._place.node)
        return {entry["pid"]: entry["rank"] for entry in on_node if entry["gpu"] != uuid}

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
        self.steps = steps_of(entries)
        self.batch_sizes = not_none(entry.get("largest_batch_size") for entry in entries)
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
    published = [entry["own_step"] for entry in entries if entry.get("own_step") is not None]
    if len(published) < 2:
        return ()
    ranks = msgspec.convert(published, tuple[RankStep, ...])
    ranks = _with_waits(ranks, {entry["rank"]: entry.get("waits") or {} for entry in entries})
    slowest, _ = slowest_rank(ranks) or (None, 0.0)
    return tuple(one if one is slowest else replace(one, lines=()) for one in ranks)


def _with_waits(ranks: tuple[RankStep, ...], waits: Mapping[int, Mapping[str, Any]]) -> tuple[RankStep, ...]:
    """Add the waits of GPUs for other ranks, from each rank's ``RunRecorder.own_waits``."""
    of_ranks = [waits[rank.rank] for rank in ranks]
    if all(rank.wait_s is not None for rank in ranks) or not all(of_ranks):
        return ranks
    # Both are lower bounds: sampled steps may miss rare waits, and hosts wait for the rank that is last on average.
    hosts_s = [waits_of_rank["of_host_s"] for waits_of_rank in of_ranks]
    late_s: list[float | None] = [None] * len(ranks)
    if any(hosts_s):  # a host also waits for its own GPU's work, which is not waiting for others
        rooms_s = [
            waits_of_rank["step_s"] - rank.own_step_s for rank, waits_of_rank in zip(ranks, of_ranks, strict=True)
        ]
        late_s = [max(0.0, min(s - min(hosts_s), room_s)) for s, room_s in zip(hosts_s, rooms_s, strict=True)]
    sending_s = None
    steps = set.intersection(*(set(waits_of_rank["by_step"]) for waits_of_rank in of_ranks))
    if len(steps) >= _MIN_GPU_SAMPLES:
        least_s = {step: min(waits_of_rank["by_step"][step] for waits_of_rank in of_ranks) for step in steps}
        sending_s = median(least_s.values())
        sampled_s = [
            _usual_s(waits_of_rank["by_step"][step] - least_s[step] for step in steps) for waits_of_rank in of_ranks
        ]
        late_s = [max(not_none([one_s, two_s])) for one_s, two_s in zip(late_s, sampled_s, strict=True)]
    return tuple(
        replace(rank, others_late_s=one_s, wait_s=None if sending_s is None or one_s is None else sending_s + one_s)
        for rank, one_s in zip(ranks, late_s, strict=True)
    )


def own_step(run: Run, timer: Timer, lines: Iterable[SourceLine]) -> RankStep | None:
    """Return this rank's step, with its most frequent lines; ``None`` before steady steps."""
    clock = timer.clock
    if not clock.blocks:
        return None
    parts = ["data_loading", "host_to_device_copy"]
    gpu_s = _own_gpu_s(run, timer)
    if not gpu_s and (run.is_plain_ddp or run.gpus):  # over NCCL, the host waits for no rank within these
        parts += ["forward", "optimizer", *([] if timer.rank_waits.unseen else ["backward"])]
    total = sum(clock.blocks, StepBlock())
    outside_step_s = {
        phase: seconds / max(1, clock.steps)
        for phase, seconds in clock.seconds.items()
        if is_outside_step(phase) or phase == EPOCH_START
    }
    of_parts = _by_part(total.phase_s)
    phase_s = {**{part: of_parts[part] / total.steps for part in parts}, **outside_step_s, **gpu_s}
    # Without those at which it waits for other ranks.
    own_lines = (line for line in lines if base_phase(line.phase) != RANK_WAIT)
    return RankStep(
        rank=run.place.rank,
        node=run.place.node,
        own_step_s=sum(phase_s.values()),
        phase_s={phase: round(seconds, 9) for phase, seconds in phase_s.items()},
        wait_s=None if run.gpus else of_parts[RANK_WAIT] / total.steps,
        lines=tuple(islice(own_lines, _MAX_LINES)),
        gpu=None if run.gpu is None else run.gpu.index,
    )


def _by_part(phase_s: Mapping[str, float]) -> defaultdict[str, float]:
    """Return the time by part of a step. Zeroing and clipping gradients belongs to the optimizer."""
    found: defaultdict[str, float] = defaultdict(float)
    for phase, seconds in phase_s.items():
        if phase == FORWARD:
            part = "forward"
        elif is_backward(phase):
            part = "backward"
        elif phase.startswith(f"{TRAINING_STEP}/"):
            part = "optimizer"
        else:
            part = base_phase(phase)
        found[part] += seconds
    return found


def own_waits(run: Run, timer: Timer) -> dict[str, Any]:
    """Return the times that tell, next to those of other ranks, how long a rank with a GPU waits for them."""
    if run.gpu is None:
        return {}
    idle = timer.clock.gpu_idle() if _own_gpu_s(run, timer) else None
    total = sum(timer.clock.blocks, StepBlock())
    return {
        "by_step": {} if idle is None else {str(step): round(s, 6) for step, s in idle.rank_wait_s.items()},
        "of_host_s": _by_part(total.phase_s)[RANK_WAIT] / max(1, total.steps),
        "step_s": total.wall_s / max(1, total.steps),
    }


def _own_gpu_s(run: Run, timer: Timer) -> dict[str, float]:
    """Return the GPU's own times for the parts of a step; empty if it waits for other ranks within them.

    A GPU that waits in forward, such as for SyncBatchNorm's statistics, also waits in backward.
    """
    idle, waits = timer.clock.gpu_idle(), timer.rank_waits
    if not run.is_plain_ddp or waits.unseen_on_gpu or any(map(waits.waited_within, (FORWARD, OPTIMIZER))):
        return {}
    if idle is None or len(idle.steps_s) < _MIN_GPU_SAMPLES:
        return {}
    if BACKWARD not in idle.steps_s[-1]:  # it is inside a CUDA graph, and so is the wait
        return {}
    own = (FORWARD, BACKWARD, OPTIMIZER)
    return {phase.partition("/")[2]: _usual_s(step.get(phase, 0.0) for step in idle.steps_s) for phase in own}


def _usual_s(sampled_s: Iterable[float]) -> float:
    """Return the mean of sampled steps without the longest 10%, because one outlier distorts the mean of a few."""
    seconds = sorted(sampled_s)
    return fmean(seconds[: math.ceil(_USUAL * len(seconds))])
