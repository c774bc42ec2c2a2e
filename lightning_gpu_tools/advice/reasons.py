"""The reason for a verdict, and what to do, in sentences."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_gpu_tools.advice.findings import MAX_UNNAMED, SHARED_GPU, Finding, Verdict, gain, label_of
from lightning_gpu_tools.advice.host_phases import longest_group
from lightning_gpu_tools.advice.idle_time import busy_percent
from lightning_gpu_tools.advice.verdict import LeftOut
from lightning_gpu_tools.training.phases import CALLBACK, PAUSES, TRAINING_STEP, UNEXPLAINED, base_phase
from lightning_gpu_tools.training.run_measurements import RunMeasurements
from lightning_gpu_tools.units import format_duration, plural


def why_of(run: RunMeasurements, verdict: Verdict, findings: Sequence[Finding], left_out: Sequence[LeftOut]) -> str:
    """Return the reason for the verdict on a run that is long enough."""
    if verdict == "unknown":
        return f"The driver does not report GPU utilization, and nothing on the host slows {run.activity} down."
    if verdict == SHARED_GPU:
        return findings[0].why
    gpus = "GPUs are" if len(run.ranks) > 1 else "GPU is"
    gpu = "" if busy_percent(run) is None else f"The {gpus} busy {busy_percent(run):.0f}% of the time. "
    if verdict == "healthy" or not findings:
        return gpu + (_harmless(run, left_out) or f"Nothing on the host slows {run.activity} down.")
    return gpu + findings[0].why


def _harmless(run: RunMeasurements, left_out: Sequence[LeftOut]) -> str:
    """Return why the longest line of a healthy run's time tree is not a cause; empty without a long line.

    On a GPU, it may be hidden behind the GPU's work, so only a finding counts.
    """
    if run.on_gpu:
        longest, reason = max(left_out, key=lambda candidate: candidate[0].share, default=(None, ""))
        return "" if longest is None else f"{longest.why.removesuffix('.')}, but {reason}."
    group, seconds = longest_group(run, (TRAINING_STEP,))
    if seconds < MAX_UNNAMED * run.wall_s:
        return ""
    about = [candidate for candidate in left_out if group == base_phase(str(candidate[0].evidence.get("phase")))]
    _, reason = max(about, key=lambda candidate: candidate[0].share, default=(None, "no rule judges it"))
    label, verb = label_of(group), "take" if group == CALLBACK else "takes"
    return f"{label[0].upper()}{label[1:]} {verb} {100 * seconds / run.wall_s:.0f}% of the wall time, but {reason}."


def next_step_of(verdict: Verdict, findings: Sequence[Finding]) -> str:
    """Return what to do about the first finding."""
    if not findings:
        if verdict == "unknown":
            return "Check nvidia-smi dmon. On a MIG instance, the driver reports no utilization."
        return "No change needed."
    first = findings[0]
    if verdict == SHARED_GPU:
        return first.advice
    advice = f"{first.advice} {gain(first)}"
    return f"No change needed. Optional: {advice}" if verdict == "healthy" else advice


def of_short_run(
    run: RunMeasurements, steady: int, steady_s: float, min_steps: int, min_seconds: float
) -> tuple[str, str]:
    """Return why a run is too short to judge, with its longest phase so far, and what to do."""
    reason = (
        f"Measured {plural(steady, 'steady step')} in {format_duration(steady_s)}, but a verdict needs at least "
        f"{plural(min_steps, 'step')} and {format_duration(min_seconds)}. The first steps of the run and of each epoch "
        "do not count."
    )
    too_few = {"min_steps": steady < min_steps, "min_seconds": steady_s < min_seconds}
    options = " and ".join(name for name, is_short in too_few.items() if is_short)
    longer = "Train longer" if run.stage == "fit" else "Use more data"
    change = f"{longer}, or lower {options} of {'GPUUtilizationAdvisor' if run.has_trainer else 'watch()'}."
    group, longest_s = longest_group(run, (TRAINING_STEP, UNEXPLAINED, *PAUSES))
    if longest_s and longest_s >= MAX_UNNAMED * run.wall_s:
        share = f"{100 * longest_s / run.wall_s:.0f}% of the wall time"
        reason = f"So far: {label_of(group)}, {share}; too short for a verdict. {reason}"
    return reason, change
