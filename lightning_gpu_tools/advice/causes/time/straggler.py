"""straggler: all ranks wait in every step for one slow rank.

Every rank publishes the times of its own work by phase. A rank is a straggler if it works longer than the median rank
by more than the ranks vary, and the others wait longer than it does.
"""

import math
from collections.abc import Sequence
from statistics import median, median_low

from lightning_gpu_tools.advice.findings import Cause, Evidence, Findings, label_of, top_lines
from lightning_gpu_tools.advice.lost_time import PARTS_OF_STEP, lost_time, own_work_s, slowest_rank
from lightning_gpu_tools.gpus.readings import not_none
from lightning_gpu_tools.training.phases import DATA_LOADING, IN_WORKER, TRAINING_STEP
from lightning_gpu_tools.training.run_measurements import RankStep, RunMeasurements
from lightning_gpu_tools.units import format_duration

_MIN_EXCESS = 0.10  # of the step, beyond the median rank: TraceML's rule
_SIGMA_PER_MAD = 1.4826  # standard deviation per median absolute deviation, of normal noise (Hampel's identifier)
# Our defaults from here on.
_MIN_WAITED = 0.50  # of the blamed rank's excess: the others' longer wait
_MIN_EXPLAINED = 2 / 3  # of the excess, for a phase to be reported


def find(run: RunMeasurements) -> Findings:
    ranks, found = run.ranks, slowest_rank(run.ranks)
    if found is None or run.stage != "fit":  # else each rank works at its own pace up to the end
        return
    slow, excess_s = found
    phase = _phase_behind(ranks, slow, excess_s)
    own_s = own_work_s(ranks)
    times_s = own_s if phase is None else [rank.phase_s.get(phase, 0.0) for rank in ranks]
    behind = _standing_out(times_s, run.step_s)
    # The gain for the job: the lag behind the slowest rank that is not an outlier.
    usual_s = max((one_s for place, one_s in enumerate(own_s) if place not in behind), default=median_low(own_s))
    share = min((max(own_s) - usual_s) / run.step_s, 1.0)
    # It may be unknown whether the others wait for it, and a phase may itself include a wait.
    waits_s = {one.rank: one.wait_s if one.others_late_s is None else one.others_late_s for one in ranks}
    own_wait_s, others_s = waits_s.pop(slow.rank), not_none(waits_s.values())
    is_waited_for = own_wait_s is None or not others_s or median(others_s) - own_wait_s >= _MIN_WAITED * excess_s
    if share < _MIN_EXCESS or not is_waited_for:
        return
    who, gpu = f"rank {slow.rank}", "" if slow.gpu is None else f", GPU {slow.gpu}"
    evidence: Evidence = {
        "who": who,
        "rank": slow.rank,
        "node": slow.node,
        "behind_ms_per_step": excess_s * 1e3,
        "phase": phase,
    }
    loss, line = "No single phase explains it.", ""
    if phase is not None:
        sampled_in = f"{TRAINING_STEP}/{phase}" if phase in PARTS_OF_STEP else phase
        if phase == DATA_LOADING and any(sampled.phase == IN_WORKER for sampled in slow.lines):
            sampled_in = IN_WORKER
        evidence["source_lines"], line = top_lines(slow.lines, sampled_in)
        loss = f'It loses most of the time in "{label_of(phase)}".'
    advice = (
        f"All ranks wait for {who} (node {slow.node}{gpu}), which takes {format_duration(excess_s)} per step longer "
        f"than the median of {len(ranks):,} ranks. {loss} Compare what it does there, its data, storage, cores and "
        f"clocks with those of the others. {line}"
    )
    own, usual = (format_duration(one_s) for one_s in (slow.own_step_s, slow.own_step_s - excess_s))
    detail = f"{own} per step; {usual} on the median rank"
    yield lost_time(run, share, f"Waiting for {who} takes", advice, evidence=evidence, detail=detail)


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
    }
    phase = max(behind_s, key=behind_s.__getitem__, default="")
    return phase if phase and behind_s[phase] >= _MIN_EXPLAINED * excess_s else None


CAUSE = Cause(
    says="Waiting for rank ... takes ...; the phase in which it loses time",
    change="compare what it does there, its data, storage, cores and clocks with those of the other ranks",
    find=find,
    silences=("communication", "slow_steps"),
    kind="busy",  # a rank that waits for another GPU keeps its own busy
    verified_on="simulated GPU",
)
