"""Made-up measurements of trainings on a GPU, for tests and benchmarks."""

from __future__ import annotations

from typing import Any

from lightning_gpu_tools.host import HostBudget
from lightning_gpu_tools.training.run_measurements import GpuIdle, LoaderSettings, RunMeasurements, StepBlock

GIB = 2**30
LOADER = LoaderSettings(num_workers=4, prefetch_factor=2, persistent_workers=True, pin_memory=True, batch_size=32)


def gpu_run(phase_ms: dict[str, float], utilization: float | None = 30.0, **options: Any) -> RunMeasurements:
    """Return 200 steps on a GPU, each with these milliseconds per phase."""
    steps, step_s = 200, sum(phase_ms.values()) / 1e3
    block = StepBlock(
        steps=10,
        wall_s=10 * step_s,
        data_loading_s=10 * phase_ms.get("data_loading", 0.0) / 1e3,
        data_loading_cpu_s=0.0,
        host_to_device_copy_s=10 * phase_ms.get("host_to_device_copy", 0.0) / 1e3,
        training_step_s=10 * phase_ms.get("training_step", 0.0) / 1e3,
        paused_s=10 * (phase_ms.get("validation", 0.0) + phase_ms.get("checkpoint", 0.0)) / 1e3,
    )
    return RunMeasurements(
        **{
            "wall_s": steps * step_s,
            "steps": steps,
            "phase_s": {phase: steps * ms / 1e3 for phase, ms in phase_ms.items()},
            "blocks": [block] * (steps // 10),
            "host": HostBudget(cores=64, memory_available_bytes=64 * GIB, shm_free_bytes=32 * GIB),
            "on_gpu": True,
            "utilization_percent": utilization,
            "loader": LOADER,
            "precision": "32-true",
            "matmul_precision": "highest",
            **options,
        }
    )


def looks(count: int = 20, **ms: tuple[float, float]) -> GpuIdle:
    """Return sampled steps: for each phase the host's milliseconds per step, and how many of them the GPU was idle."""
    return GpuIdle(
        samples=count,
        host_s={phase: count * host / 1e3 for phase, (host, _) in ms.items()},
        idle_s={phase: count * idle / 1e3 for phase, (_, idle) in ms.items()},
        seen=dict.fromkeys(ms, count),
    )
