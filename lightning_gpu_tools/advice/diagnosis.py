"""From measurements of a training run to a verdict and what holds it up, most costly first. Pure: decides on data."""

from __future__ import annotations

from dataclasses import replace

from lightning_gpu_tools.advice.data_loading import data_loading
from lightning_gpu_tools.advice.findings import Diagnosis, Finding, Verdict, ceiling, is_worth_saying
from lightning_gpu_tools.advice.gpu_limits import held_down, shared_gpu
from lightning_gpu_tools.advice.host_work import host_work
from lightning_gpu_tools.advice.inside_step import (
    has_few_active_sms,
    inside_step,
    is_tiny,
    low_precision,
    unexplained_in_step,
)
from lightning_gpu_tools.advice.ranks import straggler
from lightning_gpu_tools.advice.words import next_step, why
from lightning_gpu_tools.training.run_measurements import RunMeasurements
from lightning_gpu_tools.units import format_duration

# A choice: who has more than this to change begins with the first.
_MOST_FINDINGS = 4
# A choice: from so many epochs on the time that starting them takes is no accident of the first one.
_MANY_EPOCHS = 5
# A choice: idle time that no cause accounts for is named from this share of the wall time on.
_MUCH_UNEXPLAINED = 0.15


def diagnose(
    run: RunMeasurements,
    *,
    min_utilization_percent: float = 70.0,
    min_steps: int = 50,
    min_seconds: float = 20.0,
) -> Diagnosis:
    """Return the verdict and the findings.

    Args:
        run: What was measured.
        min_utilization_percent: Utilization below which a GPU counts as badly used. 70 is where SageMaker's
            LowGPUUtilization rule draws the line.
        min_steps: Steady steps needed to judge.
        min_seconds: Seconds of steady steps needed to judge.
    """
    steady = sum(block.steps for block in run.blocks)
    steady_s = sum(block.wall_s for block in run.blocks)
    if steady >= max(1, min_steps) and steady_s >= min_seconds:
        verdict, findings = _judge(run, min_utilization_percent)
    else:
        findings = _epoch_starts(run) if run.steps >= min_steps and run.wall_s >= min_seconds else ()
        verdict = "low" if findings else "too_short"
    if verdict == "too_short":
        return Diagnosis(
            verdict=verdict,
            why=f"{steady} steady steps in {format_duration(steady_s)} were seen; to judge, at least {min_steps} steps "
            f"and {format_duration(min_seconds)} are needed. The first steps of the run and the first one of each "
            "epoch are not steady.",
            next_step="Train longer, or set min_steps and min_seconds of GPUUtilizationAdvisor lower.",
            utilization_percent=run.utilization_percent,
        )
    return Diagnosis(
        verdict=verdict,
        findings=findings,
        why=why(run, verdict, findings),
        next_step=next_step(verdict, findings),
        utilization_percent=run.utilization_percent,
        gpu_idle_percent=_idle_percent(run),
        gpu_idle_residual_percent=100 * run.idle_residual,
    )


def _epoch_starts(run: RunMeasurements) -> tuple[Finding, ...]:
    """Return what can be said where hardly any step is a steady one, because epochs are so short."""
    if run.epochs < _MANY_EPOCHS:
        return ()
    return _worth_saying(run, [finding for finding in host_work(run) if finding.cause == "epoch_start"])


def _judge(run: RunMeasurements, min_utilization_percent: float) -> tuple[Verdict, tuple[Finding, ...]]:
    others = shared_gpu(run)
    if others is not None:
        return "shared_gpu", (others,)
    found = _causes(run)
    if not run.on_gpu:
        return ("low" if found else "healthy"), found[:_MOST_FINDINGS]
    if run.utilization_percent is None:
        return ("low" if found else "unknown"), found[:_MOST_FINDINGS]
    remarks = _worth_saying(run, [finding for finding in (low_precision(run), *held_down(run)) if finding is not None])
    waits_for_a_rank = any(finding.cause == "straggler" for finding in found)
    if run.utilization_percent >= min_utilization_percent and not has_few_active_sms(run) and not waits_for_a_rank:
        return "healthy", remarks
    idle = 1.0 - run.utilization_percent / 100
    rest = unexplained_in_step(run, found)
    if not found or rest >= _MUCH_UNEXPLAINED:
        found = _ordered([*found, _unexplained(run, idle if not found else rest)])
    if is_tiny(run):
        return "low", _one_sentence(found, idle)
    return "low", _ordered([*found, *remarks])[:_MOST_FINDINGS]


def _causes(run: RunMeasurements) -> tuple[Finding, ...]:
    """Return what leaves the GPU, or without one the training step, standing idle."""
    found = [data_loading(run), straggler(run), *host_work(run), *inside_step(run)]
    return _worth_saying(run, [finding for finding in found if finding is not None])


def _worth_saying(run: RunMeasurements, found: list[Finding]) -> tuple[Finding, ...]:
    # As far as the GPU's own times and the driver's utilization contradict each other, a share may be too large.
    doubt = run.idle_residual
    if doubt > 0:
        found = [
            replace(finding, ceiling_lower=min(finding.ceiling_lower, ceiling(finding.share - doubt)))
            for finding in found
        ]
    return _ordered([finding for finding in found if is_worth_saying(finding, run.step_s)])


def _ordered(found: list[Finding]) -> tuple[Finding, ...]:
    return tuple(sorted(found, key=lambda finding: (-finding.ceiling, finding.cause)))


def _one_sentence(found: tuple[Finding, ...], idle: float) -> tuple[Finding, ...]:
    """Return the one thing to say of a model that is too small for a GPU: a cause on the host, if it is that."""
    outside = [finding for finding in found if finding.cause != "unexplained"]
    first = outside[0] if outside else found[0]
    launch = next((finding for finding in found if finding.cause == "launch_bound"), first)
    return (first,) if first.share >= idle / 2 else (launch,)


def _unexplained(run: RunMeasurements, idle: float) -> Finding:
    advice = "See what happens inside the training step: Trainer(profiler='pytorch', max_steps=50)."
    evidence: dict[str, float | str] = {"idle_percent": 100 * idle}
    if run.left_on_cpu:
        evidence["left_on_cpu"] = ", ".join(run.left_on_cpu)
        advice += f" Begin with what is left on the CPU: {evidence['left_on_cpu']}."
    return Finding(
        cause="unexplained",
        share=idle,
        ceiling=ceiling(idle),
        ceiling_lower=1.0,
        evidence=evidence,
        advice=advice,
    )


def _idle_percent(run: RunMeasurements) -> dict[str, float]:
    """Return where the GPU stood idle, phase by phase; nothing where its own times were not measured."""
    if run.gpu_idle is None:
        return {}
    percent = {phase: 100 * share for phase, share in run.idle_by_phase().items()}
    in_step = run.idle_in_step_share
    return percent if in_step is None else {**percent, "training_step": 100 * in_step}
