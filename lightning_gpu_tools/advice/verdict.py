"""The verdict on a run that is long enough, and which findings count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lightning_gpu_tools.advice.cause import Cause
from lightning_gpu_tools.advice.causes import TIME_CAUSES
from lightning_gpu_tools.advice.findings import (
    MIN_CEILING,
    MIN_CEILING_LOWER,
    MIN_COST_S_PER_STEP,
    SHARED_GPU,
    Finding,
    Verdict,
)
from lightning_gpu_tools.advice.idle_time import busy_percent, few_active_sms, idle_in_step_share, is_tiny, worked_share
from lightning_gpu_tools.training.phases import TRAINING_STEP, base_phase
from lightning_gpu_tools.training.run_measurements import RunMeasurements
from lightning_gpu_tools.units import format_duration

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
        if "wait_ms_per_step" in finding.evidence:
            return f"a steady step waits only {format_duration(float(finding.evidence['wait_ms_per_step']) / 1e3)}"
        return f"removing one part of it makes {run.activity} less than {100 * (MIN_CEILING - 1):.0f}% faster"
    if finding.ceiling_lower <= MIN_CEILING_LOWER:
        return "it occurs too rarely, or varies too much, to be more than chance"
    if cost_s < MIN_COST_S_PER_STEP and not cause.ignores_min_cost:
        return f"it is {format_duration(cost_s)} per step, too little to matter"
    return ""


def by_gain(finding: Finding) -> tuple[float, str]:
    """Return a sort key: the largest speedup first."""
    return -finding.ceiling, finding.cause


def judge(
    run: RunMeasurements, findings: Sequence[Finding], left_out: Sequence[LeftOut], min_utilization_percent: float
) -> tuple[Verdict, list[Finding], Sequence[LeftOut]]:
    """Return the verdict on a run that is long enough, the findings to report, and the others."""
    kinds = {finding.cause: TIME_CAUSES[finding.cause].kind for finding in findings}
    others = [finding for finding in findings if kinds[finding.cause] == "others"]
    remarks = [finding for finding in findings if kinds[finding.cause] == "remark"]
    found = [finding for finding in findings if kinds[finding.cause] in ("idle", "busy")]
    if any(finding.share for finding in others):  # they compute; otherwise they only hold memory, as far as known
        return SHARED_GPU, others, ()
    percent = busy_percent(run)
    verdict: Verdict = "healthy"
    if not run.on_gpu or percent is None:
        verdict = "low" if found else "unknown" if run.on_gpu else "healthy"
    elif percent < min_utilization_percent or few_active_sms(run) is not None or "busy" in kinds.values():
        verdict = "low"
        explained = sum(
            finding.share
            for finding in found
            if TIME_CAUSES[finding.cause].is_in_step and base_phase(str(finding.evidence["phase"])) == TRAINING_STEP
        )
        rest = max(0.0, (idle_in_step_share(run) or 0.0) - explained)
        if not found or rest >= _MIN_UNNAMED_IDLE:
            unnamed = rest if found else 1.0 - percent / 100
            for name, cause in TIME_CAUSES.items():
                if cause.explain_rest is not None:
                    found = [*found, replace(cause.explain_rest(run, unnamed), cause=name)]
        # A model that is too small for a GPU has one cause.
        found = sorted(found, key=by_gain)[:1] if is_tiny(run) else [*found, *remarks]
    else:
        reason = f"a GPU that is busy {min_utilization_percent:.0f}% of the time is well used"
        found, left_out = remarks, [(finding, reason) for finding in found]
    if verdict == "low":
        return verdict, [*found, *others], ()
    if others and 100 * worked_share(run) < min_utilization_percent:  # the work may be theirs
        return SHARED_GPU, others, ()
    return verdict, found, left_out
