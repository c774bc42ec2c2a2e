"""The rank that all others wait for, and what they wait otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median, median_low

from lightning_gpu_tools.advice.findings import MIN_COMMUNICATION, Finding, counted
from lightning_gpu_tools.training.phases import PHASES, base_phase
from lightning_gpu_tools.training.run_measurements import RankStep, RunMeasurements
from lightning_gpu_tools.units import format_duration, printable

# TraceML's rule: report an excess over the median rank from 10 % of the step on, and blame a phase only if it accounts
# for 80 % of that excess.
_MIN_EXCESS = 0.10
_MIN_COVERAGE = 0.80
# Our default: no rank is blamed unless the others wait longer than it does, by half of its excess. It is not more
# because they also wait for each other, now and then.
_MIN_WAITED = 0.50

_ADVICE = {
    "data_loading": "compare its storage, its cores and its loader's settings with those of the other ranks",
    "host_to_device_copy": "compare the size of its batches and its PCIe link with those of the other ranks",
    "forward": "compare the size of its batches, its clocks and temperature, and other jobs on that machine",
    "backward": "compare its clocks, its temperature and other jobs on that machine with those of the other ranks",
    "optimizer": "compare its clocks, its temperature and other jobs on that machine with those of the other ranks",
    "callback": "make it cheaper there, or call it less often",
    "logging": "log less often: Trainer(log_every_n_steps=...)",
    "checkpoint": "save less often, or in the background with AsyncCheckpointIO(PortableCheckpointIO())",
    "validation": "give all ranks as many batches, and compare its storage and cores with theirs",
    "epoch_start": "compare its storage and cores, and set persistent_workers=True",
}
_ADVICE_IN_OWN_LOOP = {
    **_ADVICE,
    "logging": "log less often",
    "checkpoint": "save less often, or in the background",
}
_IN_STEP = {"forward": "its forward pass", "backward": "its backward pass", "optimizer": "its optimizer's step"}


def slowest_rank(ranks: Sequence[RankStep]) -> tuple[RankStep, float] | None:
    """Return the rank that works longest on a step, and how many seconds longer than the median rank.

    With an even number of ranks the faster of the two in the middle counts as the median. A part of the step that one
    of them does not know of itself does not count. ``None`` with one rank.
    """
    if len(ranks) < 2:
        return None
    unknown = [part for part in _IN_STEP if not all(part in rank.phase_s for rank in ranks)]
    own_s = [rank.own_step_s - sum(rank.phase_s.get(part, 0.0) for part in unknown) for rank in ranks]
    slowest = max(range(len(ranks)), key=own_s.__getitem__)
    return ranks[slowest], own_s[slowest] - median_low(own_s)


def straggler(run: RunMeasurements) -> Finding | None:
    """Return the rank that all others wait for, with the phase in which it loses its time if there is one."""
    found = slowest_rank(run.ranks)
    if found is None:
        return None
    slow, excess_s = found
    share = min(excess_s / run.step_s, 1.0)
    phase = _phase_behind(run.ranks, slow, excess_s)
    # Busy cores make any rank slow at times: an excess counts beyond what this rank's steps vary by themselves.
    noise_s = sum(slow.phase_iqr_s.values()) if phase is None else slow.phase_iqr_s.get(phase, 0.0)
    if share < _MIN_EXCESS or excess_s <= noise_s or not _is_waited_for(slow, excess_s, run.ranks):
        return None
    evidence: dict[str, float | str] = {
        "rank": slow.rank,
        "node": slow.node,
        "behind_ms_per_step": excess_s * 1e3,
        "own_ms_per_step": slow.own_step_s * 1e3,
        "median_ms_per_step": (slow.own_step_s - excess_s) * 1e3,
        "ranks": len(run.ranks),
    }
    if phase is None:
        where = "No single phase accounts for it: compare that machine's cores, storage and clocks with the others."
    else:
        evidence["phase"] = phase
        advice = (_ADVICE if run.has_trainer else _ADVICE_IN_OWN_LOOP)[base_phase(phase)]
        where = f"It loses the time in {_in_words(phase)}: {advice}."
    return counted(
        "straggler",
        share,
        evidence=evidence,
        advice=f"All ranks wait for rank {slow.rank} (node {slow.node}), which takes {format_duration(excess_s)} "
        f"per step longer than the median of {len(run.ranks)} ranks. {where}",
    )


def waiting_for_ranks(run: RunMeasurements) -> Finding | None:
    """Return that ranks wait for one another where no rank can be blamed for it."""
    waits = mean_wait_s(run.ranks)
    if waits is None or waits < MIN_COMMUNICATION * run.step_s or straggler(run) is not None:
        return None
    if all("backward" in rank.phase_s for rank in run.ranks):
        why = (
            "No rank always works longer than the others: the network is slow, or there are too few cores and a "
            "different rank is late each time."
        )
    else:
        why = (
            "Which rank is slow cannot be told. With this strategy ranks also wait in forward, backward and optimizer."
        )
    change = (
        "Set Trainer(accumulate_grad_batches=...)"
        if run.has_trainer
        else "Accumulate gradients over several batches (no_sync)"
    )
    return counted(
        "communication",
        min(waits / run.step_s, 1.0),
        evidence={"ms_per_step": waits * 1e3, "ranks": len(run.ranks)},
        advice=f"{why} {change} so that they meet less often, or use fewer ranks.",
    )


def mean_wait_s(ranks: Sequence[RankStep]) -> float | None:
    """Return for how long a rank waits for others on a step, the mean over the ranks; ``None`` if that is unknown."""
    waits = [rank.wait_s for rank in ranks if rank.wait_s is not None]
    return fmean(waits) if waits and len(waits) == len(ranks) else None


def _in_words(phase: str) -> str:
    """Return ``"waiting for data"``, ``"its backward pass"``, ``"SlowCallback"`` or ``"LitModel.on_train_start"``."""
    group, _, name = phase.partition("/")
    return printable(name) or _IN_STEP.get(group) or PHASES[group].label


def _is_waited_for(slow: RankStep, excess_s: float, ranks: Sequence[RankStep]) -> bool:
    """Return whether the others wait for it, as far as that is known: what a phase holds may be a wait as well."""
    waits = [rank.wait_s for rank in ranks if rank is not slow and rank.wait_s is not None]
    return slow.wait_s is None or not waits or median(waits) - slow.wait_s >= _MIN_WAITED * excess_s


def _phase_behind(ranks: Sequence[RankStep], slow: RankStep, excess_s: float) -> str | None:
    for phase, seconds in slow.phase_s.items():
        typical_s = median_low(rank.phase_s.get(phase, 0.0) for rank in ranks)
        if seconds - typical_s >= _MIN_COVERAGE * excess_s and base_phase(phase) in _ADVICE:
            return phase
    return None
