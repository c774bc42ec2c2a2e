"""Two examples of each cause, by its name: one whose first finding it is, and a similar one without it."""

from dataclasses import replace
from typing import Any, NamedTuple

from synthetic import (
    COPIES,
    FLAT,
    GIB,
    GROWING,
    MIB,
    STEP,
    STEPS_OF_64,
    WAITS,
    a_rank,
    a_stack,
    a_stall,
    contended,
    counted_steps,
    cpu_run,
    failed,
    gpu_run,
    on_hopper,
    ranks,
    run_of,
    sampled_idle,
    watched,
)

from lightning_gpu_tools.gpus.metrics import GpuWindow
from lightning_gpu_tools.gpus.readings import GpuProcess
from lightning_gpu_tools.memory.readings import LOADING_CHECKPOINT, SETUP, MemoryHoldings
from lightning_gpu_tools.training.phases import BACKWARD, DATA_LOADING, FORWARD, OPTIMIZER, VALIDATION
from lightning_gpu_tools.training.run_measurements import (
    Recompiled,
    RunMeasurements,
    SourceLine,
)
from lightning_gpu_tools.training.stall_facts import Call, ProcessFacts


class Examples(NamedTuple):
    """Facts that a cause judges: two runs, errors or stalls."""

    sick: Any
    healthy: Any


def spending(phase: str, sick_ms: float, healthy_ms: float) -> Examples:
    """Return steps that spend so much time in this phase, beside the step itself."""
    return Examples(*(cpu_run({phase: ms, **STEP}) for ms in (sick_ms, healthy_ms)))


def with_slow_steps(times: float) -> RunMeasurements:
    """Return steps of 40 ms; every 50th takes ``times`` as long."""
    return run_of([{"training_step": 0.04 * (1 if number % 50 else times)} for number in range(1, 301)])


def slower_by(more_s: float) -> RunMeasurements:
    """Return steps of 20 ms that get longer by these seconds, while memory grows."""
    steps = [{"training_step": 0.02 + more_s * number / 300} for number in range(300)]
    return run_of(steps, readings={"resident_bytes": [1e6 * number for number in range(30)]})


def compiled_again(count: int, seconds: float) -> RunMeasurements:
    """Return 200 steps of 50 ms with a function that was compiled again."""
    reason = "tensor 'x' size mismatch at index 1. expected 128, actual 131"
    again = Recompiled(file="train.py", line=41, function="forward", count=count, seconds=seconds, reason=reason)
    return cpu_run(STEP, recompiled=(again,))


BUSY_HOST: dict[str, Any] = {
    **watched(operations=30),
    "lines": (
        SourceLine(phase=FORWARD, file="train.py", line=57, function="augment", samples=180),
        SourceLine(phase=FORWARD, file="train.py", line=61, function="training_step", samples=20),
    ),
}
CAPPED = GpuWindow(
    power_capped_percent=90.0, held_clock_percent=70.0, power_limit_watts=500.0, power_limit_watts_max=700.0
)
TIME_EXAMPLES = {
    "shared_gpu": Examples(
        *(
            gpu_run(WAITS, 30.0, gpu=GpuWindow(others_utilization_percent=percent, others_memory_bytes=3 * GIB))
            for percent in (40.0, 1.0)
        )
    ),
    "slowing_down": Examples(slower_by(0.03), slower_by(0.0)),
    "straggler": Examples(
        *(gpu_run(STEP, 99.0, **ranks(*[{"forward": 0.01}] * 3, {"forward": slow_s})) for slow_s in (0.03, 0.012))
    ),
    "communication": Examples(
        *(cpu_run(STEP, **ranks({"backward": 0.01}, {"backward": 0.01}, wait_s=wait_s)) for wait_s in (0.02, 0.001))
    ),
    "small_batch": Examples(
        *(gpu_run(STEP, 95.0, **on_hopper(sm_active_percent=active), largest_batch_size=496) for active in (25.0, 80.0))
    ),
    "recompilation": Examples(compiled_again(7, 2.0), compiled_again(1, 0.3)),
    "data_loading": Examples(cpu_run(WAITS), cpu_run({"data_loading": 0.2, **STEP})),
    "slow_steps": Examples(with_slow_steps(15.0), with_slow_steps(3.0)),
    "callback": spending("callback/A", 20, 0.4),
    "checkpoint": spending("checkpoint", 30, 1),
    "cpu_contention": Examples(contended(), contended(0.05)),
    "device_sync": Examples(gpu_run(STEP, 50.0, **watched(line=42)), gpu_run(STEP, 97.0, **watched(line=42))),
    "epoch_start": spending("epoch_start", 20, 0.4),
    "garbage_collection": spending("garbage_collection", 10, 0.4),
    "host_to_device_copy": Examples(
        gpu_run(**COPIES),
        gpu_run(**{**COPIES, "utilization": 97.0, "gpu_idle": sampled_idle(host_to_device_copy=(20.0, 0.5))}),
    ),
    "host_work": Examples(gpu_run(STEP, 40.0, **BUSY_HOST), gpu_run(STEP, 97.0, **BUSY_HOST)),
    "launch_bound": Examples(gpu_run(STEP, 40.0, **watched(1500)), gpu_run(STEP, 97.0, **watched(1500))),
    "logging": spending("logging/CSVLogger", 20, 0.4),
    "low_precision": Examples(
        gpu_run(STEP, 97.0, **on_hopper(tensor_active_percent=0.0)),
        gpu_run(STEP, 97.0, precision="bf16-mixed", **on_hopper(tensor_active_percent=0.0)),
    ),
    "power_cap": Examples(
        gpu_run(STEP, 99.0, gpu=CAPPED), gpu_run(STEP, 99.0, gpu=replace(CAPPED, power_limit_watts=700.0))
    ),
    "thermal_throttling": Examples(
        gpu_run(STEP, 100.0, gpu=GpuWindow(thermal_throttled_percent=60.0, held_clock_percent=70.0)),
        gpu_run(STEP, 100.0, gpu=GpuWindow(thermal_throttled_percent=4.0)),
    ),
    "validation": spending("validation", 50, 12),
    "unexplained": Examples(gpu_run(STEP, 40.0), cpu_run({"unexplained": 3, **STEP})),
}

