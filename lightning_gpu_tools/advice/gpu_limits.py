"""What slows a working GPU down from outside: heat, the power limit, other people's processes."""

from __future__ import annotations

from lightning_gpu_tools.advice.findings import Finding, ceiling, counted
from lightning_gpu_tools.training.run_measurements import RunMeasurements
from lightning_gpu_tools.units import format_bytes

# A choice: clocks held down by heat for less than 5 % of the time cost too little to be named.
_MIN_THERMAL_PERCENT = 5.0
# At full load the power limit is reached as a rule. It is named where it holds for half of the time, costs 15 % of the
# highest clock and the GPU is busy for 80 % of the time: a choice.
_MIN_POWER_PERCENT = 50.0
_MAX_CLOCK_PERCENT = 85.0
_BUSY_PERCENT = 80.0
# A choice: others disturb from 5 % utilization on, or, where nobody tells that, with 1 GiB of memory.
_OTHERS_PERCENT = 5.0
_OTHERS_BYTES = 2**30


def held_down(run: RunMeasurements) -> list[Finding]:
    """Return what holds the clocks down: remarks, for they are no reason to be idle."""
    gpu = run.gpu
    if gpu is None:
        return []
    busy = (run.utilization_percent or 0.0) / 100
    # A kernel takes as much longer as the clock is lower; without a clock, all that the throttling may have taken.
    clock_percent = gpu.held_clock_percent
    slowed = busy if clock_percent is None else busy * (1 - clock_percent / 100)
    clock: dict[str, float | str] = {} if clock_percent is None else {"held_clock_percent": clock_percent}
    found = []
    if (gpu.thermal_throttled_percent or 0.0) > _MIN_THERMAL_PERCENT:
        assert gpu.thermal_throttled_percent is not None
        throttled = gpu.thermal_throttled_percent / 100
        share = throttled * slowed
        found.append(
            counted(
                "thermal_throttling",
                share,
                evidence={"thermal_throttled_percent": gpu.thermal_throttled_percent, **clock},
                advice=f"Heat held the clocks down for {gpu.thermal_throttled_percent:.0f} % of the time: clear the "
                "air flow, or have the fans or the neighbouring GPU looked at; a lower power limit (nvidia-smi -pl) "
                "makes the clocks steady.",
                basis="heuristic" if clock_percent is None else "measured",
            )
        )
    if (
        (gpu.power_capped_percent or 0.0) > _MIN_POWER_PERCENT
        and clock_percent is not None
        and clock_percent < _MAX_CLOCK_PERCENT
        and (run.utilization_percent or 0.0) >= _BUSY_PERCENT
    ):
        assert gpu.power_capped_percent is not None
        share = gpu.power_capped_percent / 100 * slowed
        found.append(
            counted(
                "power_cap",
                share,
                evidence={"power_capped_percent": gpu.power_capped_percent, **clock},
                advice=f"The power limit held the clocks down for {gpu.power_capped_percent:.0f} % of the time: "
                "compare power.limit with power.max_limit (nvidia-smi -q -d POWER) and ask the administrator to raise "
                "it.",
            )
        )
    return found


def shared_gpu(run: RunMeasurements) -> Finding | None:
    """Return that other people compute on the same GPU, so that its utilization says nothing of this training."""
    gpu = run.gpu
    if gpu is None:
        return None
    percent, size = gpu.others_utilization_percent, gpu.others_memory_bytes
    if percent is not None:
        if percent <= _OTHERS_PERCENT:
            return None
        says = f"Others keep the GPU {percent:.0f} % busy"
    elif size is not None and size > _OTHERS_BYTES:
        says = "Others use the GPU"
    else:
        return None
    evidence: dict[str, float | str] = {}
    if percent is not None:
        evidence["others_utilization_percent"] = percent
    if size is not None:
        evidence["others_memory_bytes"] = size
        says += f" and {format_bytes(size)} of its memory"
    share = min((percent or 0.0) / 100, 1.0)
    return Finding(
        cause="shared_gpu",
        share=share,
        ceiling=ceiling(share),
        ceiling_lower=1.0,
        evidence=evidence,
        advice=f"{says}: take a free one (lightning-gpu-tools pick --exclusive, or FreeMemoryCUDAAccelerator("
        "exclusive=True)), then measure again.",
    )
