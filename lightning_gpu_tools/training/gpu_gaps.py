"""For how long the GPU had nothing to do between two training steps, and what the host did meanwhile. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lightning_gpu_tools.training.run_measurements import COPY, VALIDATION, GpuIdle

# A choice: how far a GPU's clock and the host's may drift apart; crystals keep within 50 parts in a million.
_DRIFT = 50e-6


class Gap(NamedTuple):
    """The time between two training steps, in seconds of the host's clock.

    Attributes:
        gpu_begin_s: The GPU has done all of the step before.
        gpu_end_s: The GPU comes to the step after.
        host_end_s: The host has put everything that comes before the step after into the GPU's queue: its batch.
        spent: What the host did up to then since it had put the step before into the queue, in this order.
    """

    gpu_begin_s: float
    gpu_end_s: float
    host_end_s: float
    spent: Sequence[tuple[str, float]]


def idle_by_phase(gap: Gap) -> dict[str, float]:
    """Return for how many seconds the GPU stood idle, by what the host did meanwhile.

    Work of the host that the GPU's queue hides counts nothing. What the GPU still does before the next step when the
    host is already in it, or beyond, is the copy of its batch: no kernel runs meanwhile. In validation the GPU has work
    of its own, so that nothing is known of it.
    """
    idle: dict[str, float] = {}
    end_s = gap.host_end_s
    for phase, seconds in reversed(gap.spent):
        begin_s = end_s - seconds
        alone_s = min(end_s, gap.gpu_end_s) - max(begin_s, gap.gpu_begin_s)
        if alone_s > 0 and phase != VALIDATION:
            idle[phase] = idle.get(phase, 0.0) + alone_s
        end_s = begin_s
    copied_s = gap.gpu_end_s - max(gap.gpu_begin_s, gap.host_end_s)
    if copied_s > 0:
        idle[COPY] = idle.get(COPY, 0.0) + copied_s
    return idle


class HostTime:
    """Tells what time of the host a time of the GPU is, without ever making one wait for the other.

    Nothing happens on the GPU before the host has asked for it. So each event that the host records gives a least
    difference between the two clocks, which is exact where the GPU had nothing else to do; and it had not wherever
    there is a gap to be measured.
    """

    def __init__(self) -> None:
        self._ahead_s = -math.inf
        self._gpu_s = 0.0

    def learn(self, host_s: float, gpu_s: float) -> None:
        """Take in that the host recorded an event at ``host_s`` which the GPU came to at ``gpu_s``."""
        self._ahead_s -= _DRIFT * max(0.0, gpu_s - self._gpu_s)
        self._gpu_s = max(self._gpu_s, gpu_s)
        self._ahead_s = max(self._ahead_s, host_s - gpu_s)

    def at(self, gpu_s: float) -> float:
        """Return the host's time at a time of the GPU."""
        return gpu_s + self._ahead_s


class IdleSums:
    """Adds up gaps."""

    def __init__(self) -> None:
        self._looks = 0
        self._host_s: dict[str, float] = {}
        self._idle_s: dict[str, float] = {}
        self._seen: dict[str, int] = {}

    def add(self, gap: Gap) -> None:
        """Add a gap."""
        self._looks += 1
        for phase, seconds in gap.spent:
            self._host_s[phase] = self._host_s.get(phase, 0.0) + seconds
            self._seen[phase] = self._seen.get(phase, 0) + 1
        _add(self._idle_s, idle_by_phase(gap))

    def facts(self) -> GpuIdle:
        """Return the sums."""
        return GpuIdle(looks=self._looks, host_s=dict(self._host_s), idle_s=dict(self._idle_s), seen=dict(self._seen))


def _add(sums: dict[str, float], more: Mapping[str, float]) -> None:
    for phase, seconds in more.items():
        sums[phase] = sums.get(phase, 0.0) + seconds
