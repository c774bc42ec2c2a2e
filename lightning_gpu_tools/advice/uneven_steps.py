"""Uneven steps: a few that take much longer than the rest, and a slow beginning."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from lightning_gpu_tools.advice.findings import MIN_CEILING, MIN_STEPS
from lightning_gpu_tools.training.phases import (
    CHECKPOINT,
    MONITORING,
    PAUSES,
    PHASES,
    TRAINING_STEP,
    VALIDATION,
    base_phase,
)
from lightning_gpu_tools.training.run_measurements import RunMeasurements, SlowSteps, StepTimes
from lightning_gpu_tools.units import printable

MIN_UNEVEN = 0.10  # our default, of the wall time
# Of the parts that add up to it, the largest is reported, and every other one with at least this share.
_MIN_SHARE = 1 - 1 / MIN_CEILING
_TIMES = 2.0  # our default: a slow step takes twice the median, one of a slow beginning twice as long as later ones
# Our defaults from here on.
_MIN_SLOW_STEPS = 3  # fewer are chance, which no change would prevent
# 75 % of the intervals are multiples of the period. At least two, and 50 % of all, equal it.
_REGULAR = 0.75
_MIN_INTERVALS = 2
_MANY = 100.0  # times; larger numbers are "over 100" in the report
_LONGER = 1.5  # times as many elements as in other batches
ACCUMULATION = {True: "accumulate_grad_batches", False: "gradient accumulation"}  # by has_trainer


class Uneven(NamedTuple):
    """Something that makes steps uneven."""

    phase: str  # where these steps lose their time
    share: float  # of the wall time, beyond what other steps take; on a GPU, while it was idle
    lasting: bool  # more than chance, or the start of the program
    evidence: Mapping[str, float | str]


def details(evidence: Mapping[str, float | str]) -> str:
    """Return a phrase about the slow steps; empty without such evidence."""
    where = quoted(str(evidence.get("phase", "")))
    if "first_steps" in evidence:
        count = "" if evidence["first_steps"] == 1 else f" {evidence['first_steps']:,}"
        first = f"the first{count} of {evidence['of_steps']:,} steps"
        if where:
            later = float(evidence["times_later"])
            longer = rounded(later) if later < _MANY else f"over {_MANY:.0f}"
            return f"in {first} {where} took {longer} times as long"
        return f"{evidence['first_percent']:.0f} % of it in {first}"
    if "slow_steps" not in evidence:
        return ""
    times = rounded(evidence["times_median"])
    parts = [
        f"{evidence['slow_steps']:,} of {evidence['of_steps']:,} steps took {times} times the median",
        f"every {evidence['every_steps']} steps" if "every_steps" in evidence else "",
        f"the period of {evidence['period']}" if "period" in evidence else "",
        where and f"in {where}",
    ]
    return ", ".join(filter(None, parts))


def rounded(times: float | str) -> str:
    """Return a factor with two digits, or as a whole number from 10 on."""
    return f"{float(times):.2g}" if float(times) < 9.95 else f"{float(times):,.0f}"


def quoted(phase: str) -> str:
    """Return the label of the phase's line in the time tree, in quotes."""
    group, _, name = phase.partition("/")
    label = printable(name) or (PHASES[group].label if group in PHASES else printable(group))
    return f'"{label}"' if label else ""


def uneven(run: RunMeasurements) -> list[Uneven]:
    """Return what makes steps uneven, the largest first, if it takes at least 10 % of the wall time."""
    times = run.step_times
    if times is None:
        return []
    # A step that was slow by the median at that time may not be slow by the median of the run.
    slow_steps = [one for one in times.slow if one.seconds >= _TIMES * one.count * times.p50_s]
    groups = [group for group in PHASES if group not in (MONITORING, *PAUSES)]
    found = [one for group in groups if (one := _slow_beginning(run, times, group, slow_steps)) is not None]
    ends = {one.phase: float(one.evidence["first_steps"]) for one in found}
    for slow in slow_steps:
        group = base_phase(slow.phase)
        if group != MONITORING and slow.steps[-1] > ends.get(group, 0.0):
            found.append(_slow_steps(run, times, slow))
    found.sort(key=lambda one: -one.share)
    between = [one for one in found if one.phase not in PAUSES]  # users ask for pauses
    named = between[:1] if sum(one.share for one in between) >= MIN_UNEVEN else []
    return [one for one in found if one in named or (one.share >= _MIN_SHARE and (named or one.phase in PAUSES))]


