"""The GPU's work on the parts of a step, and the hold times needed to measure it."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

from lightning_gpu_tools.training.phases import BACKWARD

# Our defaults.
_MAX_MEASURED = 64  # measurements to keep
_ENOUGH_HELD = 8  # measurements of a part after which it is no longer held
_MAX_FAILED = 3  # failures beyond the measurements: a part that waits for the GPU or fills its queue cannot be held
_HOLD = 2.0  # multiple of the host's time, which varies; doubled each time the hold was too short
_MAX_HOLD_S = 0.1

_Event = Any  # torch.cuda.Event, which has no types


class Hold(NamedTuple):
    """A sleep of the GPU before a part."""

    since: _Event
    cycles: int
    host_s: float  # time that the host needs for the part

    def slept_s(self, until: _Event) -> float:
        """Return the seconds that the GPU slept. Only valid once the GPU has finished the sleep."""
        return float(self.since.elapsed_time(until)) / 1e3


@dataclass(slots=True)
class Part:
    """Everything that the host queues in one phase, up to the next phase or its next wait for the GPU."""

    phase: str
    begin: _Event
    begin_s: float  # host time
    hold: Hold | None
    end: _Event = None
    host_s: float = 0.0
    was_behind: bool = False  # the GPU began it only after all of it was queued
    has_synced: bool = False  # it ends with a wait of the host for it, so was_behind cannot be determined

    @property
    def gpu_s(self) -> float:
        """Seconds from its start to its end on the GPU."""
        return float(self.begin.elapsed_time(self.end)) / 1e3

    @property
    def is_work(self) -> bool:
        """Whether the GPU worked all of that time."""
        if not self.has_synced:
            return self.was_behind
        # A sync within backward is reported only after it.
        return self.phase != BACKWARD and self.hold is not None and self.hold.slept_s(self.begin) > self.hold.host_s


class Work:
    """The measured work of the GPU in one phase."""

    def __init__(self) -> None:
        self.seconds: deque[float] = deque(maxlen=_MAX_MEASURED)
        self.seen = 0  # number of samples that include it
        self.failed = 0  # failed attempts to hold it
        self.watched: Sequence[Part] = ()  # its parts in the last watched step
        self.has_synced = False

    @property
    def usual_s(self) -> float:
        """Usual duration in seconds where it occurs; 0 if unknown."""
        if not self.seconds:
            return 0.0
        # The host may notice the end of its wait late, but never early.
        return min(self.seconds) if self.has_synced else median(self.seconds)

    def hold_s(self, number: int) -> tuple[float, float]:
        """Return the seconds that the GPU has to sleep before a part (0: no sleep), and the host's time for it."""
        if number >= len(self.watched) or len(self.seconds) >= _ENOUGH_HELD:
            return 0.0, 0.0
        host_s, is_possible = self.watched[number].host_s, self.failed < _MAX_FAILED + len(self.seconds)
        if self.watched[number].was_behind or host_s > _MAX_HOLD_S or not is_possible:
            return 0.0, 0.0
        return min(_MAX_HOLD_S, _HOLD * float(2**self.failed) * host_s), host_s


def by_phase(parts: Iterable[Part]) -> dict[str, list[Part]]:
    """Return the parts of each phase, in order."""
    grouped: defaultdict[str, list[Part]] = defaultdict(list)
    for part in parts:
        grouped[part.phase].append(part)
    return grouped
