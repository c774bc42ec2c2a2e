"""Work of the training thread outside the steps, by phase, and how much less often to do it. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from lightning_gpu_tools.advice.findings import MIN_CEILING, Finding, ceiling, lost_time, mean_interval
from lightning_gpu_tools.advice.idle_time import idle_share, lost_share
from lightning_gpu_tools.training.phases import base_phase
from lightning_gpu_tools.training.run_measurements import RunMeasurements
from lightning_gpu_tools.units import printable

_REST_SHARE = 0.02  # our default: the share of the cause after the change in the advice


class HostPhase(NamedTuple):
    """A phase of a callback, a logger, ..., and its cost."""

    phase: str  # as in phase_s
    name: str  # of the callback, logger, ..., to print; that of the group if it has none
    method: str  # "optimizer_step" of "LitModel.optimizer_step"; empty if it is not a method
    share: float  # of the wall time; on a GPU, while it was idle
    seconds: float
    times: int  # how many times less often it must run for its cost to be negligible


def phases_of(run: RunMeasurements, group: str) -> Iterator[HostPhase]:
    """Yield the phases of a group that took time: ``"callback/EarlyStopping"``, ``"callback/ModelCheckpoint"``, ..."""
    for phase, seconds in run.phase_s.items():
        base, _, name = phase.partition("/")
        if base == group:
            share = min(lost_share(run, phase), idle_share(run))
            method = name.partition(".")[2]
            yield HostPhase(phase, printable(name or group), method, share, seconds, times_less(share))


def lost_in(
    run: RunMeasurements, part: HostPhase, *, begins: str, advice: str, evidence: Mapping[str, float | str | None] = {}
) -> Finding:
    """Return a finding on a phase that occurs now and then.

    Up to three events may be chance: one in twenty runs would have none of them. So the part of the share that is not
    due to chance comes from how it is spread over the run.
    """
    group, _, name = part.phase.partition("/")
    seconds, repeated = [span.phase_s.get(group, 0.0) for span in run.spans], 1.0
    # An interval takes milliseconds of the training thread, and a smaller finding is left out in any case.
    if ceiling(part.share) >= MIN_CEILING and any(seconds):
        lower, _ = mean_interval(seconds) or (fmean(seconds), 0.0)
        repeated = min(1.0, lower / fmean(seconds))
    return lost_time(
        run,
        part.share,
        begins=begins,
        advice=advice,
        phase=part.phase,
        per_step_s=part.seconds / run.steps,
        evidence={"seconds": part.seconds, "name": name or None, **evidence},
        lines=[part.phase],
        lower=part.share * repeated,
    )


def longest_group(run: RunMeasurements, without: Sequence[str]) -> tuple[str, float]:
    """Return the group of phases that takes most time, apart from some, and its seconds."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for phase, phase_s in run.phase_s.items():
        if base_phase(phase) not in without:
            seconds[base_phase(phase)] += phase_s
    return max(seconds.items(), key=lambda item: item[1], default=("", 0.0))


def times_less(share: float, rest: float = _REST_SHARE) -> int:
    """Return how many times less often something must happen to take at most ``rest``: 2, 5, 10, ... to 1000."""
    times = math.inf if share >= 1 else share / (1 - share) * (1 - rest) / rest
    return next((steps for steps in (2, 5, 10, 20, 50, 100, 200, 500) if steps >= times), 1000)
