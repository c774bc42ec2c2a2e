"""Synthetic measurements of runs, and for each cause a run that has it and a similar one that has not."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lightning_gpu_tools.advice.findings import AT_END, MIN_SECONDS
from lightning_gpu_tools.host import HostBudget
from lightning_gpu_tools.training.phases import FORWARD, LOGGING, TRAINING_STEP
from lightning_gpu_tools.training.run_measurements import (
    CompiledCode,
    CoreFacts,
    GpuFacts,
    GpuIdle,
    LoaderSettings,
    LogFile,
    RankStep,
    Recompiled,
    RunMeasurements,
    SlowSteps,
    SourceLine,
    StepBlock,
    StepTimes,
    WatchedSteps,
)

GIB = 2**30
LOADER = LoaderSettings(num_workers=4, prefetch_factor=2, persistent_workers=True, pin_memory=True, batch_size=32)
NO_WORKERS = LoaderSettings(num_workers=0, prefetch_factor=None, persistent_workers=False, pin_memory=False)
STEP = {"training_step": 50.0}
WAITS = {"data_loading": 30.0, "training_step": 10.0}
HOPPER = GpuFacts(
    compute_capability=(9, 0), memory_total_bytes=80 * GIB, sm_active_percent=90.0, tensor_active_percent=30.0
)


def a_host(cores: float = 64, **options: Any) -> HostBudget:
    """Return a machine with plenty of everything."""
    return HostBudget(**{"cores": cores, "memory_available_bytes": 64 * GIB, "shm_free_bytes": 32 * GIB, **options})


def a_block(
    phase_ms: Mapping[str, float], steps: int = 10, *, cpu_ms: float = 0.0, load_cpu_ms: float = 0.0
) -> StepBlock:
    """Return steps with these milliseconds per phase, and with the CPU time of the step and of the loader."""
    parts = ("forward", "backward", "optimizer")
    ms: dict[str, Any] = {phase: phase_ms.get(phase, 0.0) for phase in ("data_loading", "host_to_device_copy")}
    ms |= {part: phase_ms.get(f"training_step/{part}", 0.0) for part in parts}
    return StepBlock(
        steps=steps,
        wall_s=steps * sum(phase_ms.values()) / 1e3,
        cpu_s=steps * cpu_ms / 1e3,
        data_loading_cpu_s=steps * load_cpu_ms / 1e3,
        paused_s=steps * (phase_ms.get("validation", 0.0) + phase_ms.get("checkpoint", 0.0)) / 1e3,
        phase_s={phase: steps * value / 1e3 for phase, value in phase_ms.items()},
        **{f"{phase}_s": steps * value / 1e3 for phase, value in ms.items()},
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


def on_hopper(**changes: Any) -> dict[str, Any]:
    """Return the options of a run on a GPU that reports how much of it is active."""
    return {"gpu": replace(HOPPER, **changes)}


def ranks(*phase_s: Mapping[str, float], **facts: Any) -> dict[str, Any]:
    """Return the options of a run with two ranks per node, given the seconds of each rank's own work on a step."""
    return {
        "ranks": tuple(
            RankStep(rank=i, node=i // 2, own_step_s=sum(s.values()), phase_s=s, **facts) for i, s in enumerate(phase_s)
        )
    }


def sampled_idle(count: int = 20, **ms: tuple[float, float]) -> GpuIdle:
    """Return sampled steps: per phase, the host's milliseconds per step and how many of them the GPU was idle."""
    return GpuIdle(
        samples=count,
        host_s={phase: count * host / 1e3 for phase, (host, _) in ms.items()},
        idle_s={phase: count * idle / 1e3 for phase, (_, idle) in ms.items()},
        seen=dict.fromkeys(ms, count),
    )


def contended(
    wait_share: float = 0.4, *, others: float = 0.0, quota_cores: float | None = None, **options: Any
) -> RunMeasurements:
    """Return a run on two cores whose training thread waited for a core; other programs kept ``others`` of them busy.

    Options are fields of ``CoreFacts``, and ``phase_ms``, ``workers``, ``loading`` and ``ranks`` of the run.
    """
    of_run = {name: options.pop(name) for name in ("loading", "ranks") if name in options}
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
        host=a_host(min(2.0, quota_cores or 2.0), quota_cores=quota_cores),
        cores=CoreFacts(**cores),
        loader=replace(LOADER, num_workers=workers),
        **of_run,
    )


