"""Synthetic measurements of trainings, and for each cause a run that has it and a similar one that has not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from run_examples import (
    BUSY_HOST,
    COPIES,
    GIB,
    STEP,
    WAITS,
    capped,
    compiled_again,
    contended,
    cpu_run,
    gpu_run,
    on_hopper,
    parts,
    ranks,
    sampled_idle,
    watched,
)
from trainings import HandClock

from lightning_gpu_tools.training.phases import FORWARD, LOGGING
from lightning_gpu_tools.training.run_measurements import GpuFacts, LogFile, RunMeasurements
from lightning_gpu_tools.training.step_clock import StepClock


def waiting_ranks(phase: str) -> RunMeasurements:
    """Return a run of two equal ranks that wait for each other for two thirds of the time."""
    return cpu_run({"training_step": 30}, **ranks({phase: 0.01}, {phase: 0.01}, wait_s=0.02))


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


_ADAM = {"optimizers": {"Adam": "fusible"}}
_QUICK = {"forward": 0.01}
_REWRITTEN = {
    "readings": {"written_bytes_per_step": [(step, 500.0 * step) for step in range(300)]},
    "log_files": {"CSVLogger": LogFile(name="metrics.csv", size_bytes=2_100_000, rows=41_000)},
}
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
    "slow_steps": tuple(
        run_of([{"training_step": slow_s if step % 50 == 0 else 0.04} for step in range(1, 251)])
        for slow_s in (0.6, 0.12)
    ),
    "slowing_down": tuple(
        run_of([{FORWARD: 0.02, f"{LOGGING}/CSVLogger": s} for s in logging_s], **_REWRITTEN)
        for logging_s in ([step / 1e4 for step in range(300)], [0.001] * 150 + [0.016] * 150)
    ),
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
