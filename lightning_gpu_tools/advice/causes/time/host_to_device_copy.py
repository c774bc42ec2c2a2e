"""host_to_device_copy: the GPU waits for batches to be copied; on the CPU, transfer hooks take long.

On a GPU, only time during which the GPU was idle counts, by CUDA events around sampled steps. On the CPU, all time in
the transfer hooks counts.
"""

from __future__ import annotations

from collections.abc import Iterator

from lightning_gpu_tools.advice.examples import COPIES, gpu_run, sampled_idle
from lightning_gpu_tools.advice.findings import Cause, Finding
from lightning_gpu_tools.advice.lost_time import MIN_SHARE, idle_share, lost_in, lost_share, lost_time, phases_of
from lightning_gpu_tools.training.run_measurements import COPY, RunMeasurements

_BEGINS = "Moving batches to the device takes"


def find(run: RunMeasurements) -> Iterator[Finding]:
    if not run.on_gpu:
        hooks = "the transfer hooks faster (transfer_batch_to_device, on_after_batch_transfer), or do their"
        advice = f"Make {hooks if run.has_trainer else 'moving the batch faster, or do that'} work in the dataset, "
        for phase in phases_of(run, COPY):
            yield lost_in(run, phase, begins=_BEGINS, advice=f"{advice}where workers run it in parallel.")
        return
    share = 0.0 if run.gpu_idle is None else min(lost_share(run, COPY), idle_share(run))
    if share < MIN_SHARE:
        return
    yield lost_time(
        run,
        share,
        begins=_BEGINS,
        advice=_advice(run),
        phase=COPY,
        evidence={"batch_bytes": run.batch_bytes or None},
        lines=[COPY],
    )


def _advice(run: RunMeasurements) -> str:
    if run.loader is not None and not run.loader.pin_memory:
        by_itself, by_hand = (
            ("Lightning", "transfer_batch_to_device") if run.has_trainer else ("Fabric", "batch.to(device)")
        )
        return (
            "Set DataLoader(pin_memory=True) (now False): the GPU copies page-locked memory in the background. "
            f"{by_itself} passes non_blocking=True; your own {by_hand} must do so as well."
        )
    hook = " in on_after_batch_transfer" if run.has_trainer else ""
    return f"Copy less: send images as uint8 and convert them on the GPU{hook}."


CAUSE = Cause(
    says="Moving batches to the device takes ...",
    change="`pin_memory=True`; `uint8` images",
    find=find,
    settings=("pin_memory",),
    verified_on="hardware",
    sick=gpu_run(**COPIES),
    healthy=gpu_run(**{**COPIES, "utilization": 97.0, "gpu_idle": sampled_idle(host_to_device_copy=(20.0, 0.5))}),
)
