"""straggler: all ranks wait in every step for one slow rank.

Every rank publishes the times of its own work by phase. A rank is a straggler if it works longer than the median rank
by more than the noise, repeatedly, and the others wait longer than it does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import fmean, median, median_low

from lightning_gpu_tools.advice.examples import STEP, gpu_run, ranks
from lightning_gpu_tools.advice.findings import Cause, Evidence, Finding, top_line_sentence, top_source_lines
from lightning_gpu_tools.advice.lost_time import lost_time
from lightning_gpu_tools.advice.ranks import PARTS_OF_STEP, own_work_s, slowest_rank, unknown_parts, waited_s
from lightning_gpu_tools.gpus.readings import not_none
from lightning_gpu_tools.training.phases import DATA_LOADING, IN_WORKER, PHASES, TRAINING_STEP, base_phase
from lightning_gpu_tools.training.run_measurements import RankStep, RunMeasurements
from lightning_gpu_tools.units import format_duration, number_ranges, printable

# TraceML's rule: an excess over the median rank counts from 10% of the step, and a phase explains it from 80% of it.
_MIN_EXCESS = 0.10
_MIN_COVERAGE = 0.80
_SIGMA_PER_MAD = 1.4826  # standard deviation per median absolute deviation, of normal noise (Hampel's identifier)
# Our defaults from here on.
_MIN_WAITED = 0.50  # of the blamed rank's excess: the others' longer wait
_MIN_EXPLAINED = 2 / 3  # of the excess, for a phase to be reported
_ALWAYS = 0.90  # of the parts of a run: if it is late in fewer, the report says so
_MIN_LATE_PARTS = 3  # fewer are chance, unless there are few parts

_GPU_ADVICE = "compare its clocks, its temperature and other jobs on that machine with those of the other ranks"
_ADVICE = {
    "data_loading": "compare its storage, its cores and its loader's settings with those of the other ranks",
    "host_to_device_copy": "compare the size of its batches and its PCIe link with those of the other ranks",
    "forward": "compare the size of its batches, its clocks and temperature, and other jobs on that machine",
    "backward": _GPU_ADVICE,
    "optimizer": _GPU_ADVICE,
    "callback": "make it faster there, or call it less often",
    "logging": "log less often",
    "checkpoint": "save less often, or in the background",
    "validation": "give all ranks the same number of batches, and compare its storage and cores with theirs",
    "epoch_start": "compare its storage and cores, and keep the loader's workers between epochs",
}


def find(run: RunMeasurements) -> Iterator[Finding]:
    """Yield the rank that all others wait for, with the phase in which it loses time if one explains it.

    The share is the gain for the job: the lag behind the slowest rank that is not an outlier.
    """
    ranks, found = run.ranks, slowest_rank(run.ranks)
    if found is None or run.stage != "fit":  # else each rank works at its own pace up to the end
        return
    slow, excess_s = found
    phase, coverage = _phase_behind(ranks, slow, excess_s)
    own_s = own_work_s(ranks)
    times_s = own_s if phase is None else [rank.phase_s.get(phase, 0.0) for rank in ranks]
    behind = _standing_out(times_s, run.step_s)
    usual_s = max((one_s for place, one_s in enumerate(own_s) if place not in behind), default=median_low(own_s))
    share = min((max(own_s) - usual_s) / run.step_s, 1.0)
    # It may be unknown whether the others wait for it, and a phase may itself include a wait.
    waits = not_none(waited_s(rank) for rank in ranks if rank is not slow)
    own_wait_s = waited_s(slow)
    is_waited_for = own_wait_s is None or not waits or median(waits) - own_wait_s >= _MIN_WAITED * excess_s
    if share < _MIN_EXCESS or not is_waited_for:
        return
    late_share = _late_share(ranks, slow, excess_s)
    if late_share is None:
        return
    who, others = f"rank {slow.rank}", {ranks[place].rank for place in behind} - {slow.rank}
    evidence: Evidence = {
        "who": who,
        "rank": slow.rank,
        "node": slow.node,
        "behind_ms_per_step": excess_s * 1e3,
        "own_ms_per_step": slow.own_step_s * 1e3,
        "median_ms_per_step": (slow.own_step_s - excess_s) * 1e3,
        "late_percent": 100 * late_share,
        "ranks": len(ranks),
        "phase": phase,
    }
    line = ""
    if phase is None:
        loss = "No single phase explains it: compare its cores, storage and clocks with those of the others."
    else:
        group, _, name = phase.partition("/")
        words = printable(name) or PARTS_OF_STEP.get(group) or PHASES[group].label
        phases = [f"{TRAINING_STEP}/{phase}"] if phase in PARTS_OF_STEP else [phase]
        if phase == DATA_LOADING and any(sampled.phase == IN_WORKER for sampled in slow.lines):
            phases = [IN_WORKER]
        evidence["source_lines"], line = top_source_lines(slow.lines, *phases), top_line_sentence(slow.lines, *phases)
        loss = f"It loses {'the' if coverage >= _MIN_COVERAGE else 'most of the'} time in {words}: {_ADVICE[group]}."
    gpu = "" if slow.gpu is None else f", GPU {slow.gpu}"
    sentences = (
        f"All ranks wait for {who} (node {slow.node}{gpu}), which takes "
        f"{format_duration(excess_s)} per step longer than the median of {len(ranks):,} ranks.",
        f"It is late {100 * late_share:.0f}% of the time." if late_share < _ALWAYS else "",
        f"Also slow: rank{'s' * (len(others) > 1)} {number_ranges(others)}." if others else "",
        loss,
        line,
    )
    own, usual = (format_duration(one_s) for one_s in (slow.own_step_s, slow.own_step_s - excess_s))
    yield lost_time(
        run,
        share,
        begins=f"Waiting for {who} takes",
        advice=" ".join(filter(None, sentences)),
        evidence=evidence,
        detail=f"{own} per step; {usual} on the median rank",
    )


def _standing_out(values_s: Sequence[float], step_s: float) -> set[int]:
    """Return the positions of outliers: values that the noise of all values does not explain."""
    typical_s = median_low(values_s)
    sigma_s = _SIGMA_PER_MAD * median_low(abs(one_s - typical_s) for one_s in values_s)
    # Of n values with normal noise, the highest is at about sqrt(2 ln n) standard deviations.
    least_s = max((1 + math.sqrt(2 * math.log(len(values_s)))) * sigma_s, _MIN_EXCESS / 2 * step_s)
    return {place for place, one_s in enumerate(values_s) if one_s - typical_s > least_s}


def _late_share(ranks: Sequence[RankStep], slow: RankStep, excess_s: float) -> float | None:
    """Return the share of the run in which a rank was late; ``None`` if it is chance or noise."""
    steps = max(rank.steps_over_time for rank in ranks)
    parts = [_in_parts_of(steps, rank) for rank in ranks]
    count = min(map(len, parts))
    others = [part[:count] for part, rank in zip(parts, ranks, strict=True) if rank is not slow]
    typical_s = map(median_low, zip(*others, strict=True))  # of the others, so that it can be above
    seen_s = [own_s - median_s for own_s, median_s in zip(_in_parts_of(steps, slow), typical_s, strict=False)]
    if count < 2 or unknown_parts(ranks) or fmean(seen_s) < excess_s / 2:  # it is late outside steady steps
        return 1.0
    late = sum(one_s > fmean(seen_s) / 2 for one_s in seen_s)
    # Noise has both signs: at other times, the rank would be faster by as much.
    is_certain = late >= min(_MIN_LATE_PARTS, count / 2) and excess_s > -min(seen_s)
    return late / count if is_certain else None


def _in_parts_of(steps: int, rank: RankStep) -> list[float]:
    """Return a rank's own work over time in parts of ``steps`` steps: its own part length times a power of two."""
    parts, length = list(rank.own_s_over_time), rank.steps_over_time
    while 0 < length < steps:
        parts = [(first + second) / 2 for first, second in zip(parts[::2], parts[1::2], strict=False)]
        length *= 2
    return parts


