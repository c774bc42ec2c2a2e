"""shared_gpu: other jobs compute on the same GPU, so its utilization says nothing about this run.

Reads the driver's utilization by process: no other cause is judged then. Without it, other jobs with much memory may be
idle, so all causes are judged, but a busy GPU does not mean a healthy run.
"""

from lightning_gpu_tools.advice.findings import Cause, Finding, Findings, ceiling
from lightning_gpu_tools.training.run_measurements import RunMeasurements
from lightning_gpu_tools.units import format_bytes

# Our defaults.
_MIN_PERCENT = 10.0  # utilization by other jobs: with less, the times of this run still hold
_MIN_BYTES = 2**30  # memory of other jobs, if the driver does not report their utilization


def find(run: RunMeasurements) -> Findings:
    percent, size = run.gpu.others_utilization_percent, run.gpu.others_memory_bytes or 0
    if size <= _MIN_BYTES if percent is None else percent <= _MIN_PERCENT:
        return
    unknown = "and the driver does not report whether they compute, so its utilization may be theirs"
    why = f"Other jobs use {format_bytes(size)} of the GPU's memory, {unknown}."
    if percent is not None:
        why = f"Other jobs keep the GPU {percent:.0f}% busy, so its utilization says nothing about this run."
    pick = "FreeMemoryCUDAAccelerator(exclusive=True)" if run.has_trainer else "select_gpus(exclusive=True)"
    advice = f"Use a free GPU (lightning-gpu-tools pick --exclusive, or {pick}), then measure again."
    share = min((percent or 0.0) / 100, 1.0)
    yield Finding(cause="", share=share, ceiling=ceiling(share), why=why, advice=advice)


CAUSE = Cause(
    says="Other jobs keep the GPU ... busy",
    change="use a free one: `lightning-gpu-tools pick --exclusive`",
    find=find,
    kind="others",
    verified_on="hardware",
)
