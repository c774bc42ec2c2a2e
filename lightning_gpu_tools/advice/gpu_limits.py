"""What slows a busy GPU down: heat, the power limit, other jobs."""

from __future__ import annotations

from dataclasses import replace

from lightning_gpu_tools.advice.findings import BUSY_PERCENT, Basis, Finding, counted
from lightning_gpu_tools.training.run_measurements import GpuFacts, RunMeasurements

# Our defaults.
_MIN_THERMAL_PERCENT = 5.0  # of the time
# Reaching the power limit is normal at full load, but not for so long and with clocks so far below the highest one.
_MIN_POWER_PERCENT = 50.0
_MAX_CLOCK_PERCENT = 85.0
_MIN_OTHERS_PERCENT = 5.0  # utilization, or where the driver does not report that:
_MIN_OTHERS_BYTES = 2**30


def held_down(run: RunMeasurements) -> list[Finding]:
    """Return what throttles the clocks: remarks, because that leaves no GPU idle."""
    gpu, found = run.gpu or GpuFacts(), []
    busy_percent, clock_percent = run.utilization_percent or 0.0, gpu.held_clock_percent
    # A kernel takes longer in proportion to the clock. Without a clock, count all that throttling may have cost.
    slowed = busy_percent / 100 * (1 - (clock_percent or 0.0) / 100)
    basis: Basis = "heuristic" if clock_percent is None else "measured"
    hot_percent, capped_percent = gpu.thermal_throttled_percent or 0.0, gpu.power_capped_percent or 0.0
    if hot_percent > _MIN_THERMAL_PERCENT:
        advice = (
            f"Heat throttled the clocks for {hot_percent:.0f} % of the time. Have the air flow, the fans and the "
            "neighboring GPU checked. A lower power limit (nvidia-smi -pl) steadies the clocks."
        )
        evidence = {"thermal_throttled_percent": hot_percent, "held_clock_percent": clock_percent}
        found.append(counted("thermal_throttling", hot_percent / 100 * slowed, evidence, advice, basis))
    is_slow = clock_percent is not None and clock_percent < _MAX_CLOCK_PERCENT
    if capped_percent > _MIN_POWER_PERCENT and is_slow and busy_percent >= BUSY_PERCENT:
        advice = (
            f"The power limit throttled the clocks for {capped_percent:.0f} % of the time. Ask the administrator to "
            "raise power.limit, at most to power.max_limit (nvidia-smi -q -d POWER)."
        )
        evidence = {"power_capped_percent": capped_percent, "held_clock_percent": clock_percent}
        found.append(counted("power_cap", capped_percent / 100 * slowed, evidence, advice, basis))
    return found


def shared_gpu(run: RunMeasurements) -> Finding | None:
    """Return that other jobs compute on the same GPU."""
    gpu = run.gpu
    if gpu is None:
        return None
    percent, size = gpu.others_utilization_percent, gpu.others_memory_bytes
    if (size or 0) <= _MIN_OTHERS_BYTES if percent is None else percent <= _MIN_OTHERS_PERCENT:
        return None
    pick = "FreeMemoryCUDAAccelerator(exclusive=True)" if run.has_trainer else "select_gpus(exclusive=True)"
    finding = counted(
        "shared_gpu",
        min((percent or 0.0) / 100, 1.0),
        {"others_utilization_percent": percent, "others_memory_bytes": size},
        f"Use a free GPU (lightning-gpu-tools pick --exclusive, or {pick}), then measure again.",
    )
    return replace(finding, ceiling_lower=1.0)
