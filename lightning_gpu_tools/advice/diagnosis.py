"""The diagnosis of a training run: the verdict, the causes in order of cost, and what to do."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from statistics import fmean
from typing import NamedTuple

from lightning_gpu_tools.advice.cause import Cause
from lightning_gpu_tools.advice.causes import (
    CAUSES,
    epoch_start,
    shared_gpu,
    slow_steps,
    unexplained,
)
from lightning_gpu_tools.advice.causes.unexplained import MAX_UNNAMED
from lightning_gpu_tools.advice.failures import Failure
from lightning_gpu_tools.advice.findings import (
    AT_END,
    FIND_FUNCTION,
    MIN_CEILING,
    MIN_CEILING_LOWER,
    MIN_COST_S_PER_STEP,
    MIN_SECONDS,
    MIN_STEPS,
    MIN_UTILIZATION_PERCENT,
    Diagnosis,
    Finding,
    Verdict,
    ceiling,
    gain,
    label_of,
    mean_interval,
    with_share,
)
from lightning_gpu_tools.advice.idle_in_step import few_active_sms, is_tiny
from lightning_gpu_tools.advice.lines import sentence, where
from lightning_gpu_tools.advice.loader_plan import LoaderResult, as_searched
from lightning_gpu_tools.advice.memory_causes import judge
from lightning_gpu_tools.advice.memory_causes.memory_growth import growing_memory
from lightning_gpu_tools.advice.memory_causes.stray_contexts import stray_contexts
from lightning_gpu_tools.advice.out_of_memory import OutOfMemory
from lightning_gpu_tools.training.memory_readings import MemoryGrowth
from lightning_gpu_tools.training.phases import (
    PAUSES,
    PHASES,
    RANK_WAIT,
    UNEXPLAINED,
    base_phase,
)
from lightning_gpu_tools.training.run_measurements import COPY, DATA_LOADING, TRAINING_STEP, RunMeasurements
from lightning_gpu_tools.units import format_duration

_MAX_FINDINGS = 4  # our default: users with more to change start with these
# The line of the time tree that a cause is about, if it has one.
_GROUPS = {**{name: name for name in CAUSES if name in PHASES}, "communication": RANK_WAIT}


class _LeftOut(NamedTuple):
    """A finding that needs no change, and the reason why."""

    finding: Finding
    why: str


def diagnose(
    run: RunMeasurements,
    *,
    searched: LoaderResult | None = None,
    growth: Sequence[MemoryGrowth] = (),
    out_of_memory: OutOfMemory | None = None,
    failure: Failure | None = None,
    min_utilization_percent: float = MIN_UTILIZATION_PERCENT,
    min_steps: int = MIN_STEPS,
    min_seconds: float = AT_END * MIN_SECONDS,
) -> Diagnosis:
    """Return the verdict and the findings, based on the measurements and other facts about the run.

    ``failure`` is the reason why the run ended, if known beyond its error. Only steady steps count toward
    ``min_steps``, and only their seconds toward ``min_seconds``.
    """
    steady, steady_s = sum(block.steps for block in run.blocks), sum(block.wall_s for block in run.blocks)
    if run.on_gpu and run.utilization_percent is None:  # the driver's first sample may still be missing
        min_seconds = max(min_seconds, AT_END * MIN_SECONDS)
    if steady >= max(1, min_steps) and steady_s >= min_seconds:
        verdict, found, left_out = _judge(run, min_utilization_percent, searched)
    else:
        found, left_out = [], []
        # Short epochs and frequent validations leave hardly any steady steps.
        if run.steps >= min_steps and run.wall_s >= min_seconds:
            times = {"epoch_start": run.epochs, "validation": run.validations}
            often = [CAUSES[name] for name, count in times.items() if count >= epoch_start.MIN_EPOCHS]
            found = _worth_reporting(run, [one for cause in often for one in _found_by(cause, run)])
        verdict = "low" if found else "too_short"
    findings = tuple(_with_lines(run, one) for one in sorted(found, key=_by_gain)[:_MAX_FINDINGS])
    is_judged = verdict != "too_short"
    if is_judged:
        why, next_step = _why(run, verdict, findings, left_out), _next_step(verdict, findings)
    else:
        why = _so_far(run) + (
            f"Measured {steady} steady steps in {format_duration(steady_s)}, but a verdict needs at least {min_steps} "
            f"steps and {format_duration(min_seconds)}. The first steps of the run and of each epoch do not count."
        )
        too_few = {"min_steps": steady < min_steps, "min_seconds": steady_s < min_seconds}
        options = " and ".join(name for name, is_short in too_few.items() if is_short)
        longer = "Train longer" if run.stage == "fit" else "Use more data"
        next_step = f"{longer}, or lower {options} of {'GPUUtilizationAdvisor' if run.has_trainer else 'watch()'}."
    strays = [*stray_contexts(run.contexts)]
    if out_of_memory is not None:
        of_memory, why, next_step = judge(run, out_of_memory)
        verdict, findings = "out_of_memory", (*of_memory, *findings)[:_MAX_FINDINGS]
        strays = [one for one in strays if one.cause not in {ruled.cause for ruled in of_memory}]
    elif growth or strays:
        kept_lines = () if run.memory is None else run.memory.kept_lines
        strays = [*(growing_memory(one, kept_lines, stage=run.stage) for one in growth), *strays]
        if not findings:
            next_step = strays[0].advice
    findings = (*findings, *strays)
    if failure is not None and out_of_memory is None:
        next_step = f"{failure.next_step} {next_step}" if findings else failure.next_step
    return Diagnosis(
        verdict=verdict,
        findings=tuple(replace(one, advice=_of_stage(run, one.advice)) for one in findings),
        why=_of_stage(run, why),
        next_step=_of_stage(run, next_step),
        utilization_percent=run.utilization_percent,
        gpu_idle_percent=_idle_percent(run) if is_judged else {},
        waiting_share=run.phase_s.get(DATA_LOADING, 0.0) / run.wall_s if run.wall_s > 0 else None,
        step_p50_s=run.step_p50_s,
        step_p95_s=run.step_p95_s,
    )


def _of_stage(run: RunMeasurements, text: str) -> str:
    """Return a text that speaks of the run's own steps: causes are written for training."""
    return text.replace("training step", f"{run.activity} step")


