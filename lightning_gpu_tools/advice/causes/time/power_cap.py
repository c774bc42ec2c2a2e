"""power_cap: the driver lowers the clocks of a busy GPU at its power limit.

Reads the driver's throttling reasons and clocks while the GPU is busy. A GPU at its highest possible limit is not
reported, because nothing can be changed.
"""

from lightning_gpu_tools.advice.findings import Cause, Findings
from lightning_gpu_tools.advice.lost_time import BUSY_PERCENT, lost_time
from lightning_gpu_tools.training.run_measurements import RunMeasurements

# Our defaults. Reaching the limit is normal at full load, but not for this long with clocks this far below the highest.
_MIN_PERCENT = 50.0  # of the time
_MAX_CLOCK_PERCENT = 85.0  # of the highest clock


def find(run: RunMeasurements) -> Findings:
    gpu, busy_percent = run.gpu, run.utilization_percent or 0.0
    capped_percent, clock_percent = gpu.power_capped_percent, gpu.held_clock_percent
    limit_watts, max_watts = gpu.power_limit_watts, gpu.power_limit_watts_max
    if capped_percent is None or clock_percent is None or busy_percent < BUSY_PERCENT:
        return
    # An H100 ships with its highest limit; dense matrix products reach it, and nothing can be changed.
    if limit_watts is None or max_watts is None or limit_watts >= max_watts:
        return
    if capped_percent <= _MIN_PERCENT or clock_percent >= _MAX_CLOCK_PERCENT:
        return
    advice = (
        f"The power limit of {limit_watts:.0f} W throttled the clocks for {capped_percent:.0f}% of the time. Ask the "
        f"administrator to raise it: sudo nvidia-smi -pl {max_watts:.0f} sets the highest limit of this GPU."
    )
    share = capped_percent / 100 * busy_percent / 100 * (1 - clock_percent / 100)
    yield lost_time(run, share, "Throttling at the power limit costs", advice)


CAUSE = Cause(
    says="Throttling at the power limit costs ...",
    change="raise the power limit. Throttling slows a busy GPU down but never leaves it idle",
    find=find,
    kind="remark",
)