def parts(forward: float, backward: float, optimizer: float) -> dict[str, float]:
    """Return the milliseconds of the parts of a step."""
    ms = {"forward": forward, "backward": backward, "optimizer": optimizer}
    return {f"training_step/{part}": value for part, value in ms.items()}


def capped(percent: float, clock_percent: float | None, limit: float | None = 500.0) -> dict[str, GpuFacts]:
    """Return the options of a run on a GPU that an administrator can set to at most 700 W."""
    power = {"power_capped_percent": percent, "power_limit_watts": limit, "power_limit_watts_max": 700.0}
    return {"gpu": GpuFacts(**power, held_clock_percent=clock_percent)}


def with_slow_steps(times: float) -> RunMeasurements:
    """Return 250 steps of 40 ms; every 50th takes ``times`` as long."""
    steps = (50, 100, 150, 200, 250)
    excess_s = len(steps) * (times - 1) * 0.04
    slow = SlowSteps(
        phase=TRAINING_STEP, count=len(steps), seconds=len(steps) * times * 0.04, excess_s=excess_s, steps=steps
    )
    facts = StepTimes(count=230, seconds=9.2 + excess_s, p50_s=0.04, p95_s=0.04, max_s=times * 0.04, slow=(slow,))
    run = cpu_run({"training_step": 40.0})
    wall_s = run.wall_s + excess_s
    return replace(run, wall_s=wall_s, phase_s={"training_step": wall_s}, step_times=facts)


def with_logging(*ms: float) -> RunMeasurements:
    """Return windows of ten steps of 20 ms with these milliseconds in a logger that writes ever more."""
    forward, logging = FORWARD, f"{LOGGING}/CSVLogger"
    return replace(
        cpu_run({forward: 20.0}),
        wall_s=sum(20.0 + one for one in ms) / 100,
        steps=10 * len(ms),
        phase_s={forward: 0.2 * len(ms), logging: sum(ms) / 100},
        blocks=[a_block({forward: 20.0, logging: one}) for one in ms],
        readings={"written_bytes_per_step": [(10.0 * i, 5000.0 * i) for i in range(len(ms))]},
        log_files={"CSVLogger": LogFile(name="metrics.csv", size_bytes=2_100_000, rows=41_000)},
    )


def compiled_again(count: int, seconds: float, stopped_at_step: int | None = None) -> RunMeasurements:
    """Return 200 steps of 50 ms with a function that was compiled again."""
    reason = "tensor 'x' size mismatch at index 1. expected 128, actual 131"
    again = Recompiled(
        file="train.py", line=41, function="forward", count=count, seconds=seconds, reason=reason,
        stopped_at_step=stopped_at_step,
    )  # fmt: skip
    return cpu_run(STEP, compiled=CompiledCode(functions=3, recompiled=(again,), limit=("recompile_limit", 8)))