def _by_gain(finding: Finding) -> tuple[float, str]:
    return -finding.ceiling, finding.cause


def _with_lines(run: RunMeasurements, finding: Finding) -> Finding:
    """Add the source lines that take a finding's time, if there are enough samples."""
    cause, phases = CAUSES[finding.cause], _phases(finding)
    lines = where(run.lines, *phases)
    if lines is None:
        return finding
    line = sentence(run.lines, *phases, whose=cause.time)
    advice = f"{finding.advice.replace(FIND_FUNCTION, '').strip()} {line}".strip() if line else finding.advice
    return replace(finding, evidence={**finding.evidence, "source_lines": lines}, advice=advice)


def _phases(finding: Finding) -> Sequence[str]:
    phases = CAUSES[finding.cause].phases
    return phases(finding.evidence) if callable(phases) else phases


def _is_in_step(finding: Finding) -> bool:
    is_in_step = CAUSES[finding.cause].is_in_step
    return is_in_step(finding.evidence) if callable(is_in_step) else is_in_step


_Judgment = tuple[Verdict, list[Finding], list[_LeftOut]]


def _judge(run: RunMeasurements, min_utilization_percent: float, searched: LoaderResult | None) -> _Judgment:
    others = _found_by(CAUSES["shared_gpu"], run)
    if any(map(shared_gpu.is_certain, others)):
        return "shared_gpu", others, []
    verdict, found, left_out = _judge_alone(run, min_utilization_percent, searched)
    if verdict == "low":
        return verdict, [*found, *others], []
    is_own_work = 100 * run.worked_share >= min_utilization_percent
    return ("shared_gpu", others, []) if others and not is_own_work else (verdict, found, left_out)


def _judge_alone(run: RunMeasurements, min_utilization_percent: float, searched: LoaderResult | None) -> _Judgment:
    """Return the judgment as if no other job used the GPU."""
    found, left_out = _causes(run, searched)
    if not run.on_gpu or run.utilization_percent is None:
        return ("low" if found else "unknown" if run.on_gpu else "healthy"), found, left_out
    remarks = [one for cause in CAUSES.values() if cause.is_remark for one in _found_by(cause, run)]
    remarks = _worth_reporting(run, remarks)
    busy_percent = run.busy_percent or 0.0
    is_busy = busy_percent >= min_utilization_percent and few_active_sms(run) is None
    if is_busy and not any(CAUSES[one.cause].counts_while_busy for one in found):
        why = f"a GPU that is busy {min_utilization_percent:.0f} % of the time is well used"
        return "healthy", remarks, [_LeftOut(one, why) for one in found]
    idle = 1.0 - busy_percent / 100
    rest = max(0.0, (run.idle_in_step_share or 0.0) - sum(one.share for one in found if _is_in_step(one)))
    if not found or rest >= unexplained.MIN_IDLE:
        found.append(unexplained.idle_in_step(run, rest if found else idle))
    if is_tiny(run):
        return "low", [_cause_of_tiny(sorted(found, key=_by_gain), idle)], []
    return "low", [*found, *remarks], []


