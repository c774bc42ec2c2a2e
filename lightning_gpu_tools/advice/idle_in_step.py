"""How long the GPU is idle inside the training step, and how much of a busy one works. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_gpu_tools.advice.findings import BUSY_PERCENT, Finding
from lightning_gpu_tools.training.run_measurements import RunMeasurements

MIN_SHARE = 0.05  # torch's TensorBoard plugin, of the DataLoader: what costs less has no finding
_FEW_SMS_PERCENT = 50.0  # DCGM's guide: "likely" ineffective
_TINY_STEP_S = 0.005  # our default
CAVEAT_OF_LARGER_BATCH = " With a larger batch, scale the learning rate and compare the validation metric."


def part_of_idle(run: RunMeasurements, reason: str) -> float | None:
    """Return the share of the wall time that the GPU idles inside the step for a reason; ``None``: unknown."""
    in_step, idle_s = run.idle_in_step_share, run.profile.idle_s if run.profile is not None else {}
    total_s = sum(idle_s.values())
    return in_step * idle_s.get(reason, 0.0) / total_s if in_step is not None and total_s > 0 else None


def without_cause(run: RunMeasurements, found: Sequence[Finding]) -> float:
    """Return the fraction of the wall time that the GPU idles inside the step without a cause."""
    of_step = ("device_sync", "launch_bound", "slow_steps", "cpu_contention")
    named = sum(finding.share for finding in found if finding.cause in of_step)
    return max(0.0, (run.idle_in_step_share or 0.0) - named - (part_of_idle(run, "copy") or 0.0))


def is_tiny(run: RunMeasurements) -> bool:
    """Return whether the model is too small to gain from a GPU."""
    step_s = run.steady_step_s
    return run.on_gpu and step_s is not None and step_s < _TINY_STEP_S


def few_active_sms(run: RunMeasurements) -> float | None:
    """Return how many percent of the multiprocessors work, if few do although the GPU looks busy."""
    percent = None if run.gpu is None else run.gpu.sm_active_percent
    is_busy = (run.utilization_percent or 0.0) >= BUSY_PERCENT
    return percent if percent is not None and percent < _FEW_SMS_PERCENT and is_busy else None


def larger_batch(run: RunMeasurements) -> str:
    """Return which batch size to set; empty if there is no room for twice as much."""
    batch_size = run.loader.batch_size if run.loader is not None else None
    fits = run.largest_batch_size
    if fits is None or not batch_size:
        return "a larger batch_size"
    if fits < 2 * batch_size:
        return ""
    doubled = batch_size * 2 ** ((fits // batch_size).bit_length() - 1)
    return f"batch_size={doubled} (now {batch_size}; up to {fits} fit by measured memory)"


def wants_profile(run: RunMeasurements) -> bool:
    """Return whether profiling the step would show what nothing else can."""
    in_step = run.idle_in_step_share
    if run.profile is not None or in_step is None or is_tiny(run):
        return False
    between = max(run.idle_by_phase().values(), default=0.0)
    return few_active_sms(run) is not None or (in_step >= MIN_SHARE and in_step > between)
