"""The GPU's work on the parts of a step, the hold times needed to measure it, and its idle time between two steps."""

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

from lightning_gpu_tools.training.phases import BACKWARD, HOST_TO_DEVICE_COPY, RANK_WAIT, VALIDATION, base_phase

# Our defaults.
_MAX_MEASURED = 64  # measurements to keep
_ENOUGH_HELD = 8  # measurements of a part after which it is no longer held
_MAX_FAILED = 3  # failures beyond the measurements: a part that waits for the GPU or fills its queue cannot be held
_HOLD = 2.0  # multiple of the host's time, which varies; doubled each time the hold was too short
_MAX_HOLD_S = 0.1

_Event = Any  # torch.cuda.Event, which has no types


@dataclass(slots=True)
class Part:
    """Everything that the host queues in one phase, up to the next phase or its next wait for the GPU."""

    phase: str
    begin: _Event
    begin_s: float  # host time
    seconds: dict[str, float]  # host seconds by phase up to then
    hold: _Event = None  # since when the GPU slept before it; None if it did not
    cycles: int = 0  # of that sleep
    needed_s: float = 0.0  # time that the host needed for it in an earlier step
    end: _Event = None
    host_s: float = 0.0
    was_behind: bool = False  # the GPU began it only after all of it was queued
    has_synced: bool = False  # it ends with a wait of the host for it, so was_behind cannot be determined

    @property
    def gpu_s(self) -> float:
        """Seconds from its start to its end on the GPU."""
        return float(self.begin.elapsed_time(self.end)) / 1e3

    @property
    def slept_s(self) -> float:
        """Seconds that the GPU slept before it."""
        return 0.0 if self.hold is None else float(self.hold.elapsed_time(self.begin)) / 1e3

    @property
    def is_work(self) -> bool:
        """Whether the GPU worked all of that time."""
        if not self.has_synced:
            return self.was_behind
        return self.phase != BACKWARD and self.slept_s > self.needed_s  # a sync within backward is reported after it


@dataclass(slots=True)
class Work:
    """The measured work of the GPU in one phase."""

    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_MAX_MEASURED))
    seen: int = 0  # number of samples that include it
    failed: int = 0  # failed attempts to hold it
    watched: Sequence[Part] = ()  # its parts in the last watched step
    has_synced: bool = False

    @property
    def usual_s(self) -> float:
        """Usual duration in seconds where it occurs; 0 if unknown."""
        if not self.seconds:
            return 0.0
        # The host may notice the end of its wait late, but never early.
        return min(self.seconds) if self.has_synced else median(self.seconds)

    def hold_s(self, number: int) -> tuple[float, float]:
        """Return the seconds that the GPU has to sleep before a part (0: no sleep), and the host's time for it."""
        is_done = len(self.seconds) >= _ENOUGH_HELD or self.failed >= _MAX_FAILED + len(self.seconds)
        if number >= len(self.watched) or is_done:
            return 0.0, 0.0
        host_s = self.watched[number].host_s
        if self.watched[number].was_behind or host_s > _MAX_HOLD_S:
            return 0.0, 0.0
        return min(_MAX_HOLD_S, _HOLD * float(2**self.failed) * host_s), host_s


def by_phase(parts: Iterable[Part]) -> dict[str, list[Part]]:
    """Return the parts of each phase, in order."""
    grouped: defaultdict[str, list[Part]] = defaultdict(list)
    for part in parts:
        grouped[part.phase].append(part)
    return grouped


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
