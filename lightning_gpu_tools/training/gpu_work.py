"""The GPU's work on the parts of a step, and how long it has to be held so that it can be measured."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

from lightning_gpu_tools.training.phases import BACKWARD

# Our defaults.
_MAX_MEASURED = 64  # times that are kept
_ENOUGH_HELD = 8  # times that the work on a part was measured
_MAX_FAILED = 3  # more than it was measured: a part that waits for the GPU, or fills its queue, cannot be held
_HOLD = 2.0  # times what the host needs, which varies; doubled each time that it was too short
_MAX_HOLD_S = 0.1

_Event = Any  # torch.cuda.Event, which has no types


class Hold(NamedTuple):
    """A sleep of the GPU before a part."""

    since: _Event
    cycles: int
    host_s: float  # that the host needs for the part

    def slept_s(self, until: _Event) -> float:
        """Return how long it was, once the GPU is through with it."""
        return float(self.since.elapsed_time(until)) / 1e3


@dataclass(slots=True)
class Part:
    """All that the host queues in one phase up to the next one, or to its next wait for the GPU."""

    phase: str
    begin: _Event
    begin_s: float  # of the host
    hold: Hold | None
    end: _Event = None
    host_s: float = 0.0
    was_behind: bool = False  # the GPU began with it when all of it was queued
    has_synced: bool = False  # it ends when the host has waited for it, so that nobody can ask for that

    @property
    def gpu_s(self) -> float:
        """From its begin to its end on the GPU."""
        return float(self.begin.elapsed_time(self.end)) / 1e3

    @property
    def is_work(self) -> bool:
        """Whether all of that is the GPU's work."""
        if not self.has_synced:
            return self.was_behind
        # A sync within backward is only reported behind it.
        return self.phase != BACKWARD and self.hold is not None and self.hold.slept_s(self.begin) > self.hold.host_s


class Work:
    """The GPU's work in one phase, so far as it is known."""

    def __init__(self) -> None:
        self.seconds: deque[float] = deque(maxlen=_MAX_MEASURED)
        self.seen = 0  # in how many samples
        self.failed = 0  # attempts to hold it
        self.watched: Sequence[Part] = ()  # its parts in the last step that was watched
        self.has_synced = False

    @property
    def usual_s(self) -> float:
        """How long it takes where it occurs; 0 where that is unknown."""
        if not self.seconds:
            return 0.0
        # The host may notice late that its wait is over, but never early.
        return min(self.seconds) if self.has_synced else median(self.seconds)

    def hold_s(self, number: int) -> tuple[float, float]:
        """Return how long the GPU has to sleep before one of its parts, 0 if not at all, and what the host needs."""
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
