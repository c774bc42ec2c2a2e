"""From measurements of a training run to what holds it up, with evidence, and what to change. Pure: decides on data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from lightning_gpu_tools.advice.loader_plan import LoadCost, LoaderPlan, plan_loader
from lightning_gpu_tools.quantities import format_duration
from lightning_gpu_tools.readings import HostBudget, LoaderSettings, StepBlock

Verdict = Literal["healthy", "low", "too_short", "shared_gpu", "unknown"]
Cause = Literal[
    "data_loading",
    "host_to_device_copy",
    "device_sync",
    "launch_bound",
    "small_batch",
    "low_precision",
    "callback",
    "logging",
    "checkpoint",
    "validation",
    "epoch_start",
    "communication",
    "straggler",
    "thermal_throttling",
    "power_cap",
    "shared_gpu",
    "unexplained",
]

# A choice: advice is given where removing a cause could gain at least 5 %, and with 95 % confidence more than 2 %.
# Less than that cannot be told from the noise between two runs.
MIN_CEILING = 1.05
MIN_CEILING_LOWER = 1.02
# A choice: a cause must cost this much of a step. Below it lies what no setting removes, such as the time a DataLoader
# takes to hand over a batch that is ready.
MIN_COST_S_PER_STEP = 0.001


@dataclass(frozen=True, kw_only=True, slots=True)
class RunMeasurements:
    """What was measured of a fit up to some moment.

    Attributes:
        wall_s: Wall time of training so far.
        steps: Training steps so far.
        phase_s: Wall time by phase; the phases add up to ``wall_s``.
        blocks: The steady steps in blocks.
        host: What the host grants the process.
        on_gpu: Whether the model trains on a GPU.
        utilization_percent: Mean utilization of the trainer's GPUs; ``None`` if nothing reports it.
        loader: Settings of the training DataLoader; ``None`` if it is not a ``torch.utils.data.DataLoader``.
        worker_cpu_s_per_batch: CPU time of the loader's workers for one batch; ``None`` without workers.
        batch_bytes: Size of one batch; ``None`` if unknown.
    """

    wall_s: float
    steps: int
    phase_s: Mapping[str, float]
    blocks: Sequence[StepBlock]
    host: HostBudget
    on_gpu: bool = False
    utilization_percent: float | None = None
    loader: LoaderSettings | None = None
    worker_cpu_s_per_batch: float | None = None
    batch_bytes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing that holds training up.

    Attributes:
        cause: What it is.
        share: Fraction of the wall time lost to it, 0 to 1; on a GPU never more than the GPU's idle time.
        ceiling: The most that removing it can speed training up: 1.31 = +31 %.
        ceiling_lower: Lower 95 % bound of ``ceiling``; equal to it where the share is a full count and no sample.
        evidence: Numbers with the unit in the name, and words; ``"kind"`` says which kind of ``data_loading`` it is.
        advice: The exact change.
        basis: ``measured``, or ``heuristic`` where a rule of thumb was needed.
    """

    cause: Cause
    share: float
    ceiling: float
    ceiling_lower: float
    evidence: Mapping[str, float | str]
    advice: str
    basis: Literal["measured", "heuristic"] = "measured"


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """What a run's measurements say.

    Attributes:
        verdict: ``healthy``, ``low`` (the GPU, or without one the training step, stands waiting), ``too_short`` to
            judge, ``shared_gpu``, or ``unknown`` (nothing reports the GPU's utilization).
        findings: Ordered by ceiling, highest first.
        why: The verdict's reason in one sentence with numbers.
        next_step: What to do now, in one sentence with numbers.
        utilization_percent: Mean utilization of the trainer's GPUs, ``None`` without a report of it.
    """

    verdict: Verdict
    findings: tuple[Finding, ...] = ()
    why: str
    next_step: str
    utilization_percent: float | None = None


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
    if steady < max(1, min_steps) or steady_s < min_seconds:
        return Diagnosis(
            verdict="too_short",
            why=f"{steady} steady steps in {format_duration(steady_s)} were seen; to judge, at least {min_steps} steps "
            f"and {format_duration(min_seconds)} are needed.",
            next_step="Train longer, or set min_steps and min_seconds of GPUUtilizationAdvisor lower.",
            utilization_percent=run.utilization_percent,
        )
    findings = _findings(run)
    utilization = run.utilization_percent
    if run.on_gpu and utilization is None and not findings:
        verdict: Verdict = "unknown"
    elif run.on_gpu and utilization is not None:
        verdict = "low" if utilization < min_utilization_percent else "healthy"
    else:
        verdict = "low" if findings else "healthy"
    if verdict == "healthy":
        findings = ()
    elif verdict == "low" and not findings:
        findings = (_unexplained(1 - (utilization or 0.0) / 100),)
    return Diagnosis(
        verdict=verdict,
        findings=findings,
        why=_why(run, verdict, findings),
        next_step=_next_step(verdict, findings),
        utilization_percent=utilization,
    )


