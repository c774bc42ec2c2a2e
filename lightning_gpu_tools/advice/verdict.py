"""The verdict on a run: which findings count, the reason, and what to do; and that of an out-of-memory error."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from lightning_gpu_tools.advice.causes import MEMORY_CAUSES, TIME_CAUSES
from lightning_gpu_tools.advice.findings import (
    MAX_UNNAMED,
    MIN_CEILING,
    MIN_CEILING_LOWER,
    Cause,
    Evidence,
    Finding,
    Verdict,
    gain,
    holding,
    in_words,
    known,
    label_of,
)
from lightning_gpu_tools.advice.lost_time import (
    busy_percent,
    few_active_sms,
    idle_in_step_share,
    is_tiny,
    longest_group,
    worked_share,
)
from lightning_gpu_tools.advice.out_of_memory import ErrorFacts, is_pool_of_driver, place_of
from lightning_gpu_tools.memory.readings import OutOfMemory
from lightning_gpu_tools.training.phases import PAUSES, TRAINING_STEP, UNEXPLAINED, base_phase
from lightning_gpu_tools.training.run_measurements import RunMeasurements
from lightning_gpu_tools.units import format_bytes, format_duration, plural

_SHARED_GPU: Final = "shared_gpu"  # a verdict; a cause has the same name
_MIN_COST_S_PER_STEP = 0.001  # our default: no setting removes shorter times, such as handing over a ready batch
_MIN_UNNAMED_IDLE = 0.15  # our default, of the wall time: idle in the step beyond what findings explain
LeftOut = tuple[Finding, str]  # a finding that needs no change, and the reason


def why_not(run: RunMeasurements, cause: Cause[Any], finding: Finding) -> str:
    """Return why a finding needs no change, to follow "but"; empty if it does."""
    cost_s = finding.share * run.step_s
    if cause.kind == "others":
        return ""
    if reason := cause.why_not(run, finding):
        return reason
    if finding.ceiling < MIN_CEILING:
        return f"removing one part of it makes {run.activity} less than {100 * (MIN_CEILING - 1):.0f}% faster"
    if finding.ceiling_lower <= MIN_CEILING_LOWER:
        return "it occurs too rarely, or varies too much, to be more than chance"
    if cost_s < _MIN_COST_S_PER_STEP and not cause.ignores_min_cost:
        return f"it is {format_duration(cost_s)} per step, too little to matter"
    return ""


def judge(
    run: RunMeasurements, findings: Sequence[Finding], left_out: Sequence[LeftOut], min_utilization_percent: float
) -> tuple[Verdict, list[Finding], Sequence[LeftOut]]:
    """Return the verdict on a run that is long enough, the findings to report, and the others."""
    kinds = {finding.cause: TIME_CAUSES[finding.cause].kind for finding in findings}
    others = [finding for finding in findings if kinds[finding.cause] == "others"]
    remarks = [finding for finding in findings if kinds[finding.cause] == "remark"]
    found = [finding for finding in findings if kinds[finding.cause] in ("idle", "busy")]
    if any(finding.share for finding in others):  # they compute; otherwise they only hold memory, as far as known
        return _SHARED_GPU, others, ()
    percent = busy_percent(run)
    verdict: Verdict = "healthy"
    if not run.on_gpu or percent is None:
        verdict = "low" if found else "unknown" if run.on_gpu else "healthy"
    elif percent < min_utilization_percent or few_active_sms(run) is not None or "busy" in kinds.values():
        verdict = "low"
        explained = sum(
            finding.share for finding in found if base_phase(str(finding.evidence.get("phase"))) == TRAINING_STEP
        )
        rest = max(0.0, (idle_in_step_share(run) or 0.0) - explained)
        if not found or rest >= _MIN_UNNAMED_IDLE:
            unnamed = rest if found else 1.0 - percent / 100
            for name, cause in TIME_CAUSES.items():
                if cause.explain_rest is not None:
                    found = [*found, replace(cause.explain_rest(run, unnamed), cause=name)]
        # A model that is too small for a GPU has one cause.
        found = [max(found, key=lambda finding: finding.ceiling)] if is_tiny(run) else [*found, *remarks]
    else:
        reason = f"a GPU that is busy {min_utilization_percent:.0f}% of the time is well used"
        found, left_out = remarks, [(finding, reason) for finding in found]
    if verdict == "low":
        return verdict, [*found, *others], ()
    if others and 100 * worked_share(run) < min_utilization_percent:  # the work may be theirs
        return _SHARED_GPU, others, ()
    return verdict, found, left_out


def words_of(
    run: RunMeasurements, verdict: Verdict, findings: Sequence[Finding], left_out: Sequence[LeftOut]
) -> tuple[str, str]:
    """Return the reason for the verdict on a run that is long enough, and what to do about the first finding."""
    if verdict == "unknown":
        return (
            f"The driver does not report GPU utilization, and nothing on the host slows {run.activity} down.",
            "Check nvidia-smi dmon. On a MIG instance, the driver reports no utilization.",
        )
    if verdict == _SHARED_GPU:
        return findings[0].why, findings[0].advice
    gpus, percent = "GPUs are" if len(run.ranks) > 1 else "GPU is", busy_percent(run)
    gpu = "" if percent is None else f"The {gpus} busy {percent:.0f}% of the time. "
    change = f"{findings[0].advice} {gain(findings[0])}" if findings else ""
    if findings and verdict != "healthy":
        return gpu + findings[0].why, change
    optional = f"No change needed. Optional: {change}" if change else "No change needed."
    longest, reason = max(left_out, key=lambda candidate: candidate[0].share, default=(None, ""))
    if longest is None or longest.share < MAX_UNNAMED:
        return f"{gpu}Nothing on the host slows {run.activity} down.", optional
    return f"{gpu}{longest.why.removesuffix('.')}, but {reason}.", optional


def of_short_run(
    run: RunMeasurements, steady: int, steady_s: float, min_steps: int, min_seconds: float
) -> tuple[str, str]:
    """Return why a run is too short to judge, with its longest phase so far, and what to do."""
    reason = (
        f"Measured {plural(steady, 'steady step')} in {format_duration(steady_s)}, but a verdict needs at least "
        f"{plural(min_steps, 'step')} and {format_duration(min_seconds)}. The first steps of the run and of each epoch "
        "do not count."
    )
    advisor = "GPUUtilizationAdvisor" if run.has_trainer else "watch()"
    change = f"Run more steps, or lower min_steps or min_seconds of {advisor}."
    group, longest_s = longest_group(run, (TRAINING_STEP, UNEXPLAINED, *PAUSES))
    if longest_s and longest_s >= MAX_UNNAMED * run.wall_s:
        share = f"{100 * longest_s / run.wall_s:.0f}% of the wall time"
        reason = f"So far: {label_of(group)}, {share}; too short for a verdict. {reason}"
    return reason, change


def early_warnings(run: RunMeasurements) -> list[Finding]:
    """Return what will fill memory, before it is full."""
    findings = []
    for name, cause in MEMORY_CAUSES.items():
        if cause.find_early is not None:
            findings += [replace(finding, cause=name) for finding in cause.find_early(run)]
    return findings


def explain_error(run: RunMeasurements, oom: OutOfMemory) -> tuple[list[Finding], str]:
    """Return the causes of an error, the first one first, and the reason for the verdict."""
    facts, findings = ErrorFacts(run, oom), list[Finding]()
    for name, cause in MEMORY_CAUSES.items():
        if (cause.is_on_host or oom.source != "host") and not (cause.is_last_resort and findings):
            findings += [replace(finding, cause=name) for finding in cause.find(facts)]
    asked_at = None if oom.asked is None else in_words(*oom.asked[3:])
    evidence: Evidence = {
        "phase": oom.phase,
        "step": oom.step,
        "requested_bytes": oom.requested_bytes or None,
        "total_bytes": oom.total_bytes,
        "allowed_bytes": oom.allowed_bytes,
        "allocated_bytes": facts.allocated_bytes or None,
        "needed_bytes": None if oom.source == "host" else facts.needed_bytes,
        "begin_bytes": oom.begin_bytes,
        "asked_at": asked_at,
        "source_lines": holding(oom.lines),
    }
    findings = [replace(finding, evidence={**known(evidence), **finding.evidence}) for finding in findings]
    parts = []
    if oom.requested_bytes:
        at = f" at {asked_at}" if asked_at else ""
        parts.append(f"{oom.name} asked for {format_bytes(oom.requested_bytes)}{at}")
    # If the driver keeps the free memory (cudaMallocAsync), a limit on torch counts only tensors.
    if oom.allowed_bytes is not None and oom.reading is not None:
        held = facts.allocated_bytes if is_pool_of_driver(oom) else oom.reading.reserved_bytes
        parts.append(f"it uses {format_bytes(held)} of the {format_bytes(oom.allowed_bytes)} allowed")
    elif oom.free_bytes is not None and oom.total_bytes is not None and oom.source != "host":
        parts.append(f"{format_bytes(oom.free_bytes)} of {format_bytes(oom.total_bytes)} were free")
    who = f"Rank {oom.rank}: " if len(run.ranks) > 1 or oom.rank else ""
    where = f"{who}Out of memory in {place_of(oom)} at step {oom.step}{': ' if parts else ''}{'; '.join(parts)}."
    return findings, f"{where} {findings[0].why}"
