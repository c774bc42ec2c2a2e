"""straggler: all ranks wait in every step for one slow rank.

Every rank publishes the times of its own work by phase. A rank is a straggler if it works longer than the median rank
by more than the ranks vary, and the others wait longer than it does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import median, median_low

from lightning_gpu_tools.advice.examples import STEP, gpu_run, ranks
from lightning_gpu_tools.advice.findings import Cause, Evidence, Finding, top_line_sentence, top_source_lines
from lightning_gpu_tools.advice.lost_time import PARTS_OF_STEP, lost_time, own_work_s, slowest_rank, waited_s
from lightning_gpu_tools.gpus.readings import not_none
from lightning_gpu_tools.training.phases import DATA_LOADING, IN_WORKER, PHASES, TRAINING_STEP, base_phase
from lightning_gpu_tools.training.run_measurements import RankStep, RunMeasurements
from lightning_gpu_tools.units import format_duration, printable

_MIN_EXCESS = 0.10  # of the step, beyond the median rank: TraceML's rule
_SIGMA_PER_MAD = 1.4826  # standard deviation per median absolute deviation, of normal noise (Hampel's identifier)
# Our defaults from here on.
_MIN_WAITED = 0.50  # of the blamed rank's excess: the others' longer wait
_MIN_EXPLAINED = 2 / 3  # of the excess, for a phase to be reported

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
    phase = _phase_behind(ranks, slow, excess_s)
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
    who = f"rank {slow.rank}"
    evidence: Evidence = {
        "who": who,
        "rank": slow.rank,
        "node": slow.node,
        "behind_ms_per_step": excess_s * 1e3,
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
        loss = f"It loses most of the time in {words}: {_ADVICE[group]}."
    gpu = "" if slow.gpu is None else f", GPU {slow.gpu}"
    sentences = (
        f"All ranks wait for {who} (node {slow.node}{gpu}), which takes "
        f"{format_duration(excess_s)} per step longer than the median of {len(ranks):,} ranks.",
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


def _phase_behind(ranks: Sequence[RankStep], slow: RankStep, excess_s: float) -> str | None:
    """Return the phase that explains the excess; ``None`` if none does."""
    behind_s = {
        phase: seconds - median_low(rank.phase_s.get(phase, 0.0) for rank in ranks)
        for phase, seconds in slow.phase_s.items()
        if base_phase(phase) in _ADVICE
    }
    phase = max(behind_s, key=behind_s.__getitem__, default="")
    return phase if phase and behind_s[phase] >= _MIN_EXPLAINED * excess_s else None


CAUSE = Cause(
    says="Waiting for rank ... takes ...; the phase in which it loses time",
    change="by phase: compare its data, storage, clocks and temperature, or make a callback or checkpoint faster",
    find=find,
    silences=("communication", "slow_steps"),
    kind="busy",  # a rank that waits for another GPU keeps its own busy
    verified_on="simulated GPU",
    sick=gpu_run(STEP, 99.0, **ranks(*[{"forward": 0.01}] * 3, {"forward": 0.03})),
    healthy=gpu_run(STEP, 99.0, **ranks(*[{"forward": 0.01}] * 3, {"forward": 0.012})),
)