def _findings(run: RunMeasurements) -> tuple[Finding, ...]:
    idle = 1.0 if run.utilization_percent is None else 1.0 - run.utilization_percent / 100
    found = [_data_loading(run, idle), *_full_counts(run, idle)]
    return tuple(
        sorted(
            (
                finding
                for finding in found
                if finding is not None
                and finding.ceiling >= MIN_CEILING
                and finding.ceiling_lower > MIN_CEILING_LOWER
                and finding.share * run.wall_s / run.steps >= MIN_COST_S_PER_STEP
            ),
            key=lambda finding: (-finding.ceiling, finding.cause),
        )
    )


def _unexplained(idle: float) -> Finding:
    return Finding(
        cause="unexplained",
        share=idle,
        ceiling=_ceiling(idle),
        ceiling_lower=1.0,
        evidence={"idle_percent": 100 * idle},
        advice="See what happens inside the training step: Trainer(profiler='pytorch', max_steps=50).",
    )


def _ceiling(share: float) -> float:
    return math.inf if share >= 1 else 1 / (1 - share)


def _data_loading(run: RunMeasurements, idle: float) -> Finding | None:
    waits_s = [block.data_loading_s / block.steps for block in run.blocks]
    steps_s = [(block.wall_s - block.paused_s) / block.steps for block in run.blocks]
    wait_s, step_s = median(waits_s), median(steps_s)
    paused_s = sum(run.phase_s.get(phase, 0.0) for phase in ("validation", "checkpoint", "epoch_start"))
    stepping = max(0.0, 1 - paused_s / run.wall_s)
    # A wait that overlaps GPU work costs nothing, so it cannot cost more than the GPU's idle time.
    share = min(wait_s / step_s * stepping, idle) if step_s > 0 else 0.0
    if share <= 0:
        return None
    shares = sorted(wait / step for wait, step in zip(waits_s, steps_s, strict=True) if step > 0)
    # Distribution-free 95 % lower bound of a median: the order statistic at n/2 - 0.98 sqrt(n).
    lower = shares[max(0, math.floor(len(shares) / 2 - 0.98 * math.sqrt(len(shares))))]
    evidence: dict[str, float | str] = {
        "wait_ms_per_step": wait_s * 1e3,
        "step_ms": step_s * 1e3,
        "cores": run.host.cores,
    }
    ceiling, ceiling_lower = _ceiling(share), _ceiling(min(lower * stepping, share))
    if run.loader is None:
        return Finding(
            cause="data_loading",
            share=share,
            ceiling=ceiling,
            ceiling_lower=ceiling_lower,
            evidence=evidence,
            advice="Load more batches in parallel: the loader is not a torch DataLoader, so its own settings decide.",
        )
    cost = _load_cost(run, run.loader, wait_s=wait_s, step_s=step_s)
    plan = plan_loader(run.loader, cost, step_s=max(step_s - wait_s, 1e-6), host=run.host, cuda=run.on_gpu)
    gain = min(ceiling, step_s / plan.step_s)
    if plan.limited_by == "cores" and gain < MIN_CEILING:
        kind = "cpu_bound"
    elif plan.settings.num_workers > run.loader.num_workers or plan.limited_by == "shm":
        kind = "too_few_workers"
    else:
        kind = "main_process"
    evidence |= {
        "kind": kind,
        "num_workers": run.loader.num_workers,
        "num_workers_needed": plan.workers_needed,
        "load_ms_per_batch": cost.wall_s * 1e3,
    }
    if cost.cpu_s is not None:
        evidence["load_cpu_ms_per_batch"] = cost.cpu_s * 1e3
    if kind == "too_few_workers":
        evidence["predicted_speedup"] = gain
    return Finding(
        cause="data_loading",
        share=share,
        ceiling=ceiling,
        ceiling_lower=ceiling_lower,
        evidence=evidence,
        advice=_loader_advice(kind, run, run.loader, plan, cost),
    )


def _load_cost(run: RunMeasurements, loader: LoaderSettings, *, wait_s: float, step_s: float) -> LoadCost:
    """Return what a batch costs one loader. Valid only while training waits: then the loader delivers all it can."""
    if loader.num_workers:
        # So many workers deliver one batch a step.
        return LoadCost(
            wall_s=loader.num_workers * step_s, cpu_s=run.worker_cpu_s_per_batch, batch_bytes=run.batch_bytes
        )
    steps = sum(block.steps for block in run.blocks)
    cpu_s = sum(block.data_loading_cpu_s for block in run.blocks) / steps
    return LoadCost(wall_s=wait_s, cpu_s=cpu_s, batch_bytes=run.batch_bytes)


