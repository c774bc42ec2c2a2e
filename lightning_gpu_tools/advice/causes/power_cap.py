"""power_cap: the driver lowers the clocks of a busy GPU at its power limit."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_gpu_tools.advice.cause import Cause, Shape
from lightning_gpu_tools.advice.examples import STEP, gpu_run
from lightning_gpu_tools.advice.findings import BUSY_PERCENT, Finding, counted
from lightning_gpu_tools.training.run_measurements import GpuFacts, RunMeasurements

# Our defaults: reaching the limit is normal at full load, but not for this long with clocks this far below the highest.
_MIN_PERCENT = 50.0
_MAX_CLOCK_PERCENT = 85.0


def find(run: RunMeasurements) -> Iterator[Finding]:
    gpu, busy_percent = run.gpu or GpuFacts(), run.utilization_percent or 0.0
    capped_percent, clock_percent = gpu.power_capped_percent, gpu.held_clock_percent
    if capped_percent is None or clock_percent is None or busy_percent < BUSY_PERCENT:
        return
    if capped_percent <= _MIN_PERCENT or clock_percent >= _MAX_CLOCK_PERCENT:
        return
    advice = (
        f"The power limit throttled the clocks for {capped_percent:.0f} % of the time. Ask the administrator to raise "
        "power.limit, at most to power.max_limit (nvidia-smi -q -d POWER)."
    )
    evidence = {"power_capped_percent": capped_percent, "held_clock_percent": clock_percent}
    share = capped_percent / 100 * busy_percent / 100 * (1 - clock_percent / 100)
    yield counted("power_cap", share, evidence, advice)


CAUSE = Cause(
    name="power_cap",
    begins="Throttling at the power limit costs",
    shapes=[
        Shape(
            "Throttling at the power limit costs ...",
            "the power limit. It slows a busy GPU down and never leaves it idle",
        )
    ],
    find=find,
    needs=("gpu.power_capped_percent", "gpu.held_clock_percent"),
    is_remark=True,
    verified_on="measurements",
    sick=gpu_run(STEP, 99.0, gpu=GpuFacts(power_capped_percent=90.0, held_clock_percent=70.0)),
    healthy=gpu_run(STEP, 99.0, gpu=GpuFacts(power_capped_percent=90.0, held_clock_percent=95.0)),
)
