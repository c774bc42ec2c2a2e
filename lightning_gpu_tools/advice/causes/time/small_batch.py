"""small_batch: kernels use few of the GPU's multiprocessors, and a larger batch fits.

The driver's counter of active multiprocessors (GPM, on Hopper and later) is low while the GPU looks busy. The batch
size that fits is computed from the memory of recorded steps.
"""

from lightning_gpu_tools.advice.findings import Cause, Findings
from lightning_gpu_tools.advice.lost_time import few_active_sms, larger_batch, lost_time
from lightning_gpu_tools.training.run_measurements import VALIDATION, RunMeasurements


def find(run: RunMeasurements) -> Findings:
    active_percent, larger = few_active_sms(run), larger_batch(run)
    if active_percent is None or not larger:
        return
    idle = ((run.utilization_percent or 0.0) - active_percent) / 100
    share = idle * (1 - run.phase_s.get(VALIDATION, 0.0) / run.wall_s)
    begins = "A batch too small to fill the GPU costs"
    advice = f"The kernels fill {active_percent:.0f}% of the GPU. Set {larger}"
    detail = f"{active_percent:.0f}% of the multiprocessors are active"
    yield lost_time(run, share, begins, advice, detail=detail, basis="heuristic")


CAUSE = Cause(
    says="A batch too small to fill the GPU costs ...",
    change="the `batch_size` in the advice, which fits according to measured memory",
    find=find,
    settings=("batch_size",),
    verified_on="hardware",
)
