"""The speed that a rank publishes of itself, and the facts in the entries of all ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any

from lightning_gpu_tools.advice.ranks import slowest_rank, usual_s, with_waits
from lightning_gpu_tools.gpus.readings import not_none
from lightning_gpu_tools.runs.run import Run
from lightning_gpu_tools.training.phases import (
    BACKWARD,
    CAPTURED,
    EPOCH_START,
    FORWARD,
    OPTIMIZER,
    RANK_WAIT,
    TRAINING_STEP,
    base_phase,
    is_backward,
    is_outside_step,
)
from lightning_gpu_tools.training.rank_waits import RankWaits
from lightning_gpu_tools.training.run_measurements import HeldContext, RankStep, SourceLine, StepBlock
from lightning_gpu_tools.training.step_clock import StepClock

_MAX_LINES = 8  # our default: that a rank sends to rank 0
_MIN_GPU_SAMPLES = 5  # our default: sampled steps of a GPU, to compare ranks
_OUTSIDE = "outside"  # callbacks, loggers, checkpoints, and validation, without waits for other ranks
_MAX_PARTS = 16  # our default: of a run, to show when a rank was slow


def own_step(run: Run, clock: StepClock, rank_waits: RankWaits) -> dict[str, Any] | None:
    """Return the fields of ``RankStep`` except rank and node; ``None`` before steady steps."""
    if not clock.blocks:
        return None
    parts = ["data_loading", "host_to_device_copy"]
    gpu_s = _own_gpu_s(run, clock, rank_waits)
    if not gpu_s and (run.is_plain_ddp or run.gpus):  # over NCCL, the host waits for no rank within these
        parts += ["forward", "optimizer", *([] if rank_waits.unseen else ["backward"])]
    blocks = list(clock.blocks)
    total = sum(blocks, StepBlock())
    gpu_step_s = sum(gpu_s.values())
    outside_step_s = {
        phase: seconds / max(1, clock.steps)
        for phase, seconds in clock.seconds.items()
        if is_outside_step(phase) or phase == EPOCH_START
    }
    of_parts = _by_part(total.phase_s)
    phase_s = {**{part: of_parts[part] / total.steps for part in parts}, **outside_step_s, **gpu_s}
    while len(blocks) > _MAX_PARTS:
        pairs = zip(blocks[::2], blocks[1::2], strict=False)  # an unpaired last block waits for the next
        blocks = [first + second for first, second in pairs]

    def own_s(block: StepBlock) -> float:
        of_parts = _by_part(block.phase_s)
        on_host_s = sum(of_parts[part] for part in (*parts, _OUTSIDE))
        on_gpu_s = block.gpu_step_s / block.gpu_steps if gpu_s and block.gpu_steps else gpu_step_s
        return on_host_s / block.steps + on_gpu_s

    return {
        "own_step_s": sum(phase_s.values()),
        "phase_s": {phase: round(seconds, 9) for phase, seconds in phase_s.items()},
        "own_s_over_time": [round(own_s(block), 6) for block in blocks],
        "steps_over_time": blocks[0].steps,
        "wait_s": None if run.gpus else of_parts[RANK_WAIT] / total.steps,
        "gpu": None if run.gpu is None else run.gpu.index,
    }


def _by_part(phase_s: Mapping[str, float]) -> defaultdict[str, float]:
    """Return the time by part of a step. Zeroing and clipping gradients belongs to the optimizer."""
    found: defaultdict[str, float] = defaultdict(float)
    for phase, seconds in phase_s.items():
        if phase in (FORWARD, CAPTURED):
            part = "forward"
        elif is_backward(phase):
            part = "backward"
        elif phase.startswith(f"{TRAINING_STEP}/"):
            part = "optimizer"
        else:
            part = _OUTSIDE if is_outside_step(phase) else base_phase(phase)
        found[part] += seconds
    return found


def own_lines(lines: Iterable[SourceLine]) -> list[dict[str, Any]]:
    """Return the most frequent lines of this rank, without those at which it waits for other ranks."""
    own = (line for line in lines if base_phase(line.phase) != RANK_WAIT)
    return [asdict(line) for line in islice(own, _MAX_LINES)]


def own_waits(run: Run, clock: StepClock, rank_waits: RankWaits) -> dict[str, Any]:
    """Return the times that tell, next to those of other ranks, how long a rank with a GPU waits for them."""
    if run.gpu is None:
        return {}
    idle = clock.gpu_idle() if _own_gpu_s(run, clock, rank_waits) else None
    total = sum(clock.blocks, StepBlock())
    return {
        "by_step": {} if idle is None else {str(step): round(s, 6) for step, s in idle.rank_wait_s.items()},
        "of_host_s": _by_part(total.phase_s)[RANK_WAIT] / max(1, total.steps),
        "step_s": total.wall_s / max(1, total.steps),
    }


def _own_gpu_s(run: Run, clock: StepClock, waits: RankWaits) -> dict[str, float]:
    """Return the GPU's own times for the parts of a step; empty if it waits for other ranks within them.

    A GPU that waits in forward, such as for SyncBatchNorm's statistics, also waits in backward.
    """
    idle = clock.gpu_idle()
    if not run.is_plain_ddp or waits.unseen_on_gpu or any(map(waits.waited_within, (FORWARD, OPTIMIZER))):
        return {}
    if idle is None or len(idle.last_steps) < _MIN_GPU_SAMPLES:
        return {}
    if BACKWARD not in idle.last_steps[-1]:  # it is inside a CUDA graph, and so is the wait
        return {}
    own = (FORWARD, BACKWARD, OPTIMIZER)
    return {phase.partition("/")[2]: usual_s(step.get(phase, 0.0) for step in idle.last_steps) for phase in own}


@dataclass(frozen=True)
class Received:
    """The facts in the entries of all ranks."""

    ranks: tuple[RankStep, ...] = ()  # empty until two of them have steady steps; the slowest one has its lines
    batch_sizes: tuple[int, ...] = ()  # in samples: the largest that fits each rank's GPU
    others_contexts: tuple[HeldContext, ...] = ()


def received(entries: Sequence[Mapping[str, Any]], own_rank: int) -> Received:
    """Return the facts in entries, whose keys are strings, as in JSON."""
    others = (entry for entry in entries if entry["rank"] != own_rank)
    return Received(
        ranks=_steps(entries),
        batch_sizes=tuple(not_none(entry.get("largest_batch_size") for entry in entries)),
        others_contexts=tuple(HeldContext(**one) for entry in others for one in entry.get("contexts", ())),
    )


def _steps(entries: Sequence[Mapping[str, Any]]) -> tuple[RankStep, ...]:
    ranks = tuple(
        RankStep(
            rank=entry["rank"],
            node=entry["node"],
            **{**own, "own_s_over_time": tuple(own["own_s_over_time"])},
        )
        for entry in entries
        if (own := entry.get("own_step")) is not None
    )
    if len(ranks) < 2:
        return ()
    ranks = with_waits(ranks, {entry["rank"]: entry.get("waits") or {} for entry in entries})
    slowest, _ = slowest_rank(ranks) or (None, 0.0)
    lines = {entry["rank"]: entry.get("lines", ()) for entry in entries}
    return tuple(
        replace(one, lines=tuple(SourceLine(**line) for line in lines[one.rank])) if one is slowest else one
        for one in ranks
    )
