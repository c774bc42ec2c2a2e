"""How long the GPU was idle, and in which phases of the host, by the driver's utilization and by the GPU's own events.

Pure. Shares are fractions of the wall time.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from lightning_gpu_tools.training.phases import (
    HOST_TO_DEVICE_COPY,
    RANK_WAIT,
    TRAINING_STEP,
    VALIDATION,
    base_phase,
)
from lightning_gpu_tools.training.run_measurements import RunMeasurements, StepBlock

# Our defaults.
_MIN_SAMPLES = 5  # of a phase, to measure the GPU's idle time in it; with fewer, the whole phase counts as idle
_MAX_UNSETTLED_SHARE = 0.25  # of all blocks
# The share of gaps between kernels in the time between events. Compared with torch.profiler on an H200, it was 3 to 6%
# for ResNet-50 and GPT-2, and 33% with hundreds of tiny kernels, whose little work hardly uses the GPU.
_GAPS = 0.1
_UNSETTLED = 1.10  # first blocks count as warm-up if this much slower: monitoring tools let windows differ by 10%


def idle_share(run: RunMeasurements) -> float:
    """Return the share in which this rank's GPU was idle outside validation; 1 if unknown."""
    if run.utilization_percent is None:
        return 1.0
    percent = run.utilization_percent if run.own_utilization_percent is None else run.own_utilization_percent
    training = 1 - run.phase_s.get(VALIDATION, 0.0) / run.wall_s
    return min((1 - percent / 100) * training, max(0.0, training - worked_share(run)))


def worked_share(run: RunMeasurements) -> float:
    """Return a lower bound on the share in which this rank's GPU worked, by its events; 0 if unknown.

    The driver's utilization lags. In a run of 3.5 s on an H200 it was 51%, and by these events 84%.
    """
    if run.gpu_idle is None or not run.steps:
        return 0.0
    return min(1.0, (1 - _GAPS) * sum(run.gpu_idle.work_s.values()) / run.step_s)


def busy_percent(run: RunMeasurements) -> float | None:
    """Return the larger of the driver's mean utilization and, with one rank, the work by the GPU's own events."""
    if run.utilization_percent is None or len(run.ranks) > 1:
        return run.utilization_percent
    return max(run.utilization_percent, 100 * worked_share(run))


def exposed_share(run: RunMeasurements, phase: str) -> float:
    """Return the fraction of a phase in which the GPU was idle; 1 if not measured."""
    idle = run.gpu_idle
    if idle is None or idle.seen.get(phase, 0) < _MIN_SAMPLES or idle.host_s.get(phase, 0.0) <= 0:
        return 1.0
    return min(1.0, idle.idle_s.get(phase, 0.0) / idle.host_s[phase])


def lost_share(run: RunMeasurements, phase: str) -> float:
    """Return the share in which the GPU was idle in a phase."""
    idle = run.gpu_idle
    if phase == HOST_TO_DEVICE_COPY and idle is not None and idle.samples >= _MIN_SAMPLES:
        # Scaled by steps, not by the host's time, because the host may be far ahead of the GPU's copies.
        return idle.idle_s.get(HOST_TO_DEVICE_COPY, 0.0) / idle.samples * run.steps / run.wall_s
    return exposed_share(run, phase) * run.phase_s.get(phase, 0.0) / run.wall_s


def idle_by_phase(run: RunMeasurements) -> dict[str, float]:
    """Return ``lost_share`` for each phase outside the training step. A GPU that waits for other ranks is busy."""
    busy = (TRAINING_STEP, VALIDATION, RANK_WAIT)
    outside = {phase for phase in run.phase_s if base_phase(phase) not in busy}
    shares = {phase: lost_share(run, phase) for phase in sorted({*outside, HOST_TO_DEVICE_COPY})}
    return {phase: share for phase, share in shares.items() if share > 0}


def idle_in_step_share(run: RunMeasurements) -> float | None:
    """Return the share in which the GPU was idle inside the training step; ``None`` if unknown.

    It is a lower bound if the GPU's own times were not measured, because phases outside the step then count in full.
    """
    if not run.on_gpu or run.utilization_percent is None:
        return None
    return max(0.0, idle_share(run) - sum(idle_by_phase(run).values()))


def idle_residual(run: RunMeasurements) -> float:
    """Return how much the phases' idle times exceed the driver's idle time."""
    if run.gpu_idle is None or run.utilization_percent is None:
        return 0.0
    return max(0.0, sum(idle_by_phase(run).values()) - idle_share(run))


def without_warm_up(blocks: Sequence[StepBlock]) -> Sequence[StepBlock]:
    """Drop the first blocks, in which training was still getting faster."""
    times = [block.step_s for block in blocks]
    first = 0
    while first + 1 <= _MAX_UNSETTLED_SHARE * len(blocks) and times[first] > _UNSETTLED * median(times[first + 1 :]):
        first += 1
    return blocks[first:]