def _loader_advice(kind: str, run: RunMeasurements, now: LoaderSettings, plan: LoaderPlan, cost: LoadCost) -> str:
    cores = f"{run.host.cores:g} cores"
    if run.host.cores_in_reach is not None and run.host.cores_in_reach < 0.9 * run.host.cores:
        cores += f", of which others leave it {run.host.cores_in_reach:.2g}"
    if run.host.local_ranks > 1:
        cores += f" for {run.host.local_ranks} ranks"
    if kind == "cpu_bound":
        return (
            f"More workers will not help: a batch takes {format_duration(cost.cpu_s or 0)} of CPU time and this job "
            f"has {cores}. Make loading cheaper (store decoded or smaller samples, augment on the GPU) or get more "
            "cores."
        )
    if kind == "main_process":
        return (
            f"{now.num_workers} workers are enough by their speed, so handing batches over is the limit: return "
            "tensors instead of many small Python objects, and do less in collate_fn."
        )
    if plan.limited_by == "shm" and plan.settings.num_workers <= now.num_workers:
        return (
            f"The step could use {plan.workers_needed} workers (now {now.num_workers}), but /dev/shm has no room for "
            "their batches: make it larger (docker run --shm-size=..., or --ipc=host)."
        )
    changes, kept = [], []
    for name in ("num_workers", "prefetch_factor", "persistent_workers", "pin_memory"):
        new, old = getattr(plan.settings, name), getattr(now, name)
        if new != old:
            changes.append(f"{name}={new} (now {old})")
        else:
            kept.append(f"{name}={old}")
    advice = "In the DataLoader set " + ", ".join(changes)
    if kept:
        advice += ", keep " + ", ".join(kept)
    short = plan.settings.num_workers < plan.workers_needed
    if short and plan.limited_by == "cores":
        advice += f"; the step could use {plan.workers_needed} workers, but this job has {cores}"
    elif short and plan.limited_by == "shm":
        advice += f"; the step could use {plan.workers_needed} workers, but /dev/shm has no room for their batches"
    return advice + "."


_FULL_COUNT_ADVICE: dict[Cause, str] = {
    "callback": "Call {name} less often, or make its hooks cheaper.",
    "logging": "Log less often (Trainer(log_every_n_steps=...)); {name} writes while training waits.",
    "checkpoint": "Save less often (ModelCheckpoint(every_n_train_steps=... or every_n_epochs=...)), or save in the "
    "background with AsyncCheckpointIO(PortableCheckpointIO()).",
    "epoch_start": "Make epochs longer, or keep the loader's workers between them (persistent_workers=True).",
}


def _full_counts(run: RunMeasurements, idle: float) -> list[Finding]:
    """Return a finding for each thing of the host that is timed whole, so that its share is a count and no estimate."""
    found = []
    for phase, seconds in run.phase_s.items():
        cause, _, name = phase.partition("/")
        for known, advice in _FULL_COUNT_ADVICE.items():
            if cause == known:
                share = min(seconds / run.wall_s, idle)
                evidence: dict[str, float | str] = {"seconds": seconds, "ms_per_step": seconds / run.steps * 1e3}
                if name:
                    evidence["name"] = name
                found.append(
                    Finding(
                        cause=known,
                        share=share,
                        ceiling=_ceiling(share),
                        ceiling_lower=_ceiling(share),
                        evidence=evidence,
                        advice=advice.format(name=name),
                    )
                )
    return found


_LOST_TO = {
    "data_loading": "Waiting for data",
    "callback": "The callback {name}",
    "logging": "The logger {name}",
    "checkpoint": "Writing checkpoints",
    "epoch_start": "Starting epochs",
    "unexplained": "Something inside the training step, not the host's work around it,",
}


def _why(run: RunMeasurements, verdict: Verdict, findings: Sequence[Finding]) -> str:
    gpu = "" if run.utilization_percent is None else f"The GPU is busy {run.utilization_percent:.0f} % of the time. "
    if findings:
        first = findings[0]
        lost_to = _LOST_TO[first.cause].format(name=first.evidence.get("name", ""))
        numbers = ""
        if "wait_ms_per_step" in first.evidence:
            numbers = " ({wait_ms_per_step:.3g} of {step_ms:.3g} ms a steady step)".format_map(first.evidence)
        elif "ms_per_step" in first.evidence:
            numbers = " ({ms_per_step:.3g} ms a step)".format_map(first.evidence)
        return f"{gpu}{lost_to} takes {100 * first.share:.0f} % of the wall time{numbers}."
    if verdict == "unknown":
        return "Nothing reports how busy the GPU is, and nothing on the host holds training up."
    return f"{gpu}Nothing on the host holds the training step up."


def _next_step(verdict: Verdict, findings: Sequence[Finding]) -> str:
    if findings:
        gain = float(findings[0].evidence.get("predicted_speedup", findings[0].ceiling))
        return f"{findings[0].advice} Up to {gain:.3g} times as fast."
    if verdict == "unknown":
        return "Look at nvidia-smi dmon; on a MIG instance the driver reports no utilization."
    return "Nothing to change."
