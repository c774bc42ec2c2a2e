"""launch_bound: the host launches kernels more slowly than the GPU runs them."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_gpu_tools.advice.cause import Cause, Shape
from lightning_gpu_tools.advice.examples import STEP, gpu_run, profiled
from lightning_gpu_tools.advice.findings import Finding, counted
from lightning_gpu_tools.advice.idle_in_step import CAVEAT_OF_LARGER_BATCH, is_tiny, larger_batch, part_of_idle
from lightning_gpu_tools.training.run_measurements import RunMeasurements

_MIN_SHARE = 0.15  # our default: a well-fed GPU has some gaps, too
_SHORT_KERNEL_US = 20.0  # our default: twice what a launch takes the host


def find(run: RunMeasurements) -> Iterator[Finding]:
    if not run.on_gpu:
        return
    profile, tiny = run.profile, is_tiny(run)
    traced = part_of_idle(run, "launch")
    kernel_us = None if profile is None else profile.kernel_median_us
    is_short = kernel_us is not None and kernel_us < _SHORT_KERNEL_US
    share = (run.idle_in_step_share or 0.0) if tiny and traced is None else traced or 0.0
    if share < _MIN_SHARE or not (is_short or tiny):
        return
    evidence = {
        "ms_per_step": share * run.step_s * 1e3,
        "step_ms": run.step_s * 1e3,
        "kernel_median_us": kernel_us,
        "kernels_per_step": None if profile is None else profile.kernels_per_step or None,
    }
    larger = larger_batch(run)
    if tiny:
        larger = larger or "a larger batch_size"
        advice = f"The model is too small for this GPU. Set {larger}, or train on the CPU.{CAVEAT_OF_LARGER_BATCH}"
    else:
        advice = (
            "The host launches kernels more slowly than the GPU runs them. Use torch.compile(model, "
            "mode='reduce-overhead') (CUDA graphs), a fused optimizer (AdamW(..., fused=True))"
            + (f", or {larger}.{CAVEAT_OF_LARGER_BATCH}" if larger else ".")
        )
    yield counted("launch_bound", share, evidence, advice, "heuristic" if traced is None else "measured")


CAUSE = Cause(
    name="launch_bound",
    begins="Launching many small kernels takes",
    shapes=[
        Shape(
            "Launching many small kernels takes ...",
            "`torch.compile`, a fused optimizer, a larger batch; train a very small model on the CPU",
        )
    ],
    find=find,
    verified_on="measurements",
    sick=gpu_run(STEP, 40.0, **profiled(kernel_median_us=6.0, idle_s={"launch": 0.1})),
    healthy=gpu_run(STEP, 97.0, **profiled(kernel_median_us=6.0, idle_s={"launch": 0.1})),
)
