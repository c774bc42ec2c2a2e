"""Idle time of the GPU between two training steps, by the host's phase during that time. Pure functions."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from lightning_gpu_tools.training.phases import HOST_TO_DEVICE_COPY, RANK_WAIT, VALIDATION, base_phase

# Between the GPU's clock and the host's; crystal oscillators are accurate to 50 parts per million.
_DRIFT = 50e-6


class Gap(NamedTuple):
    """The time between two training steps, in seconds of the host's clock."""

    gpu_begin_s: float  # the GPU ends the previous step
    gpu_end_s: float  # the GPU begins the next step
    host_end_s: float  # the host has queued everything before the next step
    spent: Sequence[tuple[str, float]]  # the host's phases from queuing the previous step until then, in order


def without_work(gap: Gap, first_s: float, last_s: float) -> Gap:
    """Shorten the gap by the GPU's work at its start and at its end."""
    begin_s = min(gap.gpu_begin_s + first_s, gap.gpu_end_s)
    return gap._replace(gpu_begin_s=begin_s, gpu_end_s=max(begin_s, gap.gpu_end_s - last_s))


def idle_by_phase(gap: Gap) -> dict[str, float]:
    """Return the GPU's idle seconds, by the host's phase during that time.

    Validation runs kernels, and a GPU waits for other ranks inside an NCCL kernel, so neither counts. Once the host is
    in the next step, the GPU is copying the batch, which takes no kernel.
    """
    idle = {phase: s for phase, s in _by_phase(gap).items() if base_phase(phase) not in (VALIDATION, RANK_WAIT)}
    copied_s = gap.gpu_end_s - max(gap.gpu_begin_s, gap.host_end_s)
    if copied_s > 0:
        idle[HOST_TO_DEVICE_COPY] = idle.get(HOST_TO_DEVICE_COPY, 0.0) + copied_s
    return idle


def rank_wait_s(gap: Gap) -> float:
    """Return the seconds in which the host waited for other ranks, and the GPU as well."""
    return sum(seconds for phase, seconds in _by_phase(gap).items() if base_phase(phase) == RANK_WAIT)


def _by_phase(gap: Gap) -> dict[str, float]:
    spent: defaultdict[str, float] = defaultdict(float)
    end_s = gap.host_end_s
    for phase, seconds in reversed(gap.spent):
        begin_s = end_s - seconds
        within_s = min(end_s, gap.gpu_end_s) - max(begin_s, gap.gpu_begin_s)
        if within_s > 0:
            spent[phase] += within_s
        end_s = begin_s
    return spent


class HostTime:
    """A converter from the GPU's time to the host's.

    The GPU reaches an event only after the host has recorded it. Each event thus gives a lower bound of the difference.
    The bound is exact if the GPU was idle, as in every gap to be measured.
    """

    def __init__(self) -> None:
        self._ahead_s = -math.inf
        self._gpu_s = 0.0

    def learn(self, host_s: float, gpu_s: float) -> None:
        """Record that the GPU reached an event at ``gpu_s`` that the host recorded at ``host_s``."""
        self._ahead_s -= _DRIFT * max(0.0, gpu_s - self._gpu_s)
        self._gpu_s = max(self._gpu_s, gpu_s)
        self._ahead_s = max(self._ahead_s, host_s - gpu_s)

    def at(self, gpu_s: float) -> float:
        """Return the host's time for a time of the GPU."""
        return gpu_s + self._ahead_s
