"""thermal_throttling: heat lowers the clocks of a busy GPU.

Reads the driver's throttling reasons and clocks. Kernels are assumed to slow down in proportion to the clock.
"""

from lightning_gpu_tools.advice.findings import Cause, Findings
from lightning_gpu_tools.advice.lost_time import lost_time
from lightning_gpu_tools.training.run_measurements import RunMeasurements

_MIN_PERCENT = 5.0  # our default: of the time


def find(run: RunMeasurements) -> Findings:
    hot_percent, clock_percent = run.gpu.thermal_throttled_percent, run.gpu.held_clock_percent
    if hot_percent is None or clock_percent is None or hot_percent <= _MIN_PERCENT:
        return
    share = hot_percent / 100 * (run.utilization_percent or 0.0) / 100 * (1 - clock_percent / 100)
    advice = (
        f"Heat throttled the clocks for {hot_percent:.0f}% of the time. Check the air flow, the fans and the "
        "neighboring GPU. A lower power limit (nvidia-smi -pl) steadies the clocks."
    )
    yield lost_time(run, share, "Thermal throttling costs", advice)


CAUSE = Cause(
    says="Thermal throttling costs ...",
    change="cool it better. Throttling slows a busy GPU down but never leaves it idle",
    find=find,
    kind="remark",
)
