"""How long the GPU was idle, in which phases, and why inside the step; and findings on that time.

Pure. Shares are fractions of the wall time.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean, median, median_low

from lightning_gpu_tools.advice.findings import (
    MIN_CEILING,
    MIN_SAMPLES,
    Basis,
    Finding,
    ceiling,
    known,
    mean_interval,
    top_lines,
)
from lightning_gpu_tools.training.phases import (
    HOST_TO_DEVICE_COPY,
    IN_WORKER,
    PAUSES,
    RANK_WAIT,
    TRAINING_STEP,
    VALIDATION,
    base_phase,
)
from lightning_gpu_tools.training.run_measurements import RankStep, RunMeasurements, SourceLine
from lightning_gpu_tools.units import format_duration, printable

BUSY_PERCENT = 80.0  # a GPU that runs a kernel for this much of the time looks well used
MIN_SHARE = 0.05  # torch's TensorBoard plugin, for the DataLoader: a smaller share is not reported
_FEW_SMS_PERCENT = 50.0  # DCGM's guide: "likely" ineffective
# Our defaults.
_MIN_SAMPLES = 5  # of a phase, to measure the GPU's idle time in it; with fewer, the whole phase counts as idle
# The share of gaps between kernels in the time between events. Compared with torch.profiler on an H200, it was 3 to 6%
# for ResNet-50 and GPT-2, and 33% with hundreds of tiny kernels, whose little work hardly uses the GPU.
_GAPS = 0.1
_TINY_STEP_S = 0.005  # a model with shorter steps, and
_TINY_GPU_S = 0.0005  # less GPU work per step, is too small for a GPU: about a hundred of the shortest kernels
_MIN_SYNCS_PER_STEP = 0.5  # rarer waits do not affect the steps in between
_SLOW_LAUNCH_S = 100e-6  # per operation; 10 to 50 us are usual, including the Python code around it
_NOT_IN_STEP = (HOST_TO_DEVICE_COPY, RANK_WAIT, *PAUSES)
_REST_SHARE = 0.02  # our default: the share of the cause after the change in the advice
PARTS_OF_STEP = ("forward", "backward", "optimizer")
FIND_FUNCTION = (
    "Find the slow function: py-spy record --pid PID --duration 30, or python -m cProfile -s tottime SCRIPT."
)


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


def syncs_in_step(run: RunMeasurements) -> list[SourceLine]:
    """Return the lines of the training step that wait for the GPU, most frequent first."""
    found = () if run.watched is None else run.watched.syncs
    return [line for line in found if base_phase(line.phase) not in _NOT_IN_STEP]


def idle_in_step(run: RunMeasurements) -> tuple[float, float, float]:
    """Return why the GPU waits inside the training step, as shares of the wall time; zeros if unknown.

    The host has first waited for the GPU, launches kernels more slowly than they run, or does something else.
    """
    in_step, watched = idle_in_step_share(run), run.watched
    if in_step is None or watched is None:
        return 0.0, 0.0, 0.0
    by_syncs = 0.0
    syncs = syncs_in_step(run)
    if sum(line.samples for line in syncs) >= _MIN_SYNCS_PER_STEP * watched.steps:
        # While the GPU is idle, the host does not wait for it. So without syncs, a step would still take at least the
        # GPU's idle time, and at least its busy time.
        busy = 1 - idle_share(run) - run.phase_s.get(VALIDATION, 0.0) / run.wall_s
        sampled = [line for line in run.lines if line.phase != IN_WORKER]
        places = {(line.file, line.line) for line in syncs}
        count = sum(line.samples for line in sampled)
        at_syncs = sum(line.samples for line in sampled if (line.file, line.line) in places)
        by_syncs = min(in_step, max(0.0, busy), at_syncs / count if count >= MIN_SAMPLES else 1.0)
    rest = in_step - by_syncs
    host_s = sum(seconds for phase, seconds in run.phase_s.items() if base_phase(phase) == TRAINING_STEP) / run.steps
    launches = host_s - by_syncs * run.step_s <= watched.operations * _SLOW_LAUNCH_S
    return by_syncs, rest if launches else 0.0, 0.0 if launches else rest


def is_tiny(run: RunMeasurements) -> bool:
    """Return whether the model is too small to gain from a GPU: its steps hardly use the GPU."""
    percent = run.utilization_percent
    if not run.on_gpu or not run.blocks or percent is None:
        return False
    step_s = median(block.step_s for block in run.blocks)
    return step_s < _TINY_STEP_S and step_s * percent / 100 < _TINY_GPU_S


def few_active_sms(run: RunMeasurements) -> float | None:
    """Return the percentage of active multiprocessors, if it is low although the GPU looks busy."""
    percent = run.gpu.sm_active_percent
    is_busy = (busy_percent(run) or 0.0) >= BUSY_PERCENT
    return percent if percent is not None and percent < _FEW_SMS_PERCENT and is_busy else None


def larger_batch(run: RunMeasurements) -> str:
    """Return the batch size to set, as the end of a sentence, and what else that changes; empty if 2x does not fit."""
    caveat = " With a larger batch, scale the learning rate and compare the validation metric." * (run.stage == "fit")
    batch_size = run.loader.batch_size if run.loader is not None else None
    fits = run.largest_batch_size
    if fits is None or not batch_size:
        return f"a larger batch_size.{caveat}"
    if fits < 2 * batch_size:
        return ""
    doubled = batch_size * 2 ** ((fits // batch_size).bit_length() - 1)
    return f"batch_size={doubled} (now {batch_size}; up to {fits} fit, based on measured memory).{caveat}"


def lost_time(
    run: RunMeasurements,
    share: float,
    begins: str,
    advice: str,
    *,
    evidence: Mapping[str, float | str | None] = {},
    phase: str | None = None,
    detail: str = "",
    has_lines: bool = False,
    has_function: bool = False,
    basis: Basis = "measured",
    avoidable: float | None = None,
    lower: float | None = None,
) -> Finding:
    """Return a finding on this share of the wall time.

    ``begins`` is the beginning of the reason, before "...% of the wall time", and ``detail`` more numbers after it,
    by default the seconds per step. With ``has_lines``, it reports the source lines of ``phase``, or of its group;
    ``has_function`` says to look for a function if no line is known. ``avoidable`` is the removable part of the share,
    by default all, and ``lower`` its lower bound if it was sampled or may be due to chance.
    """
    detail = detail or f"{format_duration(share * run.step_s)} per step"
    source_lines, hint = top_lines(run.lines, phase) if has_lines and phase else (None, "")
    hint = hint or (FIND_FUNCTION if has_function else "")
    bound = ceiling(share if avoidable is None else avoidable)
    surely = share if lower is None else lower
    if run.gpu_idle is not None and run.utilization_percent is not None:
        # If the GPU's times contradict the driver's utilization, the share may be too large by the difference.
        surely -= max(0.0, sum(idle_by_phase(run).values()) - idle_share(run))
    return Finding(
        cause="",
        share=share,
        ceiling=bound,
        ceiling_lower=min(bound, ceiling(surely)),
        evidence=known(
            {"phase": phase, "ms_per_step": 1e3 * share * run.step_s, "source_lines": source_lines, **evidence}
        ),
        why=f"{begins} {100 * share:.0f}% of the wall time ({detail}).",
        advice=f"{advice} {hint}".strip(),
        basis=basis,
    )


def phases_of(run: RunMeasurements, group: str) -> list[str]:
    """Return the phases of a group that took time: ``["callback/EarlyStopping", "callback/ModelCheckpoint"]``."""
    return [phase for phase in run.phase_s if base_phase(phase) == group]


def name_of(phase: str) -> str:
    """Return the callback, logger, ... of a phase, to print; by default its group."""
    group, _, name = phase.partition("/")
    return printable(name or group)


def lost_in(run: RunMeasurements, phase: str, begins: str, advice: str) -> Finding:
    """Return a finding on a phase that occurs now and then.

    Up to three events may be chance: one in twenty runs would have none of them. So the part of the share that is not
    due to chance comes from how it is spread over the run.
    """
    group, _, name = phase.partition("/")
    share = min(lost_share(run, phase), idle_share(run))
    seconds, repeated = [span.phase_s.get(group, 0.0) for span in run.spans], 1.0
    # An interval takes milliseconds of the training thread, and a smaller finding is left out in any case.
    if ceiling(share) >= MIN_CEILING and any(seconds):
        lower, _ = mean_interval(seconds) or (fmean(seconds), 0.0)
        repeated = min(1.0, lower / fmean(seconds))
    return lost_time(
        run,
        share,
        begins,
        advice,
        phase=phase,
        evidence={"seconds": run.phase_s[phase], "name": name or None},
        has_lines=True,
        lower=share * repeated,
    )


def longest_group(run: RunMeasurements, without: Sequence[str]) -> tuple[str, float]:
    """Return the group of phases that takes most time, apart from some, and its seconds."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for phase, phase_s in run.phase_s.items():
        if base_phase(phase) not in without:
            seconds[base_phase(phase)] += phase_s
    return max(seconds.items(), key=lambda item: item[1], default=("", 0.0))


