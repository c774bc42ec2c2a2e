"""The GPU's idle time inside the training step, and the active part of a busy GPU. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from lightning_gpu_tools.advice.findings import BUSY_PERCENT
from lightning_gpu_tools.advice.idle_time import busy_percent, idle_in_step_share, idle_share
from lightning_gpu_tools.advice.lines import MIN_SAMPLES
from lightning_gpu_tools.training.phases import (
    HOST_TO_DEVICE_COPY,
    IN_WORKER,
    PAUSES,
    RANK_WAIT,
    TRAINING_STEP,
    VALIDATION,
    base_phase,
)
from lightning_gpu_tools.training.run_measurements import RunMeasurements, SourceLine

MIN_SHARE = 0.05  # torch's TensorBoard plugin, for the DataLoader: a smaller share is not reported
_FEW_SMS_PERCENT = 50.0  # DCGM's guide: "likely" ineffective
# Our defaults.
_TINY_STEP_S = 0.005  # a model with shorter steps, and
_TINY_GPU_S = 0.0005  # less GPU work per step, is too small for a GPU: about a hundred of the shortest kernels
_MIN_SYNCS_PER_STEP = 0.5  # rarer waits do not affect the steps in between
_SLOW_LAUNCH_S = 100e-6  # per operation; 10 to 50 us are usual, including the Python code around it
_NOT_IN_STEP = (HOST_TO_DEVICE_COPY, RANK_WAIT, *PAUSES)


class IdleInStep(NamedTuple):
    """Reasons why the GPU waits inside the training step, as shares of the wall time."""

    syncs: float  # the host continues only after it has waited for the GPU
    launches: float  # the host launches kernels more slowly than they run
    host_work: float  # the host does something else


def syncs_in_step(run: RunMeasurements) -> list[SourceLine]:
    """Return the lines of the training step that wait for the GPU, most frequent first."""
    found = () if run.watched is None else run.watched.syncs
    return [line for line in found if base_phase(line.phase) not in _NOT_IN_STEP]


def idle_in_step(run: RunMeasurements) -> IdleInStep | None:
    """Return what the GPU waits for inside the training step; ``None`` if unknown."""
    in_step, watched = idle_in_step_share(run), run.watched
    if in_step is None or watched is None:
        return None
    by_syncs = 0.0
    syncs = syncs_in_step(run)
    if sum(line.samples for line in syncs) >= _MIN_SYNCS_PER_STEP * watched.steps:
        # While the GPU is idle, the host does not wait for it. So without syncs, a step would still take at least the
        # GPU's idle time, and at least its busy time.
        busy = 1 - idle_share(run) - run.phase_s.get(VALIDATION, 0.0) / run.wall_s
        by_syncs = min(in_step, max(0.0, busy), _share_of_lines(run, syncs))
    rest = in_step - by_syncs
    host_s = sum(seconds for phase, seconds in run.phase_s.items() if base_phase(phase) == TRAINING_STEP) / run.steps
    launches = host_s - by_syncs * run.step_s <= watched.operations * _SLOW_LAUNCH_S
    return IdleInStep(by_syncs, rest if launches else 0.0, 0.0 if launches else rest)


def _share_of_lines(run: RunMeasurements, lines: Sequence[SourceLine]) -> float:
    """Return the share of samples of the training thread at these lines; 1 if there are too few samples."""
    sampled = [line for line in run.lines if line.phase != IN_WORKER]
    count = sum(line.samples for line in sampled)
    places = {(line.file, line.line) for line in lines}
    at_lines = sum(line.samples for line in sampled if (line.file, line.line) in places)
    return at_lines / count if count >= MIN_SAMPLES else 1.0


def is_tiny(run: RunMeasurements) -> bool:
    """Return whether the model is too small to gain from a GPU: its steps hardly use the GPU."""
    percent = run.utilization_percent
    if not run.on_gpu or not run.blocks or percent is None:
        return False
    step_s = median(block.step_s for block in run.blocks)
    return step_s < _TINY_STEP_S and step_s * percent / 100 < _TINY_GPU_S


def few_active_sms(run: RunMeasurements) -> float | None:
    """Return the percentage of active multiprocessors, if it is low although the GPU looks busy."""
    percent = None if run.gpu is None else run.gpu.sm_active_percent
    is_busy = (busy_percent(run) or 0.0) >= BUSY_PERCENT
    return percent if percent is not None and percent < _FEW_SMS_PERCENT and is_busy else None


def caveat_of_larger_batch(run: RunMeasurements) -> str:
    """Return what a larger batch changes, after a space; empty if nothing is trained."""
    change = " With a larger batch, scale the learning rate and compare the validation metric."
    return change if run.stage == "fit" else ""


def larger_batch(run: RunMeasurements) -> str:
    """Return the batch size to set; empty if twice the current size does not fit."""
    batch_size = run.loader.batch_size if run.loader is not None else None
    fits = run.largest_batch_size
    if fits is None or not batch_size:
        return "a larger batch_size"
    if fits < 2 * batch_size:
        return ""
    doubled = batch_size * 2 ** ((fits // batch_size).bit_length() - 1)
    return f"batch_size={doubled} (now {batch_size}; up to {fits} fit, based on measured memory)"
