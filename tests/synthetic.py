"""Synthetic runs, out-of-memory errors and stalls."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from lightning_gpu_tools.advice.findings import AT_END, MIN_SECONDS
from lightning_gpu_tools.advice.out_of_memory import ErrorFacts
from lightning_gpu_tools.gpus.metrics import GpuWindow
from lightning_gpu_tools.host import HostBudget
from lightning_gpu_tools.memory.readings import (
    Block,
    MemoryHoldings,
    MemoryReading,
    OutOfMemory,
    RankMemory,
    StepMemory,
)
from lightning_gpu_tools.training.phases import FORWARD
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
from lightning_gpu_tools.training.stall_facts import Call, Frame, GroupCalls, ProcessFacts, RankFacts, StallFacts
from lightning_gpu_tools.training.step_clock import StepClock

GIB, MIB = 2**30, 2**20
LOADER = LoaderSettings(num_workers=4, prefetch_factor=2, persistent_workers=True, pin_memory=True, batch_size=32)
NO_WORKERS = LoaderSettings(num_workers=0, prefetch_factor=None, persistent_workers=False, pin_memory=False)
STEP = {"training_step": 50.0}
WAITS = {"data_loading": 30.0, "training_step": 10.0}
HOPPER = GpuWindow(sm_active_percent=90.0, tensor_active_percent=30.0)


def a_host(cores: float = 64, **options: Any) -> HostBudget:
    """Return a machine with plenty of everything."""
    return HostBudget(**{"cores": cores, "memory_available_bytes": 64 * GIB, "shm_free_bytes": 32 * GIB, **options})


def a_block(
    phase_ms: Mapping[str, float], steps: int = 10, *, cpu_ms: float = 0.0, load_cpu_ms: float = 0.0
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
    per_block = max(10, math.ceil(AT_END * MIN_SECONDS / 20 / step_s) if step_s else 0)
    block = a_block(phase_ms, per_block, cpu_ms=cpu_ms, load_cpu_ms=load_cpu_ms)
    usual: dict[str, Any] = {
        "wall_s": 20 * per_block * step_s,
        "steps": 20 * per_block,
        "phase_s": {phase: 20 * per_block * ms / 1e3 for phase, ms in phase_ms.items()},
        "blocks": [block] * 20,
        "host": a_host(),
        "on_gpu": True,
        "utilization_percent": utilization,
        "loader": LOADER,
        "precision": "32-true",
        "matmul_precision": "highest",
    }
    return RunMeasurements(**{**usual, **options})


def cpu_run(phase_ms: Mapping[str, float], **options: Any) -> RunMeasurements:
    """Return 200 steps on the CPU without workers, each with these milliseconds per phase."""
    return gpu_run(phase_ms, None, **{"on_gpu": False, "loader": NO_WORKERS, **options})


def timed_steps(steps: Sequence[Mapping[str, float]]) -> StepClock:
    """Return the stopped clock of steps with these seconds by phase; ``items`` is the size of a step's batch."""
    now_s = 1000.0

    def spend(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    clock = StepClock(lambda: now_s)
    clock.start()
    for step in steps:
        clock.begin_fetch()
        spend(step.get("data_loading", 0.0))
        clock.end_fetch()
        clock.times.batch_items = int(step["items"]) if "items" in step else None
        for phase, seconds in step.items():
            if phase not in ("data_loading", "items"):
                clock.timed(phase, spend)(seconds)
    clock.stop()
    return clock


def run_of(steps: Sequence[Mapping[str, float]], **options: Any) -> RunMeasurements:
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


def watched(operations: float = 400, line: int | None = None) -> dict[str, Any]:
    """Return the options of a run with this many operations per step, and a line that waits for the GPU each step."""
    sync = SourceLine(phase=FORWARD, file="train.py", line=line or 0, function="training_step", samples=10)
    return {"watched": WatchedSteps(steps=5, operations=operations, syncs=() if line is None else (sync,))}


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


def sampled_idle(count: int = 20, **ms: tuple[float, float]) -> IdleTimes:
    """Return sampled steps: per phase, the host's milliseconds per step and how many of them the GPU was idle."""
    return IdleTimes(
        samples=count,
        host_s={phase: count * host / 1e3 for phase, (host, _) in ms.items()},
        idle_s={phase: count * idle / 1e3 for phase, (_, idle) in ms.items()},
        seen=dict.fromkeys(ms, count),
    )


def contended(wait_share: float = 0.4, *, others: float = 0.0, workers: int = 4, **cores: Any) -> RunMeasurements:
    """Return a run on two cores whose training thread waited for a core; other programs kept ``others`` of them busy.

    ``cores`` are other fields of ``CoreFacts``.
    """
    usual = {"runnable_threads": 5.2, "machine_cores": 2, "affinity_cores": 2, "torch_threads": 2}
    facts = CoreFacts(wait_share=wait_share, others_cores=others, **{**usual, **cores})
    loader = replace(LOADER, num_workers=workers)
    return cpu_run({"training_step/forward": 40.0}, host=a_host(2.0), cores=facts, loader=loader)


COPIES: dict[str, Any] = {
    "phase_ms": {"host_to_device_copy": 20, "training_step": 30},
    "utilization": 60.0,
    "gpu_idle": sampled_idle(host_to_device_copy=(20.0, 19.0)),
}


# --- out-of-memory errors ----------------------------------------------------------------------------------------

# (step, bytes in tensors when it began).
FLAT = [(step, 8.0 * GIB) for step in range(1, 100)]
GROWING = [(step, (8 + 0.1 * step) * GIB) for step in range(1, 100)]


MODEL = MemoryHoldings(
    parameters_bytes=2 * GIB, gradients_bytes=2 * GIB, gradients_kept_bytes=2 * GIB, optimizer_bytes=3 * GIB
)


def counted_steps(batch_size: int, begin: int, peak: int) -> RankMemory:
    """Return the memory of a rank: steps of one size, with 2 GiB each of parameters and gradients, and 3 of states.

    Old gradients are freed before backward, which needs as much memory as forward and these gradients together.
    """
    shape, taken = (batch_size, 512), peak - begin
    now = MemoryReading(allocated_bytes=begin, reserved_bytes=peak, peak_reserved_bytes=peak)
    last = StepMemory(
        step=9,
        batch_shape=shape,
        begin=now,
        end=now,
        added_bytes=taken,
        forward_bytes=taken,
        segments=((Block(1, begin - 2 * GIB),), (Block(2, 2 * GIB),)),
        events=(
            Block(10, taken, grows=True),
            Block(2, -2 * GIB),
            Block(11, 2 * GIB, grows=True),
            Block(11, -2 * GIB),
            Block(10, -taken),
            Block(12, 2 * GIB),
        ),
    )
    return RankMemory(
        latest=now,
        holdings=MODEL,
        first_step=StepMemory(step=1, batch_shape=shape, begin=replace(now, allocated_bytes=2 * GIB), end=now),
        last_step=last,
        recorded=(last,),
        peak_phase="forward",
        peaks_bytes={"training": peak},
    )


def an_error(*, allocated: int = 22 * GIB, cached: int = 0, **known: Any) -> OutOfMemory:
    """Return an error of torch on a GPU of 24 GiB, where forward could not allocate 200 MiB."""
    usual = {
        "requested_bytes": 200 * MIB,
        "total_bytes": 24 * GIB,
        "free_bytes": 10 * MIB,
        "reading": MemoryReading(allocated_bytes=allocated, reserved_bytes=allocated + cached),
        "phase": FORWARD,
        "step": 12,
        "uuid": "GPU-0",
        "model": MODEL,
        "fusible": ("AdamW",),
    }
    return OutOfMemory(**{**usual, **known})


def failed(**options: Any) -> ErrorFacts:
    """Return the same error of a run on this GPU."""
    return ErrorFacts(gpu_run(STEP, 95.0), an_error(**options))


STEPS_OF_64 = counted_steps(64, 8 * GIB, 18 * GIB)


# --- stalls ------------------------------------------------------------------------------------------------------


def a_stack(*calls: str) -> tuple[Frame, ...]:
    """Return a stack of ``file:function`` calls; those in ``train.py`` are the user's program."""
    split = [call.partition(":") for call in calls]
    return tuple(Frame(file, 7, function, file != "train.py") for file, _, function in split)


def a_stall(phase: str = FORWARD, *ranks: RankFacts, **facts: Any) -> StallFacts:
    """Return a stalled training process that waits in a function of the user."""
    defaults = {"process": ProcessFacts(100, stack=a_stack("train.py:wait"))}
    return StallFacts(phase=phase, ranks=ranks, **{**defaults, **facts})


def a_rank(number: int, *calls: Call, **facts: Any) -> RankFacts:
    """Return a stalled rank with these calls in the default group."""
    defaults: dict[str, Any] = {"node": 0, "pid": 100 + number, "epoch": 1, "step": 5, "phase": FORWARD}
    if calls:
        defaults["groups"] = (GroupCalls("nccl 0", "", calls),)
        defaults["waits_in"] = next((call.text for call in calls if not call.is_done), None)
    return RankFacts(rank=number, has_stalled=True, **{**defaults, **facts})
