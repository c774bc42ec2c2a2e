"""Time limits, by phase, for training that makes no progress."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from lightning_gpu_tools.training.phases import (
    CALLBACK,
    GARBAGE_COLLECTION,
    LOGGING,
    OUTSIDE_LOOP,
    PAUSES,
    PHASES,
    base_phase,
)
from lightning_gpu_tools.training.stall_facts import SETUP

# Horovod's HOROVOD_STALL_CHECK_TIME_SECONDS: https://horovod.readthedocs.io/en/stable/stall_inspector_include.html
MIN_S = 60.0
# nvidia-resiliency-ext: the checkpoint timeout of its example, and its factor for learned timeouts.
UNKNOWN_S = 600.0
FACTOR = 5.0
# Our defaults from here on.
AGAIN = 4.0  # reported again after 4 times, 16 times, ... as long
_OF_TIMEOUT = 0.75  # torch's timeouts are 10 or 30 minutes, and a rank may be late by some polls
_FIRST_STEPS = 3  # until then, a part of every step may have been seen only once
_MIN_GAP_S = 5.0  # a poll this late was suspended with the training, by a debugger, Ctrl-Z or a scheduler


def limit_s(stall_after_s: float | Literal["auto"], longest_s: float | None, timeout_s: float | None = None) -> float:
    """Return the seconds without progress after which training has stalled.

    ``longest_s`` is the longest duration of the phase so far; ``None`` until it has completed once. After ``timeout_s``
    torch ends a process that waits for others; ``None`` = never.
    """
    if stall_after_s != "auto":
        return stall_after_s
    own_s = UNKNOWN_S if longest_s is None else max(MIN_S, FACTOR * longest_s)
    return own_s if timeout_s is None else min(own_s, _OF_TIMEOUT * timeout_s)


class Patience:
    """Decides whether training has made no progress for too long, with a poll every ``interval_s``."""

    def __init__(
        self, stall_after_s: float | Literal["auto"], interval_s: float, timeout_s: float | None = None
    ) -> None:
        self.stuck_s = 0.0  # time without progress
        self.limit_s = limit_s(stall_after_s, None, timeout_s)  # the longest time allowed
        self._stall_after_s, self._timeout_s = stall_after_s, timeout_s
        self._interval_s = interval_s
        self._mark: object = None
        self._key, self._phase = SETUP, SETUP
        self._since_s = self._polled_s = 0.0
        self._seen: set[str] = set()
        self._longest_s: dict[str, float] = {}
        self._reports = 0

    def poll(self, now_s: float, mark: object, phase: str, since_s: float, steps: int, taken: Collection[str]) -> bool:
        """Return whether training has made progress since the last poll.

        ``mark`` changes with any progress. The training thread has been in ``phase`` since ``since_s``, has begun
        ``steps``, and has spent time in the phases ``taken`` so far.
        """
        late_s = now_s - self._polled_s - self._interval_s
        if self._mark is not None and late_s > _MIN_GAP_S + self._interval_s:
            self._since_s += late_s
        self._polled_s = now_s
        if phase == GARBAGE_COLLECTION:  # even an endless loop makes garbage
            phase = self._phase
        key, mark = _key(phase), (mark, phase)
        self._seen.update({_key(one) for one in taken} - {key})
        if steps > _FIRST_STEPS and key in PHASES and key not in (CALLBACK, LOGGING, *PAUSES):
            self._seen.add(key)
        progress = mark != self._mark
        if progress:
            self._longest_s[self._key] = max(self._longest_s.get(self._key, 0.0), self.stuck_s)
            self._mark, self._key, self._phase, self._reports = mark, key, phase, 0
            self._since_s = min(now_s, since_s)
        self.stuck_s = max(0.0, now_s - self._since_s)
        longest_s = self._longest_s.get(key, 0.0) if key in self._seen else None
        self.limit_s = limit_s(self._stall_after_s, longest_s, self._timeout_s)
        return progress

    @property
    def due_s(self) -> float:
        """Seconds until the next report if nothing changes; negative if it is overdue."""
        return self.limit_s * AGAIN**self._reports - self.stuck_s

    @property
    def has_stalled(self) -> bool:
        """Whether training has stalled."""
        return self.stuck_s >= self.limit_s and base_phase(self._phase) != OUTSIDE_LOOP

    def reported(self) -> None:
        """Suppress reports until the stall has lasted four times as long."""
        self._reports += 1

    def excuse(self) -> None:
        """Restart the count."""
        self._since_s, self.stuck_s = self._polled_s, 0.0


def _key(phase: str) -> str:
    # Each callback and each logger has its own time.
    base = base_phase(phase)
    return phase if base in (CALLBACK, LOGGING) else base