ANOTHER = (GpuProcess(9, 6 * GIB),)
OTHER_RANKS = tuple(GpuProcess(40 + rank, 2 * GIB) for rank in range(1, 4))
MEMORY_EXAMPLES = {
    "loading_checkpoint": Examples(failed(phase=LOADING_CHECKPOINT), failed(phase=SETUP)),
    "stray_contexts": Examples(
        failed(begins=FLAT, others=OTHER_RANKS, strays={41: 1, 42: 2, 43: 3}), failed(begins=FLAT, others=OTHER_RANKS)
    ),
    "spike": Examples(
        *(failed(batch_shape=(64, length), usual_items=64 * 512, memory=STEPS_OF_64) for length in (2048, 512))
    ),
    "leftover_process": Examples(
        failed(begins=FLAT, others=ANOTHER, orphans=(9,)), failed(begins=FLAT, others=ANOTHER)
    ),
    "other_processes": Examples(
        failed(begins=FLAT, others=ANOTHER), failed(begins=FLAT, others=ANOTHER, memory=STEPS_OF_64)
    ),
    "evaluation_graph": Examples(
        *(failed(phase=VALIDATION, validation_begins=GROWING, grad_enabled=enabled) for enabled in (True, False))
    ),
    "memory_growth": Examples(
        failed(begins=GROWING), failed(begins=[*FLAT[:50], *((step, 20.0 * GIB) for step in range(51, 100))])
    ),
    "fragmentation": Examples(
        failed(begins=FLAT, allocated=18 * GIB, cached=5 * GIB), failed(begins=FLAT, cached=300 * MIB)
    ),
    "optimizer_too_large": Examples(failed(phase=OPTIMIZER, begins=FLAT[:1]), failed(phase=BACKWARD, begins=FLAT[:1])),
    "model_too_large": Examples(
        failed(phase=SETUP, model=MemoryHoldings(parameters_bytes=24 * GIB)), failed(begins=FLAT[:1])
    ),
    "batch_too_large": Examples(
        failed(begins=FLAT, batch_shape=(32, 512), memory=counted_steps(16, 8 * GIB, 18 * GIB)),
        failed(begins=FLAT, batch_shape=(64, 512), usual_items=64 * 512, memory=STEPS_OF_64),
    ),
    "unexplained": Examples(failed(phase="callback/A"), failed(begins=FLAT)),
}

REDUCES = a_rank(0, waits_in="all_reduce")
CALLS = a_rank(0, Call(4, "all_reduce", False))
DECODES = ProcessFacts(102, stack=a_stack("train.py:decode"))
STALL_EXAMPLES = {
    "rank_behind": Examples(
        a_stall(FORWARD, REDUCES, a_rank(1, phase=DATA_LOADING, why="It waits.", next_step="Check it.")),
        a_stall(FORWARD, REDUCES, a_rank(1, waits_in="barrier")),
    ),
    "collective": Examples(
        a_stall(FORWARD, CALLS, a_rank(1, Call(4, "barrier", False))),
        a_stall(FORWARD, CALLS, a_rank(1, Call(3, "all_reduce", True))),
    ),
    "swap": Examples(a_stall(memory_stall_percent=90.0), a_stall(memory_stall_percent=2.0)),
    "storage": Examples(
        a_stall(VALIDATION, process=ProcessFacts(1, "D", "storage", "/nfs/x")),
        a_stall(VALIDATION, process=ProcessFacts(1, "S")),
    ),
    "blocked_worker": Examples(
        a_stall(DATA_LOADING, workers=(ProcessFacts(101, waits_for="lock"), DECODES), awaited_worker=1),
        a_stall(DATA_LOADING),
    ),
    "dataset": Examples(a_stall(DATA_LOADING), a_stall(VALIDATION)),
    "code": Examples(a_stall(), a_stall(DATA_LOADING)),
}