COPIES: dict[str, Any] = {
    "phase_ms": {"host_to_device_copy": 20, "training_step": 30},
    "utilization": 60.0,
    "gpu_idle": sampled_idle(host_to_device_copy=(20.0, 19.0)),
}
BUSY_HOST: dict[str, Any] = {
    **watched(operations=30),
    "lines": (
        SourceLine(phase=FORWARD, file="train.py", line=57, function="augment", samples=180),
        SourceLine(phase=FORWARD, file="train.py", line=61, function="training_step", samples=20),
    ),
}
_ADAM = {"optimizers": {"Adam": "fusible"}}
_QUICK = {"forward": 0.01}
# By the name of a cause: a run in which it is the first finding, and a similar one without it.
EXAMPLES = {
    "backward": (cpu_run(parts(2, 18, 2), **_ADAM), cpu_run(parts(2, 15, 1), **_ADAM)),
    "callback": (cpu_run({"callback/A": 20, **STEP}), cpu_run({"callback/A": 0.4, **STEP})),
    "checkpoint": (cpu_run({"checkpoint": 30, **STEP}), cpu_run({"checkpoint": 1, **STEP})),
    "communication": (
        cpu_run(STEP, **ranks({"backward": 0.01}, {"backward": 0.01}, wait_s=0.02)),
        cpu_run(STEP, **ranks({"backward": 0.01}, {"backward": 0.01}, wait_s=0.001)),
    ),
    "cpu_contention": (contended(throttled_share=0.4, quota_cores=2.0), contended(0.05)),
    "data_loading": (cpu_run(WAITS), cpu_run({"data_loading": 0.2, **STEP})),
    "device_sync": (gpu_run(STEP, 50.0, **watched(line=42)), gpu_run(STEP, 97.0, **watched(line=42))),
    "epoch_start": (cpu_run({"epoch_start": 20, **STEP}), cpu_run({"epoch_start": 0.4, **STEP})),
    "garbage_collection": (cpu_run({"garbage_collection": 10, **STEP}), cpu_run({"garbage_collection": 0.4, **STEP})),
    "host_to_device_copy": (
        gpu_run(**COPIES),
        gpu_run(**{**COPIES, "utilization": 97.0, "gpu_idle": sampled_idle(host_to_device_copy=(20.0, 0.5))}),
    ),
    "host_work": (gpu_run(STEP, 40.0, **BUSY_HOST), gpu_run(STEP, 97.0, **BUSY_HOST)),
    "launch_bound": (gpu_run(STEP, 40.0, **watched(1500)), gpu_run(STEP, 97.0, **watched(1500))),
    "logging": (cpu_run({"logging/CSVLogger": 20, **STEP}), cpu_run({"logging/CSVLogger": 0.4, **STEP})),
    "low_precision": (
        gpu_run(STEP, 97.0, **on_hopper(tensor_active_percent=0.0)),
        gpu_run(STEP, 97.0, precision="bf16-mixed", **on_hopper(tensor_active_percent=0.0)),
    ),
    "optimizer": (cpu_run(parts(2, 4, 14), **_ADAM), cpu_run(parts(2, 4, 11), **_ADAM)),
    "power_cap": (gpu_run(STEP, 99.0, **capped(90.0, 70.0)), gpu_run(STEP, 99.0, **capped(90.0, 70.0, 700.0))),
    "recompilation": (compiled_again(7, 2.0, 81), compiled_again(1, 0.3)),
    "shared_gpu": (
        gpu_run(WAITS, 30.0, gpu=GpuFacts(others_utilization_percent=40.0, others_memory_bytes=3 * GIB)),
        gpu_run(WAITS, 30.0, gpu=GpuFacts(others_utilization_percent=1.0, others_memory_bytes=3 * GIB)),
    ),
    "slow_steps": (with_slow_steps(15.0), with_slow_steps(3.0)),
    "slowing_down": (with_logging(*range(1, 31)), with_logging(*[1.0] * 15, *[16.0] * 15)),
    "small_batch": (
        gpu_run(STEP, 95.0, **on_hopper(sm_active_percent=25.0), largest_batch_size=496),
        gpu_run(STEP, 95.0, **on_hopper(sm_active_percent=80.0), largest_batch_size=496),
    ),
    "straggler": (
        gpu_run(STEP, 99.0, **ranks(*[_QUICK] * 3, {"forward": 0.03})),
        gpu_run(STEP, 99.0, **ranks(*[_QUICK] * 3, {"forward": 0.012})),
    ),
    "thermal_throttling": (
        gpu_run(STEP, 100.0, gpu=GpuFacts(thermal_throttled_percent=60.0, held_clock_percent=70.0)),
        gpu_run(STEP, 100.0, gpu=GpuFacts(thermal_throttled_percent=4.0)),
    ),
    "unexplained": (gpu_run(STEP, 40.0), cpu_run({"unexplained": 3, **STEP})),
    "validation": (cpu_run({"validation": 50, **STEP}), cpu_run({"validation": 12, **STEP})),
}
