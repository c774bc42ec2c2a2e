"""Synthetic measurements: the sick and healthy examples of causes, also used by tests."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lightning_gpu_tools.advice.findings import AT_END, MIN_SECONDS
from lightning_gpu_tools.gpus.metrics import GpuWindow
from lightning_gpu_tools.host import HostBudget
from lightning_gpu_tools.training.run_measurements import (
    CoreFacts,
    IdleTimes,
    LoaderSettings,
    RankStep,
    RunMeasurements,
    SourceLine,
    StepBlock,
    WatchedSteps,
)

GIB = 2**30
LOADER = LoaderSettings(num_workers=4, prefetch_factor=2, persistent_workers=True, pin_memory=True, batch_size=32)
NO_WORKERS = LoaderSettings(num_workers=0, prefetch_factor=None, persistent_workers=False, pin_memory=False)
STEP = {"training_step": 50.0}
WAITS = {"data_loading": 30.0, "training_step": 10.0}
HOPPER = GpuWindow(sm_active_percent=90.0, tensor_active_percent=30.0)


def a_host(cores: float = 64, **options: Any) -> HostBudget:
    """Return a machine with plenty of everything."""
    return HostBudget(**{"cores": cores, "memory_available_bytes": 64 * GIB, "shm_free_bytes": 32 * GIB, **options})


def a_block(
    phase_ms: Mapping[str, float],
    steps: int = 10,
    *,
    cpu_ms: float = 0.0,
    load_cpu_ms: float = 0.0,
) -> StepBlock:
    """Return steps with these milliseconds per phase, and with the times of the step and of the loader on the CPU."""
    return StepBlock(
        steps=steps,
        wall_s=steps * sum(phase_ms.values()) / 1e3,
        cpu_s=steps * cpu_ms / 1e3,
        data_loading_cpu_s=steps * load_cpu_ms / 1e3,
        phase_s={phase: steps * value / 1e3 for phase, value in phase_ms.items()},
    )


def gpu_run(
    phase_ms: Mapping[str, float],
    utilization: float | None = 30.0,
    *,
    cpu_ms: float = 0.0,
    load_cpu_ms: float = 0.0,
    **options: Any,
) -> RunMeasurements:
    """Return 200 steps on a GPU, or enough for a verdict if that is more, each with these milliseconds per phase."""
    step_s = sum(phase_ms.values()) / 1e3
    times = {"cpu_ms": cpu_ms, "load_cpu_ms": load_cpu_ms}
    steps = 20 * max(10, math.ceil(AT_END * MIN_SECONDS / 20 / step_s) if step_s else 0)
    return RunMeasurements(
        **{
            "wall_s": steps * step_s,
            "steps": steps,
            "phase_s": {phase: steps * ms / 1e3 for phase, ms in phase_ms.items()},
            "blocks": [a_block(phase_ms, steps // 20, **times)] * 20,
            "host": a_host(),
            "on_gpu": True,
            "utilization_percent": utilization,
            "loader": LOADER,
            "precision": "32-true",
            "matmul_precision": "highest",
            **options,
        }
    )


def cpu_run(phase_ms: Mapping[str, float], **options: Any) -> RunMeasurements:
    """Return the same run on the CPU, without workers."""
    return gpu_run(phase_ms, None, **{"on_gpu": False, "loader": NO_WORKERS, **options})


def watched(operations: float = 400, line: int | None = None) -> dict[str, Any]:
    """Return the options of a run with this many operations per step, and a line that waits for the GPU each step."""
    place: dict[str, Any] = {
        "phase": "training_step/forward",
        "file": "train.py",
        "function": "training_step",
        "samples": 10,
    }
    syncs = () if line is None else (SourceLine(line=line, **place),)
    return {"watched": WatchedSteps(steps=5, operations=operations, syncs=syncs)}


def on_hopper(*, compute_capability: tuple[int, int] = (9, 0), **changes: Any) -> dict[str, Any]:
    """Return the options of a run on a GPU that reports how much of it is active."""
    return {"gpu": replace(HOPPER, **changes), "compute_capability": compute_capability}


def ranks(*phase_s: Mapping[str, float], **facts: Any) -> dict[str, Any]:
    """Return the options of a run with two ranks per node, given the seconds of each rank's own work on a step."""
    return {
        "ranks": tuple(
            RankStep(rank=i, node=i // 2, own_step_s=sum(s.values()), phase_s=s, **facts) for i, s in enumerate(phase_s)
        )
    }


def sampled_idle(count: int = 20, **ms: tuple[float, float]) -> IdleTimes:
    """Return sampled steps: per phase, the host's milliseconds per step and how many of them the GPU was idle."""
    return IdleTimes(
        samples=count,
        host_s={phase: count * host / 1e3 for phase, (host, _) in ms.items()},
        idle_s={phase: count * idle / 1e3 for phase, (_, idle) in ms.items()},
        seen=dict.fromkeys(ms, count),
    )


def contended(wait_share: float = 0.4, *, others: float = 0.0, allowed: float = 2.0, **options: Any) -> RunMeasurements:
    """Return a run on two cores whose training thread waited for a core; other programs kept ``others`` of them busy.

    Options are fields of ``CoreFacts``, and ``phase_ms``, ``workers`` and ``loading`` of the run.
    """
    loading = options.pop("loading", None)
    phase_ms, workers = options.pop("phase_ms", {"training_step/forward": 40.0}), options.pop("workers", 4)
    cores = {
        "wait_share": wait_share,
        "own_cores": 2 - others,
        "others_cores": others,
        "runnable_threads": 5.2,
        "machine_cores": 2,
        "affinity_cores": 2,
        "torch_threads": 2,
        **options,
    }
    return cpu_run(
        phase_ms,
        host=a_host(allowed),
        cores=CoreFacts(**cores),
        loader=replace(LOADER, num_workers=workers),
        loading=loading,
    )


def capped(percent: float, clock_percent: float | None, limit_watts: float | None = 500.0) -> dict[str, Any]:
    """Return the options of a run on a GPU that an administrator can set to at most 700 W."""
    gpu = GpuWindow(
        power_capped_percent=percent,
        held_clock_percent=clock_percent,
        power_limit_watts=limit_watts,
        power_limit_watts_max=700.0,
    )
    return {"gpu": gpu}


COPIES: dict[str, Any] = {
    "phase_ms": {"host_to_device_copy": 20, "training_step": 30},
    "utilization": 60.0,
    "gpu_idle": sampled_idle(host_to_device_copy=(20.0, 19.0)),
}
