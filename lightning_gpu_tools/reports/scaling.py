"""The scaling of a program from fewer to more ranks: its efficiency and its losses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

from lightning_gpu_tools.advice.ranks import mean_wait_s
from lightning_gpu_tools.reports.report import Report
from lightning_gpu_tools.reports.text import phase_label
from lightning_gpu_tools.training.phases import DATA_LOADING, PAUSES, RANK_WAIT, TRAINING_STEP
from lightning_gpu_tools.units import format_duration

# Settings that may differ if the number of ranks differs.
SCALED = ("world_size", "batch_size", "accumulate_grad_batches")
Kind = Literal["weak", "strong"]
_MIN_SHARE = 0.01  # our default: of a step; a smaller loss is not reported


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """Time per step that linear scaling would not need."""

    what: str
    seconds: float  # per step
    share: float  # of the step


@dataclass(frozen=True, kw_only=True, slots=True)
class Scaling:
    """The speed of a program on more ranks relative to its speed on fewer."""

    kind: Kind  # "weak": same batch per rank, "strong": same batch of the whole job
    ranks: int  # of the larger run
    of_ranks: int
    speedup: float  # by samples of the whole job per second
    speedup_low: float  # of its 95 % interval
    speedup_high: float
    efficiency: float  # 1 = linear
    losses: tuple[Loss, ...] = ()  # largest first


def kind_of_scaling(new: Report, old: Report) -> Kind | None:
    """Return the kind of scaling between two runs; ``None`` with equal numbers of ranks, or other batch sizes."""
    given = ([report.settings.get(name) for report in (new, old)] for name in SCALED)
    ranks, batches, steps = ([1 if one is None else one for one in both] for both in given)
    if not all(isinstance(one, int) and one > 0 for one in (*ranks, *batches, *steps)) or ranks[0] == ranks[1]:
        return None
    if batches[0] == batches[1] and steps[0] == steps[1]:
        return "weak"
    jobs = [rank * batch * step for rank, batch, step in zip(ranks, batches, steps, strict=True)]
    return "strong" if jobs[0] == jobs[1] else None


def scaling(
    kind: Kind, new: Report, old: Report, speed: Mapping[str, Any], phase_s: Sequence[Mapping[str, float]]
) -> Scaling:
    """Return how a program scales between two runs.

    ``speed`` is the change of the time per sample of the job from the old run to the new one, with its 95 % interval.
    ``phase_s`` has the time per step of each group of phases in the new run and in the old one.
    """
    slowdown, low, high = (1 + speed[name] for name in ("slowdown", "slowdown_low", "slowdown_high"))
    more, few = (new, phase_s[0]), (old, phase_s[1])
    speedup, interval = 1 / slowdown, (1 / high, 1 / low)
    if ranks_of(new) < ranks_of(old):
        more, few, speedup, interval = few, more, slowdown, (low, high)
    ranks, of_ranks = ranks_of(more[0]), ranks_of(few[0])
    return Scaling(
        kind=kind,
        ranks=ranks,
        of_ranks=of_ranks,
        speedup=speedup,
        speedup_low=interval[0],
        speedup_high=interval[1],
        efficiency=speedup * of_ranks / ranks,
        losses=tuple(_losses(*more, *few)),
    )


def ranks_of(report: Report) -> int:
    """Return the number of ranks of a run."""
    return int(report.settings.get("world_size", 1))


def _losses(more: Report, more_s: Mapping[str, float], few: Report, few_s: Mapping[str, float]) -> Iterator[Loss]:
    """Yield the losses, largest first, up to the difference from a linear step."""
    step_s = fmean(more.step_s_blocks)
    lost_s = step_s - fmean(few.step_s_blocks) * _per_rank(more) / _per_rank(few)
    found = [*_waits(more, more_s), *_slower(more, more_s, few, few_s)]
    found.append(("a slower training step", lost_s - sum(seconds for _, seconds in found)))
    for what, seconds in sorted(found, key=lambda one: -one[1]):
        part_s = min(seconds, lost_s)
        lost_s -= part_s
        if part_s >= _MIN_SHARE * step_s:
            yield Loss(what=what, seconds=part_s, share=part_s / step_s)


def _per_rank(report: Report) -> int:
    return int(report.settings.get("batch_size") or 1)


def _waits(report: Report, phase_s: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    wait_s = mean_wait_s(report.ranks)
    late = [rank.others_late_s for rank in report.ranks if rank.others_late_s is not None]
    if wait_s is None:
        yield "waiting for other ranks", phase_s.get(RANK_WAIT, 0.0)
    elif late:
        yield "waiting for late ranks", fmean(late)
        yield "sending between ranks", wait_s - fmean(late)
    else:
        yield "waiting for other ranks and sending", wait_s


def _slower(
    more: Report, more_s: Mapping[str, float], few: Report, few_s: Mapping[str, float]
) -> Iterator[tuple[str, float]]:
    for phase in {*more_s} - {RANK_WAIT, TRAINING_STEP, *PAUSES}:
        before_s = few_s.get(phase, 0.0) * (_per_rank(more) / _per_rank(few) if phase == DATA_LOADING else 1.0)
        cores = " (the ranks share the cores)" if phase == DATA_LOADING else ""
        yield f"more {phase_label(phase)}{cores}", max(0.0, more_s[phase] - before_s)


def efficiency_line(found: Scaling) -> str:
    """Return a sentence on the speed relative to fewer ranks."""
    whose = "per rank" if found.kind == "weak" else "in total"
    return (
        f"{found.ranks} ranks: {found.speedup:.2f}x the samples per second of {found.of_ranks}, "
        f"{100 * found.efficiency:.0f} % of linear (95 % interval {found.speedup_low:.2f}x to "
        f"{found.speedup_high:.2f}x; {found.kind} scaling: the same batch {whose})."
    )


def loss_lines(found: Scaling) -> Iterator[str]:
    """Yield a sentence on the losses, if there are any."""
    parts = [f"{one.what} {format_duration(one.seconds)} ({100 * one.share:.0f} %)" for one in found.losses]
    if parts:
        yield f"Lost per step with {found.ranks} ranks: {', '.join(parts)}."
