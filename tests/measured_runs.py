"""Made-up measurements of trainings, for tests and benchmarks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from trainings import HandClock

from lightning_gpu_tools.advice.findings import AT_END, MIN_SECONDS
from lightning_gpu_tools.host import HostBudget
from lightning_gpu_tools.training.run_measurements import (
    CoreFacts,
    GpuIdle,
    LoaderSettings,
    LoadingFacts,
    RankStep,
    RunMeasurements,
    StepBlock,
)
from lightning_gpu_tools.training.step_clock import StepClock

GIB = 2**30
LOADER = LoaderSettings(num_workers=4, prefetch_factor=2, persistent_workers=True, pin_memory=True, batch_size=32)
NO_WORKERS = LoaderSettings(num_workers=0, prefetch_factor=None, persistent_workers=False, pin_memory=False)


def a_host(cores: float = 64, **options: Any) -> HostBudget:
    return HostBudget(**{"cores": cores, "memory_available_bytes": 64 * GIB, "shm_free_bytes": 32 * GIB, **options})


def a_block(phase_ms: dict[str, float], steps: int = 10, *, cpu_ms: float = 0.0, load_cpu_ms: float = 0.0) -> StepBlock:
    """Return steps that take these milliseconds per phase, and of CPU time: of the step, and of the loader."""
    ms = {phase: phase_ms.get(phase, 0.0) for phase in ("data_loading", "host_to_device_copy")}
    ms |= {part: phase_ms.get(f"training_step/{part}", 0.0) for part in ("forward", "backward", "optimizer")}
    return StepBlock(
        steps=steps,
        wall_s=steps * sum(phase_ms.values()) / 1e3,
        cpu_s=steps * cpu_ms / 1e3,
        data_loading_cpu_s=steps * load_cpu_ms / 1e3,
        paused_s=steps * (phase_ms.get("validation", 0.0) + phase_ms.get("checkpoint", 0.0)) / 1e3,
        **{f"{phase}_s": steps * value / 1e3 for phase, value in ms.items()},
    )


def gpu_run(
    phase_ms: dict[str, float],
    utilization: float | None = 30.0,
    *,
    cpu_ms: float = 0.0,
    load_cpu_ms: float = 0.0,
    **options: Any,
) -> RunMeasurements:
    """Return 200 steps on a GPU, or as many as make a run long enough, each with these milliseconds per phase."""
    step_s = sum(phase_ms.values()) / 1e3
    steps = 20 * max(10, math.ceil(AT_END * MIN_SECONDS / 20 / step_s) if step_s else 0)
    return RunMeasurements(
        **{
            "wall_s": steps * step_s,
            "steps": steps,
            "phase_s": {phase: steps * ms / 1e3 for phase, ms in phase_ms.items()},
            "blocks": [a_block(phase_ms, steps // 20, cpu_ms=cpu_ms, load_cpu_ms=load_cpu_ms)] * 20,
            "host": a_host(),
            "on_gpu": True,
            "utilization_percent": utilization,
            "loader": LOADER,
            "precision": "32-true",
            "matmul_precision": "highest",
            **options,
        }
    )


def cpu_run(phase_ms: dict[str, float], **options: Any) -> RunMeasurements:
    """Return 200 steps on the CPU, without workers."""
    return gpu_run(phase_ms, None, **{"on_gpu": False, "loader": NO_WORKERS, **options})


def contended(
    wait_share: float = 0.4,
    *,
    others: float = 0.0,
    throttled: float = 0.0,
    quota_cores: float | None = None,
    phase_ms: dict[str, float] | None = None,
    workers: int = 4,
    loading: LoadingFacts | None = None,
    ranks: tuple[RankStep, ...] = (),
    **options: Any,
) -> RunMeasurements:
    """Return a run on two cores whose training thread waited for one, and of which other programs kept some busy."""
    cores = {
        "wait_share": wait_share,
        "own_cores": 2 - others,
        "others_cores": others,
        "runnable_threads": 5.2,
        "machine_cores": 2,
        "affinity_cores": 2,
        "throttled_share": throttled,
        "torch_threads": 2,
        **options,
    }
    return cpu_run(
        phase_ms or {"training_step/forward": 40.0},
        host=a_host(min(2.0, quota_cores or 2.0), quota_cores=quota_cores),
        cores=CoreFacts(**cores),
        loader=dataclasses.replace(LOADER, num_workers=workers),
        loading=loading,
        ranks=ranks,
    )


def sampled_idle(count: int = 20, **ms: tuple[float, float]) -> GpuIdle:
    """Return sampled steps: for each phase the host's milliseconds per step, and how many of them the GPU was idle."""
    return GpuIdle(
        samples=count,
        host_s={phase: count * host / 1e3 for phase, (host, _) in ms.items()},
        idle_s={phase: count * idle / 1e3 for phase, (_, idle) in ms.items()},
        seen=dict.fromkeys(ms, count),
    )


COPIES: dict[str, Any] = {
    "phase_ms": {"host_to_device_copy": 20, "training_step": 30},
    "utilization": 60.0,
    "gpu_idle": sampled_idle(host_to_device_copy=(20.0, 19.0)),
}


def waiting_ranks(phase: str) -> RunMeasurements:
    """Return a run of two equal ranks that wait for each other for two thirds of the time."""
    ranks = tuple(RankStep(rank=i, node=0, own_step_s=0.01, phase_s={phase: 0.01}, wait_s=0.02) for i in range(2))
    return cpu_run({"training_step": 30}, ranks=ranks)


def timed_steps(steps: Sequence[dict[str, float]]) -> StepClock:
    """Return the stopped clock of steps with these seconds by phase; ``items`` is the size of a step's batch."""
    time = HandClock()
    clock = StepClock(time)
    clock.start()
    for step in steps:
        clock.begin_fetch()
        time.spend(step.get("data_loading", 0.0))
        clock.end_fetch()
        clock.times.batch_items = int(step["items"]) if "items" in step else None
        for phase, seconds in step.items():
            if phase not in ("data_loading", "items"):
                clock.timed(phase, time.spend)(seconds)
    clock.stop()
    return clock


def run_of(steps: Sequence[dict[str, float]], **options: Any) -> RunMeasurements:
    """Return a training on the CPU of steps with these seconds by phase, the first 20 of which are the warm-up."""
    clock = timed_steps(steps)
    measured = {
        "wall_s": clock.wall_s,
        "steps": len(steps),
        "phase_s": clock.seconds,
        "blocks": clock.blocks,
        "step_times": clock.times.facts(),
        "spans": clock.timeline.spans(),
    }
    return cpu_run({}, **{**measured, **options})
