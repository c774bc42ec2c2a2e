"""Steps that are not alike: a few that take much longer than the rest, and a slow beginning."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import NamedTuple

from lightning_gpu_tools.advice.findings import MIN_CEILING, MIN_STEPS, Basis, Finding, counted
from lightning_gpu_tools.training.phases import (
    CHECKPOINT,
    DATA_LOADING,
    MONITORING,
    PAUSES,
    PHASES,
    RANK_WAIT,
    TRAINER,
    TRAINING_STEP,
    UNEXPLAINED,
    VALIDATION,
    base_phase,
)
from lightning_gpu_tools.training.run_measurements import RunMeasurements, SlowSteps, StepTimes
from lightning_gpu_tools.units import printable

MIN_UNEVEN = 0.10  # of the wall time
# Of what adds up to that, the largest part is named, and each other one that is worth reporting.
_MIN_SHARE = 1 - 1 / MIN_CEILING
_TIMES = 2.0  # a slow step takes twice the median, and a step of a slow beginning twice as long as later
# Our defaults from here on.
_MIN_SLOW_STEPS = 3  # fewer are accidents, which no change would prevent
# Three intervals in four are multiples of the period; two, and half of all, are it.
_REGULAR = 0.75
_MIN_INTERVALS = 2
_LONGER = 1.5  # times as many numbers as in other batches
_NEARLY_ALL = 0.90  # of the waiting
# Four workers that are too few make every fourth step wait as long as four take. Waits twice as long have another
# reason, and replace the steady one if they are half of all.
_LONGER_THAN_BURSTS = 2.0
_MOST = 0.5
# Slow steps in these have no other finding.
_OWN = (TRAINING_STEP, TRAINER, UNEXPLAINED)
_ACCUMULATION = {True: "accumulate_grad_batches", False: "gradient accumulation"}  # by has_trainer


class Uneven(NamedTuple):
    """Something that makes steps unlike."""

    phase: str  # where these steps lose their time
    share: float  # of the wall time, that other steps would not have taken; on a GPU, while it was idle
    lasting: bool  # more than the start of the program, or an accident
    evidence: Mapping[str, float | str]


def details(evidence: Mapping[str, float | str]) -> str:
    """Return in words which steps are slow; empty without such evidence."""
    where = _quoted(str(evidence.get("phase", "")))
    if "first_steps" in evidence:
        count = "" if evidence["first_steps"] == 1 else f" {evidence['first_steps']:,}"
        first = f"the first{count} of {evidence['of_steps']:,} steps"
        if where:
            return f"in {first} {where} took {_rounded(evidence['times_later'])} times as long"
        return f"{evidence['first_percent']:.0f} % of it in {first}"
    if "slow_steps" not in evidence:
        return ""
    times = _rounded(evidence["times_median"])
    parts = [
        f"{evidence['slow_steps']:,} of {evidence['of_steps']:,} steps took {times} times the median",
        f"every {evidence['every_steps']} steps" if "every_steps" in evidence else "",
        f"the period of {evidence['period']}" if "period" in evidence else "",
        where and f"in {where}",
    ]
    return ", ".join(filter(None, parts))


def _rounded(times: float | str) -> str:
    return f"{float(times):.2g}" if float(times) < 9.95 else f"{float(times):,.0f}"


def _quoted(phase: str) -> str:
    """Return the line of the time tree that has the phase."""
    group, _, name = phase.partition("/")
    label = printable(name) or (PHASES[group].label if group in PHASES else printable(group))
    return f'"{label}"' if label else ""


def uneven(run: RunMeasurements) -> list[Uneven]:
    """Return what makes steps unlike, the largest first, if it takes a tenth of the wall time."""
    times = run.step_times
    if times is None:
        return []
    # What was slow by the median of its time need not be by that of the run.
    slow_steps = [one for one in times.slow if one.seconds >= _TIMES * one.count * times.p50_s]
    groups = [group for group in PHASES if group not in (MONITORING, *PAUSES)]
    found = [one for group in groups if (one := _slow_beginning(run, times, group, slow_steps)) is not None]
    ends = {one.phase: float(one.evidence["first_steps"]) for one in found}
    for slow in slow_steps:
        group = base_phase(slow.phase)
        if group != MONITORING and slow.steps[-1] > ends.get(group, 0.0):
            found.append(_slow_steps(run, times, slow))
    found.sort(key=lambda one: -one.share)
    between = [one for one in found if one.phase not in PAUSES]  # users ask for the others
    named = between[:1] if sum(one.share for one in between) >= MIN_UNEVEN else []
    return [one for one in found if one in named or (one.share >= _MIN_SHARE and (named or one.phase in PAUSES))]


def _lost(run: RunMeasurements, phase: str, share: float) -> float:
    """Return for which part of this share the GPU was idle, as far as is known."""
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
    share = _lost(run, slow.phase, slow.excess_s / run.wall_s)
    return Uneven(slow.phase, share, slow.count >= _MIN_SLOW_STEPS, evidence)


def period(steps: Sequence[int]) -> int | None:
    """Return every how many steps one of these comes, if regularly. Neighbors count as one."""
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
        _ACCUMULATION[run.has_trainer]: run.accumulate_grad_batches,
        "log_every_n_steps": run.log_every_n_steps * run.accumulate_grad_batches if run.has_trainer else None,
        "validation": period(pauses.get(VALIDATION, ())),
        "checkpoints": period(pauses.get(CHECKPOINT, ())),
        "epochs": run.epoch_steps,
    }
    return next((name for name, steps in known.items() if steps == every), None)


def _slow_beginning(
    run: RunMeasurements, times: StepTimes, group: str, slow_steps: Sequence[SlowSteps]
) -> Uneven | None:
    # In it a phase, and with it the step, took twice as long as later.
    if not run.spans:
        return None
    done_steps = list(accumulate(span.steps for span in run.spans))
    done_s = list(accumulate(span.phase_s.get(group, 0.0) for span in run.spans))
    steps, seconds = done_steps[-1], done_s[-1]
    # It ends where the phase is furthest ahead of its mean pace.
    end = max(range(len(run.spans)), key=lambda i: done_s[i] * steps - seconds * done_steps[i])
    first_steps, first_s = done_steps[end], done_s[end]
    if first_steps < 1 or steps - first_steps < MIN_STEPS:
        return None  # too early to say that it is over
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
    return Uneven(group, _lost(run, group, excess_s / run.wall_s), first_steps > warm_up, evidence)


def with_uneven_steps(run: RunMeasurements, found: Sequence[Finding]) -> list[Finding]:
    """Return the findings with what is uneven, in that of its cause or in its own."""
    findings = list(found)
    for one in uneven(run):
        if not one.lasting or one.evidence.get("period") in _ACCUMULATION.values():
            continue  # the optimizer's step is due then
        place = next((i for i, finding in enumerate(findings) if _is_about(finding, one)), None)
        before = None if place is None else findings.pop(place)
        group = base_phase(one.phase)
        if group == DATA_LOADING:
            after = _waits(run, one, before)
        elif before is not None:
            after = replace(before, evidence={**one.evidence, **before.evidence})
        else:
            after = _slow_work(one) if group in _OWN else None
        findings += [] if after is None else [after]
    return findings


def unsaid(run: RunMeasurements, findings: Sequence[Finding]) -> str:
    """Return in words what is the most uneven beside the findings; empty if there is nothing."""
    for one in uneven(run):
        if one.phase not in PAUSES and not any(_is_about(finding, one) for finding in findings):
            return f"{details({**one.evidence, 'phase': one.phase})}: {100 * one.share:.0f} % of the wall time"
    return ""


def _is_about(finding: Finding, one: Uneven) -> bool:
    if finding.cause == "slow_steps":
        return finding.evidence["phase"] == one.phase
    group, _, name = one.phase.partition("/")
    if finding.cause in ("straggler", "communication"):
        return group in (RANK_WAIT, *_OWN)  # where ranks wait for one another
    if group == TRAINING_STEP:
        return finding.cause == name  # backward, optimizer
    return finding.cause == group and (not name or finding.evidence.get("name", name) == name)


def _slow_work(one: Uneven) -> Finding:
    evidence, where = one.evidence, _quoted(one.phase)
    basis: Basis = "measured"
    if "first_steps" in evidence:
        kind = "beginning"
        basis = "heuristic"
        advice = (
            "A longer training loses less. Pad batches to few lengths: torch.compile and cuDNN start anew for each."
        )
    elif "batch_items_times" in evidence:
        kind = "longer_batches"
        basis = "heuristic"
        advice = (
            f"Slow steps have {_rounded(evidence['batch_items_times'])} times as many numbers in a batch. Put samples "
            "of similar length into one batch, or limit its tokens."
        )
    elif "every_steps" in evidence:
        kind = "periodic"
        advice = (
            f"Find what runs every {evidence['every_steps']} steps in {where}. Run it less often, or make it cheaper."
        )
    else:
        kind = "irregular"
        advice = (
            f"Find what the slow steps have in common in {where}; the latest are {evidence['latest_steps']}. It can be "
            "rare samples, a full disk, other programs or a slow rank."
        )
    return counted("slow_steps", one.share, {"kind": kind, "phase": one.phase, **evidence}, advice, basis)


def _waits(run: RunMeasurements, one: Uneven, steady: Finding | None) -> Finding | None:
    """Return what waiting for data costs: of another kind if a few waits, or those of the beginning, are all."""
    evidence, workers, times = one.evidence, 0 if run.loader is None else run.loader.num_workers, run.step_times
    begins = "first_steps" in evidence
    if begins:
        is_all = float(evidence["first_percent"]) >= 100 * _NEARLY_ALL
    else:
        assert times is not None
        burst = _LONGER_THAN_BURSTS * max(1, workers) * times.seconds / times.count / max(times.p50_s, 1e-9)
        if float(evidence["times_median"]) <= burst:
            return steady
        is_all = one.share >= _MOST * _lost(run, DATA_LOADING, run.phase_s[DATA_LOADING] / run.wall_s)
    if steady is not None and (not is_all or steady.evidence.get("kind") in ("slow_worker", "cold_cache")):
        return replace(steady, evidence={**evidence, **steady.evidence})
    if begins:
        kind = "cold_cache"
        advice = (
            "Later steps need no change: by then the data is cached. To speed up the beginning, copy it to a local "
            "disk beforehand."
        )
    else:
        kind = "slow_batches"
        advice = (
            f"Some batches take as long to load as {_rounded(evidence['times_median'])} steps, the latest at steps "
            f"{evidence['latest_steps']}. Find what the dataset does for them, or prefetch more batches than that "
            "(num_workers times prefetch_factor)."
        )
    shown = {"kind": kind, "num_workers": workers, **evidence}
    return counted("data_loading", one.share, shown, advice, "heuristic" if begins else "measured")