def lost(run: RunMeasurements, phase: str, share: float) -> float:
    """Return the part of this share in which the GPU was idle, as far as known."""
    if base_phase(phase) != TRAINING_STEP:
        return min(1.0, share * run.exposed(phase), run.idle_share)
    # While the GPU is busy, the host may only be waiting for it.
    in_step = run.idle_in_step_share
    return min(1.0, share if in_step is None else min(share, in_step))


def _slow_steps(run: RunMeasurements, times: StepTimes, slow: SlowSteps) -> Uneven:
    evidence: dict[str, float | str] = {
        "slow_steps": slow.count,
        "of_steps": times.count,
        "times_median": slow.seconds / slow.count / max(times.p50_s, 1e-9),
        "latest_steps": ", ".join(map(str, slow.steps[-5:])),
    }
    if every := period(slow.steps):
        evidence["every_steps"] = every
        if slow.phase not in PAUSES and (name := _name_of_period(run, times, every)):
            evidence["period"] = name
    longer = slow.batch_items / times.batch_items if slow.batch_items and times.batch_items else 1.0
    if longer >= _LONGER:
        evidence["batch_items_times"] = longer
    share = lost(run, slow.phase, slow.excess_s / run.wall_s)
    return Uneven(slow.phase, share, slow.count >= _MIN_SLOW_STEPS, evidence)


def period(steps: Sequence[int]) -> int | None:
    """Return the interval at which these steps come, if it is regular. Neighbors count as one."""
    firsts = [step for before, step in pairwise((0, *steps)) if step - before > 1]
    apart = Counter(after - before for before, after in pairwise(firsts))
    if not apart:
        return None
    every, often = min(apart.items(), key=lambda item: (-item[1], item[0]))
    regular = sum(count for interval, count in apart.items() if interval % every == 0)
    intervals = apart.total()
    return every if often >= max(_MIN_INTERVALS, intervals / 2) and regular >= _REGULAR * intervals else None


def _name_of_period(run: RunMeasurements, times: StepTimes, every: int) -> str | None:
    pauses = {slow.phase: slow.steps for slow in times.slow}
    known = {
        ACCUMULATION[run.has_trainer]: run.accumulate_grad_batches,
        "log_every_n_steps": run.log_every_n_steps * run.accumulate_grad_batches if run.has_trainer else None,
        "validation": period(pauses.get(VALIDATION, ())),
        "checkpoints": period(pauses.get(CHECKPOINT, ())),
        "epochs": run.epoch_steps,
    }
    return next((name for name, steps in known.items() if steps == every), None)


def _slow_beginning(
    run: RunMeasurements, times: StepTimes, group: str, slow_steps: Sequence[SlowSteps]
) -> Uneven | None:
    # In a slow beginning, a phase, and with it the step, took twice as long as later.
    if not run.spans:
        return None
    done_steps = list(accumulate(span.steps for span in run.spans))
    done_s = list(accumulate(span.phase_s.get(group, 0.0) for span in run.spans))
    steps, seconds = done_steps[-1], done_s[-1]
    # The beginning ends where the phase is furthest ahead of its mean pace.
    end = max(range(len(run.spans)), key=lambda i: done_s[i] * steps - seconds * done_steps[i])
    first_steps, first_s = done_steps[end], done_s[end]
    if first_steps < 1 or steps - first_steps < MIN_STEPS:
        return None  # the beginning may not be over
    later_s = (seconds - first_s) / (steps - first_steps)
    excess_s = first_s - first_steps * later_s
    work_s = [sum(s for phase, s in span.phase_s.items() if phase not in PAUSES) for span in run.spans]
    excess_of_work_s = sum(work_s[: end + 1]) - first_steps * sum(work_s[end + 1 :]) / (steps - first_steps)
    in_slow_s = sum(
        slow.excess_s * sum(step > first_steps for step in slow.steps) / len(slow.steps)
        for slow in slow_steps
        if base_phase(slow.phase) == group
    )
    if first_s <= _TIMES * first_steps * later_s or max(in_slow_s, excess_s - excess_of_work_s) > excess_s / 2:
        return None
    evidence: dict[str, float | str] = {
        "first_steps": first_steps,
        "of_steps": steps,
        "first_percent": 100 * first_s / seconds,
        "times_later": first_s / first_steps / max(later_s, 1e-9),
    }
    warm_up = run.steps - times.count
    return Uneven(group, lost(run, group, excess_s / run.wall_s), first_steps > warm_up, evidence)
