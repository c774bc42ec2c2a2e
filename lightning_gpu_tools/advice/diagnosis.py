"""The diagnosis of a run: its causes in their order, the verdict on them, the reason, and what to do."""

from collections.abc import Mapping
from dataclasses import replace

from lightning_gpu_tools.advice.causes import STALL_CAUSES, TIME_CAUSES
from lightning_gpu_tools.advice.findings import (
    AT_END,
    MIN_SECONDS,
    MIN_STEPS,
    MIN_UTILIZATION_PERCENT,
    Cause,
    Diagnosis,
    Finding,
)
from lightning_gpu_tools.advice.lost_time import idle_by_phase, idle_in_step_share
from lightning_gpu_tools.advice.verdict import (
    LeftOut,
    early_warnings,
    explain_error,
    judge,
    of_short_run,
    why_not,
    words_of,
)
from lightning_gpu_tools.advice.workers import Failure
from lightning_gpu_tools.memory.readings import OutOfMemory
from lightning_gpu_tools.training.phases import DATA_LOADING, TRAINING_STEP, base_phase
from lightning_gpu_tools.training.run_measurements import RunMeasurements
from lightning_gpu_tools.training.stall_facts import StallFacts

_MAX_FINDINGS = 4  # our default: users with more to change start with these


def diagnose(
    run: RunMeasurements,
    *,
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
        judged, found, left_out = judge(run, *_find(run, TIME_CAUSES), min_utilization_percent)
    else:
        judged, found, left_out = "too_short", [], []
        if run.steps >= min_steps and run.wall_s >= min_seconds:
            early = {name: cause for name, cause in TIME_CAUSES.items() if cause.is_judged_early(run)}
            found, _ = _find(run, early)
            judged = "low" if found else "too_short"
    # The largest speedup first, and equal ones in the order of their causes.
    verdict, findings = judged, sorted(found, key=lambda finding: -finding.ceiling)[:_MAX_FINDINGS]
    if verdict == "too_short":
        reason, change = of_short_run(run, steady, steady_s, min_steps, min_seconds)
    else:
        reason, change = words_of(run, verdict, findings, left_out)
    if out_of_memory is not None:
        of_memory, reason = explain_error(run, out_of_memory)
        verdict, findings, change = "out_of_memory", [*of_memory, *findings][:_MAX_FINDINGS], of_memory[0].advice
    else:
        warnings = early_warnings(run)
        if warnings and not findings:
            change = warnings[0].advice
        findings += warnings
        if failure is not None:
            change = f"{failure.next_step} {change}" if findings else failure.next_step
    return Diagnosis(
        verdict=verdict,
        findings=tuple(findings),
        why=reason,
        next_step=change,
        utilization_percent=run.utilization_percent,
        gpu_idle_percent={} if judged == "too_short" else _idle_percent(run),
        waiting_share=run.phase_s.get(DATA_LOADING, 0.0) / run.wall_s if run.wall_s > 0 else None,
        step_p50_s=run.step_p50_s,
        step_p95_s=run.step_p95_s,
    )


def explain_stall(facts: StallFacts) -> Finding:
    """Return why training makes no progress: the first cause that applies."""
    return next(replace(found, cause=name) for name, cause in STALL_CAUSES.items() for found in cause.find(facts))


def _find(run: RunMeasurements, causes: dict[str, Cause[RunMeasurements]]) -> tuple[list[Finding], list[LeftOut]]:
    """Return the findings worth reporting, and the others with the reasons why they need no change."""
    silenced: set[str] = set()
    reported: list[Finding] = []
    left_out: list[LeftOut] = []
    for name, cause in causes.items():
        if name in silenced:
            continue
        for found in cause.find(run):
            finding = replace(found, cause=name)
            if not cause.why_not(run, finding):
                silenced.update(cause.silences)
            explained = {str(earlier.evidence.get("phase")) for earlier in reported}
            phase = str(finding.evidence.get("phase"))
            if reason := why_not(run, cause, finding):
                left_out.append((finding, reason))
            elif not cause.leaves_explained or explained.isdisjoint((phase, base_phase(phase))):
                reported.append(finding)
    return reported, left_out


def _idle_percent(run: RunMeasurements) -> Mapping[str, float]:
    """Return the GPU's idle time outside validation, by phase, in percent of the wall time."""
    if run.gpu_idle is None:
        return {}
    percent = {phase: 100 * share for phase, share in idle_by_phase(run).items()}
    in_step = idle_in_step_share(run)
    return percent if in_step is None else {**percent, TRAINING_STEP: 100 * in_step}
