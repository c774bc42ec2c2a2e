"""The rank that all others wait for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median_low

from lightning_gpu_tools.advice.findings import Finding, counted
from lightning_gpu_tools.training.phases import PHASES
from lightning_gpu_tools.training.run_measurements import RunMeasurements
from lightning_gpu_tools.units import format_duration

# TraceML's rule: report an excess over the median rank from 10 % of the step on, and blame a phase only if it accounts
# for 80 % of that excess.
_MIN_EXCESS = 0.10
_MIN_COVERAGE = 0.80


def slowest_rank(own_s: Sequence[float]) -> tuple[int, float] | None:
    """Return which rank works longest on a step, and how many seconds longer than the median rank.

    With an even number of ranks the faster of the two in the middle counts as the median. ``None`` with one rank.
    """
    if len(own_s) < 2:
        return None
    slowest = max(range(len(own_s)), key=own_s.__getitem__)
    return slowest, own_s[slowest] - median_low(own_s)


def straggler(run: RunMeasurements) -> Finding | None:
    """Return the rank that all others wait for, with the phase in which it loses its time if there is one."""
    found, step_s = slowest_rank([rank.own_s for rank in run.ranks]), run.steady_step_s
    if found is None or not step_s:
        return None
    place, excess_s = found
    slowest = run.ranks[place]
    share = min(excess_s / step_s, 1.0)
    if share < _MIN_EXCESS:
        return None
    phase = _phase_behind(run, slowest.phase_s, excess_s)
    evidence: dict[str, float | str] = {
        "rank": slowest.rank,
        "node": slowest.node,
        "behind_ms_per_step": excess_s * 1e3,
        "own_ms_per_step": slowest.own_s * 1e3,
        "median_ms_per_step": (slowest.own_s - excess_s) * 1e3,
        "ranks": len(run.ranks),
    }
    if phase is None:
        where = "No single phase accounts for it: compare that machine's cores, storage and clocks with the others."
    else:
        evidence["phase"] = phase
        label = "its forward pass" if phase == "forward" else PHASES[phase].label
        where = f"It loses the time in {label}: give it the same data, cores and settings."
    return counted(
        "straggler",
        share,
        evidence=evidence,
        advice=f"All ranks wait for rank {slowest.rank} (node {slowest.node}), which takes {format_duration(excess_s)} "
        f"per step longer than the median of {len(run.ranks)} ranks. {where}",
    )


def _phase_behind(run: RunMeasurements, slow: Mapping[str, float], excess_s: float) -> str | None:
    for phase, seconds in slow.items():
        typical_s = median_low(rank.phase_s.get(phase, 0.0) for rank in run.ranks)
        if seconds - typical_s >= _MIN_COVERAGE * excess_s:
            return phase
    return None
