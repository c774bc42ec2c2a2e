"""Work of the training thread outside the steps, by phase, and how much less often to do it. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from lightning_gpu_tools.advice.findings import Evidence
from lightning_gpu_tools.training.run_measurements import RunMeasurements
from lightning_gpu_tools.units import printable

_REST_SHARE = 0.02  # our default: the share of the cause after the change in the advice


class HostPhase(NamedTuple):
    """A phase of a callback, a logger, ..., and its cost."""

    name: str  # of the callback, logger, ..., to print
    method: str  # "optimizer_step" of "LitModel.optimizer_step"; empty if it is not a method
    share: float  # of the wall time; on a GPU, while it was idle
    evidence: Evidence

    @property
    def times(self) -> int:
        """How many times less often it must run for its cost to be negligible."""
        return times_less(self.share)


def phases_of(run: RunMeasurements, group: str) -> Iterator[HostPhase]:
    """Yield the phases of a group that took time: ``"callback/EarlyStopping"``, ``"callback/ModelCheckpoint"``, ..."""
    for phase, seconds in run.phase_s.items():
        base, _, name = phase.partition("/")
        if base == group:
            share = min(run.lost_share(phase), run.idle_share)
            evidence = {**seconds_of(run, seconds), "name": name or None}
            yield HostPhase(printable(name or group), name.partition(".")[2], share, evidence)


def named_phase(group: str) -> Callable[[Mapping[str, float | str]], Sequence[str]]:
    """Return a function that gives the phase of a finding made from a phase of this group."""
    return lambda evidence: [f"{group}/{evidence['name']}" if "name" in evidence else group]


def seconds_of(run: RunMeasurements, seconds: float) -> Evidence:
    """Return seconds of a run as evidence."""
    return {"seconds": seconds, "ms_per_step": seconds / run.steps * 1e3}


def times_less(share: float, rest: float = _REST_SHARE) -> int:
    """Return how many times less often something must happen to take at most ``rest``: 2, 5, 10, ... to 1000."""
    times = math.inf if share >= 1 else share / (1 - share) * (1 - rest) / rest
    return next((steps for steps in (2, 5, 10, 20, 50, 100, 200, 500) if steps >= times), 1000)
