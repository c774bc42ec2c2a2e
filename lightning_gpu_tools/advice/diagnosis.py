"""From measurements of a training run to a verdict, the causes in order of cost, and what to do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from lightning_gpu_tools.advice.cpu_contention import cpu_contention, without_contention
from lightning_gpu_tools.advice.failures import Failure, OutOfMemory
from lightning_gpu_tools.advice.findings import (
    AT_END,
    MIN_CEILING,
    MIN_CEILING_LOWER,
    MIN_COST_S_PER_STEP,
    MIN_SECONDS,
    MIN_STEPS,
    MIN_UTILIZATION_PERCENT,
    Diagnosis,
    Evidence,
    Finding,
    Verdict,
    ceiling,
    counted,
    gain,
    mean_interval,
)
from lightning_gpu_tools.advice.host_work import data_loading, harmless, host_work, unnamed
from lightning_gpu_tools.advice.inside_step import (
    few_active_sms,
    held_down,
    inside_step,
    is_tiny,
    low_precision,
    out_of_proportion,
    shared_gpu,
    unexplained_in_step,
)
from lightning_gpu_tools.advice.loader_plan import LoaderResult, as_searched
from lightning_gpu_tools.advice.memory_account import growing_memory
from lightning_gpu_tools.advice.memory_causes import judge
from lightning_gpu_tools.advice.ranks import straggler, waiting_for_ranks
from lightning_gpu_tools.advice.uneven_steps import details, unsaid, with_uneven_steps
from lightning_gpu_tools.training.memory_readings import MemoryGrowth
from lightning_gpu_tools.training.phases import (
    CALLBACK,
    CHECKPOINT,
    EPOCH_START,
    GARBAGE_COLLECTION,
    LOGGING,
    PHASES,
)
from lightning_gpu_tools.training.run_measurements import COPY, DATA_LOADING, TRAINING_STEP, RunMeasurements
from lightning_gpu_tools.units import format_bytes, format_duration, printable

# Our defaults.
_MAX_FINDINGS = 4  # anyone with more to change starts with these
_MIN_EPOCHS = 5  # from here on, the time to start them is not just that of the first one
_MIN_UNEXPLAINED = 0.15  # idle time without a cause, of the wall time
# What happens now and then, and is added up.
_EVENTS = (CALLBACK, LOGGING, CHECKPOINT, GARBAGE_COLLECTION, EPOCH_START, COPY)


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
    """Return the verdict and the findings, by the measurements and what else is known of the run.

    ``failure`` is what ended it, where more is known than its error. Steps count for ``min_steps``, and their seconds
    for ``min_seconds``, if they are steady.
    """
    steady, steady_s = sum(block.steps for block in run.blocks), sum(block.wall_s for block in run.blocks)
    if run.on_gpu and run.utilization_percent is None:  # the driver's first sample may be yet to come
        min_seconds = max(min_seconds, AT_END * MIN_SECONDS)
    if steady >= max(1, min_steps) and steady_s >= min_seconds:
        verdict, found = _judge(run, min_utilization_percent, searched)
    else:
        found = []
        # Short epochs hardly have a steady step.
        if run.steps >= min_steps and run.wall_s >= min_seconds and run.epochs >= _MIN_EPOCHS:
            found = _worth_reporting(run, [one for one in host_work(run) if one.cause == "epoch_start"])
        verdict = "low" if found else "too_short"
    findings = tuple(sorted(found, key=_by_gain)[:_MAX_FINDINGS])
    is_judged = verdict != "too_short"
    if is_judged:
        why, next_step = _why(run, verdict, findings), _next_step(verdict, findings)
    else:
        why = (
            f"Measured {steady} steady steps in {format_duration(steady_s)}; at least {min_steps} steps and "
            f"{format_duration(min_seconds)} are needed. The first steps of the run and of each epoch do not count."
        )
        too_few = {"min_steps": steady < min_steps, "min_seconds": steady_s < min_seconds}
        options = " and ".join(name for name, is_short in too_few.items() if is_short)
        next_step = f"Train longer, or lower {options} of {'GPUUtilizationAdvisor' if run.has_trainer else 'watch()'}."
    if out_of_memory is not None:
        of_memory, why, next_step = judge(run, out_of_memory)
        verdict, findings = "out_of_memory", (*of_memory, *findings)[:_MAX_FINDINGS]
    elif growth:
        growing = tuple(map(growing_memory, growth))
        if not findings:
            next_step = growing[0].advice
        findings = (*findings, *growing)
    if failure is not None and out_of_memory is None:
        next_step = f"{failure.next_step} {next_step}" if findings else failure.next_step
    return Diagnosis(
        verdict=verdict,
        findings=findings,
        why=why,
        next_step=next_step,
        utilization_percent=run.utilization_percent,
        gpu_idle_percent=_idle_percent(run) if is_judged else {},
        gpu_idle_residual_percent=100 * run.idle_residual if is_judged else 0.0,
        waiting_share=run.phase_s.get(DATA_LOADING, 0.0) / run.wall_s if run.wall_s > 0 else None,
        step_p50_s=run.step_p50_s,
        step_p95_s=run.step_p95_s,
    )


def _by_gain(finding: Finding) -> tuple[float, str]:
    return -finding.ceiling, finding.cause


def _judge(
    run: RunMeasurements, min_utilization_percent: float, searched: LoaderResult | None
) -> tuple[Verdict, list[Finding]]:
    others = shared_gpu(run)
    if others is not None:
        return "shared_gpu", [others]
    found = _causes(run, searched)
    if not run.on_gpu or run.utilization_percent is None:
        return ("low" if found else "unknown" if run.on_gpu else "healthy"), found
    remarks = _worth_reporting(run, [low_precision(run), *held_down(run)])
    is_busy = run.utilization_percent >= min_utilization_percent and few_active_sms(run) is None
    if is_busy and not any(finding.cause in ("straggler", "unexplained", "cpu_contention") for finding in found):
        return "healthy", remarks
    idle = 1.0 - run.utilization_percent / 100
    rest = unexplained_in_step(run, found)
    if not found or rest >= _MIN_UNEXPLAINED:
        found.append(_unexplained(run, rest if found else idle))
    if is_tiny(run):
        return "low", [_cause_of_tiny(sorted(found, key=_by_gain), idle)]
    return "low", [*found, *remarks]


def _causes(run: RunMeasurements, searched: LoaderResult | None) -> list[Finding]:
    loading = data_loading(run)
    steady = [
        loading,
        straggler(run),
        waiting_for_ranks(run),
        *host_work(run),
        *inside_step(run),
        *out_of_proportion(run),
    ]
    found = with_uneven_steps(run, [finding for finding in steady if finding is not None])
    if searched is not None:
        found = [as_searched(one, searched) if one.cause == "data_loading" else one for one in found]
    named = _worth_reporting(run, found)
    slow_in = {finding.evidence["phase"] for finding in named if finding.cause == "slow_steps"}
    named += [finding for finding in unnamed(run) if finding.evidence["phase"] not in slow_in]
    contention = cpu_contention(run, loading)
    if contention is None:
        return named
    return [contention, *_worth_reporting(run, without_contention(run, named, contention))]


def _worth_reporting(run: RunMeasurements, found: Iterable[Finding | None]) -> list[Finding]:
    # Where the GPU's own times contradict the driver's utilization, a share may be too large by the difference.
    doubt = run.idle_residual
    surer = [
        replace(one, ceiling_lower=min(one.ceiling_lower, ceiling(one.share * _repeated(run, one) - doubt)))
        for one in found
        if one is not None
    ]
    return [
        finding
        for finding in surer
        if finding.ceiling >= MIN_CEILING
        and finding.ceiling_lower > MIN_CEILING_LOWER
        and finding.share * run.step_s >= MIN_COST_S_PER_STEP
    ]


def _repeated(run: RunMeasurements, finding: Finding) -> float:
    """Return which part of a share would be there without an accident, by how it is spread over the run.

    A single event, or three, may be an accident: in one of twenty other runs there would be none of them.
    """
    if finding.cause not in _EVENTS or (run.on_gpu and finding.cause == COPY):
        return 1.0
    seconds = [span.phase_s.get(finding.cause, 0.0) for span in run.spans]
    interval = mean_interval(seconds)
    return 1.0 if interval is None or not any(seconds) else min(1.0, interval[0] / fmean(seconds))


def _cause_of_tiny(found: Sequence[Finding], idle: float) -> Finding:
    # Of a model that is too small for a GPU, one cause is reported: one on the host if that dominates.
    first = next((finding for finding in found if finding.cause != "unexplained"), found[0])
    launch = next((finding for finding in found if finding.cause == "launch_bound"), first)
    return first if first.share >= idle / 2 else launch


def _unexplained(run: RunMeasurements, idle: float) -> Finding:
    if run.profile is None:
        how = "GPUUtilizationAdvisor(profile=True) profiles" if run.has_trainer else "Profile"
        torchs = "" if run.has_trainer else " with torch.profiler"
        advice = f"{how} three steps{torchs}, which separates syncs, small kernels and copies."
    elif run.has_trainer:
        advice = "Profile the training step: Trainer(profiler='pytorch', max_steps=50)."
    else:
        advice = "Profile some steps with torch.profiler."
    left_on_cpu = ", ".join(run.left_on_cpu) or None
    if left_on_cpu:
        advice += f" Start with what is left on the CPU: {left_on_cpu}."
    evidence: Evidence = {"phase": TRAINING_STEP, "idle_percent": 100 * idle, "left_on_cpu": left_on_cpu}
    return replace(counted("unexplained", idle, evidence, advice), ceiling_lower=1.0)


def _idle_percent(run: RunMeasurements) -> dict[str, float]:
    if run.gpu_idle is None:
        return {}
    percent = {phase: 100 * share for phase, share in run.idle_by_phase().items()}
    in_step = run.idle_in_step_share
    return percent if in_step is None else {**percent, TRAINING_STEP: 100 * in_step}


_COSTS = {
    "host_to_device_copy": "Moving batches to the device takes",
    "device_sync": "Waiting for GPU results inside the training step takes",
    "launch_bound": "Launching many small kernels takes",
    "small_batch": "A batch too small to fill the GPU costs",
    "low_precision": "32-bit computing beside idle tensor cores costs",
    "backward": "Backward takes",
    "optimizer": "The optimizer {name} takes",
    "callback": "The callback {name} takes",
    "logging": "The logger {name} takes",
    "slow_steps": "Slow steps take",
    "cpu_contention": "Waiting for a CPU core takes",
    "communication": "Waiting for other ranks takes",
    "straggler": "Waiting for {who} takes",
    "thermal_throttling": "Thermal throttling costs",
    "power_cap": "Throttling at the power limit costs",
}
_IDLE_IN_STEP = "Unexplained idle time inside the training step takes"
_COSTS_OF_UNNAMED = {
    "trainer": "The Trainer's own work takes",
    "training_step": "Work in the training step beside forward, backward and optimizer takes",
    "outside_loop": "Code outside of run.batches() takes",
    "unexplained": "Work outside of all hooks and steps takes",
}


def _why(run: RunMeasurements, verdict: Verdict, findings: Sequence[Finding]) -> str:
    if verdict == "unknown":
        return "Nothing reports how busy the GPU is, and nothing on the host slows training down."
    if verdict == "shared_gpu":
        return f"{_others(findings[0])}, so its utilization says nothing about this training."
    gpu = "" if run.utilization_percent is None else f"The GPU is busy {run.utilization_percent:.0f} % of the time. "
    if verdict == "healthy" or not findings:
        but, longest = unsaid(run, ()), harmless(run)
        if longest:
            return f"{gpu}{longest}{but and f' Besides, {but}.'}"
        return f"{gpu}Nothing on the host slows training down{but and f', but {but}'}."
    first = findings[0]
    name = printable(first.evidence.get("name", ""))
    if first.cause == "unexplained":
        idle = "idle_percent" in first.evidence
        costs = _IDLE_IN_STEP if idle else _COSTS_OF_UNNAMED[str(first.evidence["phase"])]
    elif first.cause == "callback" and not run.has_trainer:
        costs = f'The phase "{name or first.cause}" takes'
    elif first.cause not in _COSTS or (first.cause == "logging" and not name):  # run.phase("logging")
        costs = f"{PHASES[first.cause].label.capitalize()} takes"
    elif first.cause in ("callback", "logging") and "." in name:  # LitModel.on_after_backward, StepLR.step, self.log
        costs = f"{name} takes"
    else:
        costs = _COSTS[first.cause].format_map({**first.evidence, "name": name})
    numbers = "; ".join(filter(None, (_numbers(first.evidence), details(first.evidence))))
    besides = unsaid(run, findings)
    return (
        f"{gpu}{costs} {100 * first.share:.0f} % of the wall time{numbers and f' ({numbers})'}."
        f"{besides and f' Besides, {besides}.'}"
    )


def _others(shared: Finding) -> str:
    percent, size = (shared.evidence.get(name) for name in ("others_utilization_percent", "others_memory_bytes"))
    uses = [] if percent is None else [f"keep the GPU {percent:.0f} % busy"]
    if size is not None:
        uses.append(f"use {format_bytes(float(size))} of the GPU's memory")
    return f"Other jobs {' and '.join(uses)}"


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
            return "Check nvidia-smi dmon. On a MIG instance the driver reports no utilization."
        return "No change needed."
    first = findings[0]
    if verdict == "shared_gpu":
        return first.advice
    advice = f"{first.advice} {gain(first)}"
    return f"No change needed. Optional: {advice}" if verdict == "healthy" else advice
