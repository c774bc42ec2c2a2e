"""device_sync: the host waits for the GPU inside the step, and the GPU has nothing to do when it goes on."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_gpu_tools.advice.cause import Cause, Shape
from lightning_gpu_tools.advice.examples import STEP, gpu_run, profiled
from lightning_gpu_tools.advice.findings import Finding, counted
from lightning_gpu_tools.advice.idle_in_step import MIN_SHARE, part_of_idle
from lightning_gpu_tools.training.run_measurements import RunMeasurements

_LOG_WITHOUT_SYNC = " Pass the tensor itself to self.log; prog_bar=True syncs each time the bar is drawn."


def find(run: RunMeasurements) -> Iterator[Finding]:
    profile = run.profile
    if profile is None or not run.on_gpu or profile.syncs_per_step < 1:
        return
    traced = part_of_idle(run, "sync")
    # Where no GPU was traced, all of the idle time may be due to it.
    share = (run.idle_in_step_share or 0.0) if traced is None else traced
    if share < MIN_SHARE:
        return
    lines = ", ".join(profile.sync_lines)
    evidence = {
        "ms_per_step": share * run.step_s * 1e3,
        "syncs_per_step": profile.syncs_per_step,
        "source_lines": lines or None,
    }
    advice = (
        f"The host syncs with the GPU {profile.syncs_per_step:.3g}x per step{lines and f' at {lines}'}. Remove "
        f".item(), float(), print and .cpu() there, or call them every 50 steps."
        f"{_LOG_WITHOUT_SYNC if run.has_trainer else ''}"
    )
    yield counted("device_sync", share, evidence, advice, "heuristic" if traced is None else "measured")


CAUSE = Cause(
    name="device_sync",
    begins="Waiting for GPU results inside the training step takes",
    shapes=[
        Shape(
            "Waiting for GPU results inside the training step, with the source line (`profile=True`)",
            "remove `.item()`, `print(tensor)`, `.cpu()` there",
        )
    ],
    find=find,
    needs=("profile",),
    verified_on="measurements",
    sick=gpu_run(
        STEP,
        50.0,
        **profiled(syncs_per_step=2.0, sync_lines=("train.py:42",), idle_s={"sync": 0.09, "launch": 0.01}),
    ),
    healthy=gpu_run(STEP, 97.0, **profiled(syncs_per_step=2.0, sync_lines=("train.py:42",), idle_s={"sync": 0.09})),
)
