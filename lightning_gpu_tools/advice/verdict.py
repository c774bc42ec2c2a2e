"""The verdict on a run that is long enough: from its findings, and from how busy its GPU is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lightning_gpu_tools.advice.causes import TIME_CAUSES
from lightning_gpu_tools.advice.findings import Finding, Verdict
from lightning_gpu_tools.advice.idle_in_step import few_active_sms, is_tiny
from lightning_gpu_tools.advice.idle_time import busy_percent, idle_in_step_share, worked_share
from lightning_gpu_tools.advice.reasons import LeftOut
from lightning_gpu_tools.training.phases import TRAINING_STEP, base_phase
from lightning_gpu_tools.training.run_measurements import RunMeasurements

_MIN_UNNAMED_IDLE = 0.15  # our default, of the wall time: idle in the step beyond what findings explain


class Judgment(NamedTuple):
    """A verdict, the findings to report, and those that need no change."""

    verdict: Verdict
    findings: Sequence[Finding] = ()
    left_out: Sequence[LeftOut] = ()


def by_gain(finding: Finding) -> tuple[float, str]:
    """Return a key for sorting findings: the largest ceiling first."""
    return -finding.ceiling, finding.cause


def judge(
    run: RunMeasurements, findings: Sequence[Finding], left_out: Sequence[LeftOut], min_utilization_percent: float
) -> Judgment:
    """Return the verdict on a run that is long enough, given all findings worth reporting, and the others."""
    kinds = {finding.cause: TIME_CAUSES[finding.cause].kind for finding in findings}
    others, remarks = (
        [finding for finding in findings if kinds[finding.cause] == kind] for kind in ("others", "remark")
    )
    found = [finding for finding in findings if kinds[finding.cause] in ("idle", "busy")]
    if any(finding.share for finding in others):  # they compute; otherwise they only hold memory, as far as known
        return Judgment("shared_gpu", others)
    if not run.on_gpu or run.utilization_percent is None:
        judgment = Judgment("low" if found else "unknown" if run.on_gpu else "healthy", found, left_out)
    else:
        judgment = _of_busy_percent(run, min_utilization_percent, found, remarks)
    if judgment.verdict == "low":
        return Judgment("low", [*judgment.findings, *others])
    is_own_work = 100 * worked_share(run) >= min_utilization_percent
    return Judgment("shared_gpu", others) if others and not is_own_work else judgment


def _of_busy_percent(
    run: RunMeasurements, min_utilization_percent: float, found: Sequence[Finding], remarks: Sequence[Finding]
) -> Judgment:
    """Return the judgment on a run on a GPU that reports its utilization, as if no other job used it."""
    percent = busy_percent(run) or 0.0
    is_busy = percent >= min_utilization_percent and few_active_sms(run) is None
    if is_busy and not any(TIME_CAUSES[finding.cause].kind == "busy" for finding in found):
        reason = f"a GPU that is busy {min_utilization_percent:.0f}% of the time is well used"
        return Judgment("healthy", remarks, [LeftOut(finding, reason) for finding in found])
    idle = 1.0 - percent / 100
    in_step = [finding for finding in found if TIME_CAUSES[finding.cause].is_in_step]
    explained = sum(finding.share for finding in in_step if base_phase(str(finding.evidence["phase"])) == TRAINING_STEP)
    rest = max(0.0, (idle_in_step_share(run) or 0.0) - explained)
    if not found or rest >= _MIN_UNNAMED_IDLE:
        explain = next(cause.explain_rest for cause in TIME_CAUSES.values() if cause.explain_rest is not None)
        found = [*found, explain(run, rest if found else idle)]
    if is_tiny(run):  # a model that is too small for a GPU has one cause
        return Judgment("low", sorted(found, key=by_gain)[:1])
    return Judgment("low", [*found, *remarks])