def _causes(run: RunMeasurements, searched: LoaderResult | None) -> tuple[list[Finding], list[_LeftOut]]:
    """Return the findings, and those that need no change."""
    found: list[Finding] = []
    all_found: list[Finding] = []
    for name, cause in CAUSES.items():
        is_first = not any(one.cause in cause.after for one in found)
        if is_first and not cause.is_remark and name != "shared_gpu":
            candidates = _candidates(cause, run)
            found += [one for one in candidates if not cause.why_not(run, one)]
            all_found += candidates
    if searched is not None:
        found = [as_searched(one, searched) if one.cause == "data_loading" else one for one in found]
    named = _worth_reporting(run, found)
    named = [one for one in named if one.cause != "slow_steps" or not slow_steps.is_explained(one, named)]
    slow_in = {finding.evidence["phase"] for finding in named if finding.cause == "slow_steps"}
    lines = [finding for finding in unexplained.long_lines(run) if finding.evidence["phase"] not in slow_in]
    named += [finding for finding in lines if not unexplained.why_not(run, finding)]
    judged = [_LeftOut(one, _why_not(run, one)) for one in _surer(run, [*all_found, *found, *lines])]
    left_out = [one for one in judged if one.why]
    for slower in [one for one in named if one.cause == "slowing_down"]:
        rest = [_without_slowdown(one, slower) for one in named if one is not slower]
        named = [slower, *_worth_reporting(run, rest)]
    return named, left_out


def _without_slowdown(finding: Finding, slower: Finding) -> Finding:
    """Return a finding without the time that was added to steps, if both are about the same phase."""
    phase = str(slower.evidence["phase"])
    about = [finding.evidence.get("phase"), *_phases(finding)]
    if "name" not in finding.evidence:  # else it is about one callback or logger of several
        about.append(finding.cause)
    if phase not in about and base_phase(phase) not in about:
        return finding
    return with_share(finding, max(0.0, finding.share - slower.share))


def _found_by(cause: Cause, run: RunMeasurements) -> list[Finding]:
    return [one for one in _candidates(cause, run) if not cause.why_not(run, one)]


def _candidates(cause: Cause, run: RunMeasurements) -> list[Finding]:
    return list(cause.find(run)) if cause.find is not None and all(_is_known(run, name) for name in cause.needs) else []


def _is_known(run: RunMeasurements, name: str) -> bool:
    first, _, rest = name.partition(".")
    value = getattr(run, first)
    return value is not None and (not rest or attrgetter(rest)(value) is not None)


def _worth_reporting(run: RunMeasurements, found: Iterable[Finding | None]) -> list[Finding]:
    return [one for one in _surer(run, found) if not _why_not(run, one)]


def _surer(run: RunMeasurements, found: Iterable[Finding | None]) -> list[Finding]:
    # If the GPU's times contradict the driver's utilization, a share may be too large by the difference.
    doubt = run.idle_residual
    return [
        replace(one, ceiling_lower=min(one.ceiling_lower, ceiling(one.share * _repeated(run, one) - doubt)))
        for one in found
        if one is not None
    ]


def _why_not(run: RunMeasurements, finding: Finding) -> str:
    """Return why a finding needs no change; empty if it does."""
    cause, cost_s = CAUSES[finding.cause], finding.share * run.step_s
    if why := cause.why_not(run, finding):
        return why
    if finding.ceiling < MIN_CEILING:
        if "wait_ms_per_step" in finding.evidence:
            return f"a steady step waits only {format_duration(float(finding.evidence['wait_ms_per_step']) / 1e3)}"
        return f"removing one part of it makes {run.activity} less than {100 * (MIN_CEILING - 1):.0f} % faster"
    if finding.ceiling_lower <= MIN_CEILING_LOWER:
        return f"it {'occurred too rarely' if cause.is_of_events else 'varies too much'} to be more than chance"
    # Less often is possible for pauses, and a larger batch makes launches rarer, however short the step is.
    if cost_s < MIN_COST_S_PER_STEP and finding.cause not in (*PAUSES, "launch_bound"):
        return f"it is {format_duration(cost_s)} per step, too little to matter"
    return ""


def _repeated(run: RunMeasurements, finding: Finding) -> float:
    """Return the part of a share that is not due to chance, from how it is spread over the run.

    Up to three events may be chance: one in twenty runs would have none of them.
    """
    if not CAUSES[finding.cause].is_of_events or (run.on_gpu and finding.cause == COPY):
        return 1.0
    seconds = [span.phase_s.get(finding.cause, 0.0) for span in run.spans]
    # An interval takes milliseconds of the training thread, and a smaller finding is left out in any case.
    if finding.ceiling < MIN_CEILING or not any(seconds):
        return 1.0
    interval = mean_interval(seconds)
    return 1.0 if interval is None else min(1.0, interval[0] / fmean(seconds))