def _phase_behind(ranks: Sequence[RankStep], slow: RankStep, excess_s: float) -> tuple[str | None, float]:
    """Return the phase with most of the excess, and its share."""
    behind_s = {
        phase: seconds - median_low(rank.phase_s.get(phase, 0.0) for rank in ranks)
        for phase, seconds in slow.phase_s.items()
        if base_phase(phase) in _ADVICE
    }
    phase = max(behind_s, key=behind_s.__getitem__, default="")
    coverage = behind_s.get(phase, 0.0) / excess_s if excess_s > 0 else 0.0
    return (phase, coverage) if coverage >= _MIN_EXPLAINED else (None, coverage)


CAUSE = Cause(
    says="Waiting for rank ... takes ...; the phase in which it loses time",
    change="by phase: compare its data, storage, clocks and temperature, or make a callback or checkpoint faster",
    find=find,
    kind="busy",  # a rank that waits for another GPU keeps its own busy
    explains=TRAINING_STEP,
    verified_on="simulated GPU",
    sick=gpu_run(STEP, 99.0, **ranks(*[{"forward": 0.01}] * 3, {"forward": 0.03})),
    healthy=gpu_run(STEP, 99.0, **ranks(*[{"forward": 0.01}] * 3, {"forward": 0.012})),
)