def times_rarer(run: RunMeasurements, phase: str) -> int:
    """Return how many times less often a phase must occur for its cost to be negligible."""
    return times_less(min(lost_share(run, phase), idle_share(run)), _REST_SHARE)


def times_less(share: float, rest: float) -> int:
    """Return how many times less often something must happen to take at most ``rest``: 2, 5, 10, ... to 1000."""
    times = math.inf if share >= 1 else share / (1 - share) * (1 - rest) / rest
    return next((steps for steps in (2, 5, 10, 20, 50, 100, 200, 500) if steps >= times), 1000)


# --- waits for other ranks -------------------------------------------------------------------------------------------


def slowest_rank(ranks: Sequence[RankStep]) -> tuple[RankStep, float] | None:
    """Return the rank that works longest on a step, and its seconds beyond the median rank; ``None`` with one rank.

    With an even number of ranks, the median is the faster of the two in the middle.
    """
    if len(ranks) < 2:
        return None
    own_s = own_work_s(ranks)
    slowest = max(range(len(ranks)), key=own_s.__getitem__)
    return ranks[slowest], own_s[slowest] - median_low(own_s)


def own_work_s(ranks: Sequence[RankStep]) -> list[float]:
    """Return the time of each rank's own work on a step, without parts that only some ranks report."""
    unknown = [part for part in PARTS_OF_STEP if len({part in rank.phase_s for rank in ranks}) > 1]
    return [rank.own_step_s - sum(rank.phase_s.get(part, 0.0) for part in unknown) for rank in ranks]