def _cause_of_tiny(found: Sequence[Finding], idle: float) -> Finding:
    # For a model that is too small for a GPU, report one cause: a host cause if it dominates.
    first = next((finding for finding in found if finding.cause != "unexplained"), found[0])
    launch = next((finding for finding in found if finding.cause == "launch_bound"), first)
    return first if first.share >= idle / 2 else launch


def _idle_percent(run: RunMeasurements) -> dict[str, float]:
    if run.gpu_idle is None:
        return {}
    percent = {phase: 100 * share for phase, share in run.idle_by_phase().items()}
    in_step = run.idle_in_step_share
    return percent if in_step is None else {**percent, TRAINING_STEP: 100 * in_step}


def _why(run: RunMeasurements, verdict: Verdict, findings: Sequence[Finding], left_out: Sequence[_LeftOut]) -> str:
    if verdict == "unknown":
        return f"The driver does not report GPU utilization, and nothing on the host slows {run.activity} down."
    if verdict == "shared_gpu":
        return shared_gpu.why(findings[0].evidence)
    gpus = "GPUs are" if len(run.ranks) > 1 else "GPU is"
    gpu = "" if run.busy_percent is None else f"The {gpus} busy {run.busy_percent:.0f} % of the time. "
    if verdict == "healthy" or not findings:
        return gpu + (_harmless(run, left_out) or f"Nothing on the host slows {run.activity} down.")
    first = findings[0]
    numbers = _numbers(first.evidence)
    return f"{gpu}{_costs(run, first)}{numbers and f' ({numbers})'}."


def _so_far(run: RunMeasurements) -> str:
    """Return the longest phase of the steps of a run that is too short, except for training; empty if it is short."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for phase, phase_s in run.phase_s.items():
        seconds[base_phase(phase)] += phase_s
    for group in (TRAINING_STEP, UNEXPLAINED, *PAUSES):
        seconds.pop(group, None)
    group, longest_s = max(seconds.items(), key=lambda item: item[1], default=("", 0.0))
    if not longest_s or longest_s < MAX_UNNAMED * run.wall_s:
        return ""
    label = label_of(group)
    return f"So far: {label}, {100 * longest_s / run.wall_s:.0f} % of the wall time; too short for a verdict. "


def _costs(run: RunMeasurements, finding: Finding) -> str:
    begins = CAUSES[finding.cause].begins
    costs = begins if isinstance(begins, str) else begins(finding.evidence, run.has_trainer)
    return f"{costs} {100 * finding.share:.0f} % of the wall time"


def _harmless(run: RunMeasurements, left_out: Sequence[_LeftOut]) -> str:
    """Return why the longest line of a healthy run's time tree is not a cause; empty without a long line.

    On a GPU, it may be hidden behind the GPU's work, so only a finding counts.
    """
    if run.on_gpu:
        longest = max(left_out, key=lambda one: one.finding.share, default=None)
        return "" if longest is None else f"{_costs(run, longest.finding)}, but {longest.why}."
    groups: defaultdict[str, float] = defaultdict(float)
    for phase, seconds in run.phase_s.items():
        groups[base_phase(phase)] += seconds / run.wall_s
    groups.pop(TRAINING_STEP, None)
    group, share = max(groups.items(), key=lambda item: item[1], default=("", 0.0))
    if share < MAX_UNNAMED:
        return ""
    about = [one for one in left_out if group in (_GROUPS.get(one.finding.cause), one.finding.evidence.get("phase"))]
    label = label_of(group)
    reason = max(about, key=lambda one: one.finding.share).why if about else "no rule judges it"
    return f"{label[0].upper()}{label[1:]} takes {100 * share:.0f} % of the wall time, but {reason}."


def _numbers(evidence: Mapping[str, float | str]) -> str:
    ms = {name: format_duration(float(value) / 1e3) for name, value in evidence.items() if "ms" in name.split("_")}
    if "wait_ms_per_step" in ms:
        return f"{ms['wait_ms_per_step']} of {ms['step_ms']} per steady step"
    if "behind_ms_per_step" in ms:
        return f"{ms['own_ms_per_step']} per step; {ms['median_ms_per_step']} on the median rank"
    if "taken_by" in evidence:
        return f"{ms['ms_per_step']} per step; {evidence['taken_by']}"
    if "ms_per_step" in ms:
        return f"{ms['ms_per_step']} per step"
    if "sm_active_percent" in evidence:
        return f"{evidence['sm_active_percent']:.0f} % of the multiprocessors are active"
    return ""


def _next_step(verdict: Verdict, findings: Sequence[Finding]) -> str:
    if not findings:
        if verdict == "unknown":
            return "Check nvidia-smi dmon. On a MIG instance, the driver reports no utilization."
        return "No change needed."
    first = findings[0]
    if verdict == "shared_gpu":
        return first.advice
    advice = f"{first.advice} {gain(first)}"
    return f"No change needed. Optional: {advice}" if verdict == "healthy" else advice
