"""What slows a busy GPU down: heat, the power limit, other jobs."""

from __future__ import annotations

from typing import Literal

from lightning_gpu_tools.advice.findings import BUSY_PERCENT, Cause, Finding, ceiling, counted
from lightning_gpu_tools.training.run_measurements import GpuFacts, RunMeasurements

# Our default: thermal throttling for less than 5 % of the time costs too little to report.
_MIN_THERMAL_PERCENT = 5.0
# Our defaults: reaching the power limit is normal at full load. It is reported where it lasts half of the time and
# lowers the clock below 85 % of the highest one.
_MIN_POWER_PERCENT = 50.0
_MAX_CLOCK_PERCENT = 85.0
# Our defaults: others matter from 5 % utilization on, or, where the driver does not report that, from 1 GiB of memory.
_MIN_OTHERS_PERCENT = 5.0
_MIN_OTHERS_BYTES = 2**30


def held_down(run: RunMeasurements) -> list[Finding]:
    """Return what throttles the clocks: remarks, because that leaves no GPU idle."""
    gpu, found = run.gpu or GpuFacts(), []
    hot_percent, capped_percent = gpu.thermal_throttled_percent or 0.0, gpu.power_capped_percent or 0.0
    if hot_percent > _MIN_THERMAL_PERCENT:
        advice = (
            f"Heat throttled the clocks for {hot_percent:.0f} % of the time. Clear the air flow, or have the fans and "
            "the neighboring GPU checked. A lower power limit (nvidia-smi -pl) steadies the clocks."
        )
        found.append(_throttled(run, "thermal_throttling", {"thermal_throttled_percent": hot_percent}, advice))
    is_slow = (gpu.held_clock_percent or 100.0) < _MAX_CLOCK_PERCENT
    if capped_percent > _MIN_POWER_PERCENT and is_slow and (run.utilization_percent or 0.0) >= BUSY_PERCENT:
        advice = (
            f"The power limit throttled the clocks for {capped_percent:.0f} % of the time. Compare power.limit with "
            "power.max_limit (nvidia-smi -q -d POWER) and ask the administrator to raise it."
        )
        found.append(_throttled(run, "power_cap", {"power_capped_percent": capped_percent}, advice))
    return found


def _throttled(run: RunMeasurements, cause: Cause, throttled_percent: dict[str, float], advice: str) -> Finding:
    clock_percent = None if run.gpu is None else run.gpu.held_clock_percent
    (percent,) = throttled_percent.values()
    # A kernel takes longer in proportion to the clock. Without a clock, count all that throttling may have cost.
    slowed = (run.utilization_percent or 0.0) / 100 * (1 - (clock_percent or 0.0) / 100)
    clock = {} if clock_percent is None else {"held_clock_percent": clock_percent}
    basis: Literal["heuristic", "measured"] = "heuristic" if clock_percent is None else "measured"
    return counted(cause, percent / 100 * slowed, {**throttled_percent, **clock}, advice, basis)


def shared_gpu(run: RunMeasurements) -> Finding | None:
    """Return that other jobs compute on the same GPU, so that its utilization says nothing about this training."""
    gpu = run.gpu
    if gpu is None:
        return None
    percent, size = gpu.others_utilization_percent, gpu.others_memory_bytes
    if (size or 0) <= _MIN_OTHERS_BYTES if percent is None else percent <= _MIN_OTHERS_PERCENT:
        return None
    share = min((percent or 0.0) / 100, 1.0)
    evidence = {"others_utilization_percent": percent, "others_memory_bytes": size}
    pick = "FreeMemoryCUDAAccelerator(exclusive=True)" if run.has_trainer else "select_gpus(exclusive=True)"
    return Finding(
        cause="shared_gpu",
        share=share,
        ceiling=ceiling(share),
        ceiling_lower=1.0,
        evidence={name: value for name, value in evidence.items() if value is not None},
        advice=f"Use a free GPU (lightning-gpu-tools pick --exclusive, or {pick}), then measure again.",
    )
