"""The rank that all others wait for."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median_low

from lightning_gpu_tools.advice.findings import Finding, counted
from lightning_gpu_tools.training.run_measurements import RunMeasurements

# TraceML's rule: the excess over the median rank is worth naming from 10 % of the step on, and a phase is the cause
# only if it accounts for 80 % of it.
_MIN_EXCESS = 0.10
_MIN_COVERAGE = 0.80

_PHASES = {
    "data_loading": "waiting for data",
    "host_to_device_copy": "handing the batch to the device",
    "forward": "its forward pass",
    "callback": "its callbacks",
    "logging": "its loggers",
}


def straggler(run: RunMeasurements) -> Finding | None:
    """Return the rank that is slower than the median one, with the phase that it loses its time in, if it is one."""
    step_s = run.steady_step_s
    if len(run.ranks) < 2 or not step_s:
        return None
    slowest = max(run.ranks, key=lambda rank: rank.own_s)
    # Of an even number of ranks the faster one of the two in the middle counts as the median.
    typical_s = median_low(rank.own_s for rank in run.ranks)
    excess_s = slowest.own_s - typical_s
    share = min(excess_s / step_s, 1.0)
    if share < _MIN_EXCESS:
        return None
    phase = _phase_behind(run, slowest.phase_s, excess_s)
    evidence: dict[str, float | str] = {
        "rank": slowest.rank,
        "node": slowest.node,
        "behind_ms_per_step": excess_s * 1e3,
        "own_ms_per_step": slowest.own_s * 1e3,
        "median_ms_per_step": typical_s * 1e3,
        "ranks": len(run.ranks),
    }
    if phase is None:
        where = "no single phase accounts for it: compare that machine's cores, storage and clocks with the others'"
    else:
        evidence["phase"] = phase
        where = f"it loses the time in {_PHASES.get(phase, phase)}: give it the same data, cores and settings"
    return counted(
        "straggler",
        share,
        evidence=evidence,
        advice=f"All ranks wait for rank {slowest.rank} (node {slowest.node}), {excess_s * 1e3:.3g} ms a step slower "
        f"than the median of {len(run.ranks)} ranks; {where}.",
    )


def _phase_behind(run: RunMeasurements, slow: Mapping[str, float], excess_s: float) -> str | None:
    for phase, seconds in slow.items():
        typical_s = median_low(rank.phase_s.get(phase, 0.0) for rank in run.ranks)
        if seconds - typical_s >= _MIN_COVERAGE * excess_s:
            return phase
    return None
