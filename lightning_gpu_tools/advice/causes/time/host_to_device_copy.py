"""host_to_device_copy: the GPU waits for batches to be copied; on the CPU, transfer hooks take long.

On a GPU, only time during which the GPU was idle counts, by CUDA events around sampled steps. On the CPU, all time in
the transfer hooks counts.
"""

from lightning_gpu_tools.advice.findings import Cause, Findings
from lightning_gpu_tools.advice.lost_time import MIN_SHARE, idle_share, lost_share, lost_time
from lightning_gpu_tools.training.run_measurements import COPY, RunMeasurements


def find(run: RunMeasurements) -> Findings:
    share = min(lost_share(run, COPY), idle_share(run))
    if share < MIN_SHARE or (run.on_gpu and run.gpu_idle is None):
        return
    advice = "Copy less: send images as uint8 and convert them on the GPU."
    if not run.on_gpu:
        advice = "Make moving the batch faster, or do that work in the dataset, where workers run it in parallel."
    elif run.loader is not None and not run.loader.pin_memory:
        advice = (
            "Set DataLoader(pin_memory=True) (now False): the GPU copies page-locked memory in the background. Pass "
            "non_blocking=True where your own code moves the batch."
        )
    yield lost_time(run, share, "Moving batches to the device takes", advice, phase=COPY, has_lines=True)


CAUSE = Cause(
    says="Moving batches to the device takes ...",
    change="`pin_memory=True`; `uint8` images",
    find=find,
    settings=("pin_memory",),
    verified_on="hardware",
)
