"""shared_gpu: other jobs compute on the same GPU, so its utilization says nothing about this run.

Reads the driver's utilization by process: no other cause is judged then. Without it, other jobs with much memory may be
idle, so all causes are judged, but a busy GPU does not mean a healthy run.
"""

from __future__ import annotations

from collections.abc import Iterator

from lightning_gpu_tools.advice.examples import GIB, WAITS, gpu_run
from lightning_gpu_tools.advice.findings import Cause, Finding, ceiling, known
from lightning_gpu_tools.gpus.metrics import GpuWindow
from lightning_gpu_tools.training.run_measurements import RunMeasurements
from lightning_gpu_tools.units import format_bytes

# Our defaults.
_MIN_PERCENT = 10.0  # utilization by other jobs: with less, the times of this run still hold
_MIN_BYTES = 2**30  # memory of other jobs, if the driver does not report their utilization


def find(run: RunMeasurements) -> Iterator[Finding]:
    gpu = run.gpu
    if gpu is None:
        return
    percent, size = gpu.others_utilization_percent, gpu.others_memory_bytes
    if (size or 0) <= _MIN_BYTES if percent is None else percent <= _MIN_PERCENT:
        return
    memory = "" if size is None else f"use {format_bytes(size)} of the GPU's memory"
    uses = f"keep the GPU {percent or 0.0:.0f}% busy{memory and f' and {memory}'}"
    why = f"Other jobs {uses}, so its utilization says nothing about this run."
    if percent is None:
        unknown = "The driver does not report whether they compute, so its utilization may be theirs."
        why = f"Other jobs {memory}. {unknown}"
    pick = "FreeMemoryCUDAAccelerator(exclusive=True)" if run.has_trainer else "select_gpus(exclusive=True)"
    share = min((percent or 0.0) / 100, 1.0)
    yield Finding(
        cause="",
        share=share,
        ceiling=ceiling(share),
        evidence=known({"others_utilization_percent": percent, "others_memory_bytes": size}),
        why=why,
        advice=f"Use a free GPU (lightning-gpu-tools pick --exclusive, or {pick}), then measure again.",
    )


CAUSE = Cause(
    says="Other jobs keep the GPU ... busy",
    change="use a free one: `lightning-gpu-tools pick --exclusive`",
    find=find,
    kind="others",
    verified_on="hardware",
    sick=gpu_run(WAITS, 30.0, gpu=GpuWindow(others_utilization_percent=40.0, others_memory_bytes=3 * GIB)),
    healthy=gpu_run(WAITS, 30.0, gpu=GpuWindow(others_utilization_percent=1.0, others_memory_bytes=3 * GIB)),
)
