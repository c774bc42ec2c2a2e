"""When a training that makes no progress has stalled. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_gpu_tools.training.phases import (
    CALLBACK,
    GARBAGE_COLLECTION,
    LOGGING,
    OUTSIDE_LOOP,
    PHASES,
    base_phase,
)
from lightning_gpu_tools.training.stall_facts import Frame

# What a session is in before its clock runs, and when it has stopped.
SETUP = "setup"
TEARDOWN = "teardown"
# Horovod's HOROVOD_STALL_CHECK_TIME_SECONDS: https://horovod.readthedocs.io/en/stable/stall_inspector_include.html
MIN_S = 60.0
# The section timeout for checkpoints in the examples of nvidia-resiliency-ext's fault tolerance package: ten minutes.
UNKNOWN_S = 600.0
# The same package's safety factor for timeouts that it learns from the longest time it has seen.
FACTOR = 5.0
# Our default: again at 4 times, 16 times, ... as long.
AGAIN = 4.0
# Our default: so many steps have begun when what belongs to every step has been done at least twice.
_FIRST_STEPS = 3
# Our default: a poll that comes this much later than it should was held up, and so was the training, by whoever stopped
# the process: a debugger, Ctrl-Z, a scheduler.
_MIN_GAP_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Stall:
    """A time in which a training made no progress for longer than it should have.

    Attributes:
        began_at: Since when, ISO 8601, UTC.
        lasted_s: How long, up to now while it lasts.
        is_over: Whether the training went on.
        step: Training steps begun.
        phase: What the training thread was doing, as in ``phase_s``, or ``"setup"`` or ``"teardown"``.
        cause: One word, as ``blocked_worker``.
        why: The reason, with who waits for what.
        next_step: What to do.
        rank: The rank that the others waited for; ``None`` if there is none.
        stack: The Python stack of the training thread of that rank, or of the one that reports, innermost call last.
        ranks: Where each of at most 64 ranks stood, in words; empty with one rank.
    """

    began_at: str
    lasted_s: float
    is_over: bool
    step: int
    phase: str
    cause: str
    why: str
    next_step: str
    rank: int | None = None
    stack: tuple[str, ...] = ()
    ranks: tuple[str, ...] = ()


def limit_s(stall_after_s: float | Literal["auto"], longest_s: float | None) -> float:
    """Return after how long without progress a training has stalled.

    Args:
        stall_after_s: What the user wants.
        longest_s: The longest that this phase has taken; ``None`` as long as it has not been seen to its end.
    """
    if stall_after_s != "auto":
        return stall_after_s
    return UNKNOWN_S if longest_s is None else max(MIN_S, FACTOR * longest_s)


class Patience:
    """Decides when a training has stood still for too long, by what is polled of it.

    Args:
        stall_after_s: What the user wants; see ``GPUUtilizationMonitor``.
        interval_s: How often it is polled.

    Attributes:
        stuck_s: For how long the training has made no progress.
        limit_s: How long it may.
    """

    def __init__(self, stall_after_s: float | Literal["auto"], interval_s: float) -> None:
        self.stuck_s = 0.0
        self.limit_s = limit_s(stall_after_s, None)
        self._stall_after_s = stall_after_s
        self._interval_s = interval_s
        self._mark: object = None
        self._key, self._phase = SETUP, SETUP
        self._since_s = self._polled_s = 0.0
        self._seen: set[str] = set()
        self._longest_s: dict[str, float] = {}
        self._reports = 0

    def poll(self, now_s: float, mark: object, phase: str, since_s: float, steps: int, taken: Collection[str]) -> bool:
        """Take in what is seen; return whether the training has made progress since the last poll.

        Args:
            now_s: The time.
            mark: What differs as soon as there is progress: a count of steps, hooks, batches.
            phase: What the training thread is doing.
            since_s: Since when, by the same clock.
            steps: Training steps begun.
            taken: The phases that have taken any time so far.
        """
        late_s = now_s - self._polled_s - self._interval_s
        if self._mark is not None and late_s > _MIN_GAP_S + self._interval_s:
            self._since_s += late_s
        self._polled_s = now_s
        if phase == GARBAGE_COLLECTION:  # also a loop without end makes garbage
            phase = self._phase
        key, mark = _key(phase), (mark, phase)
        self._seen.update({_key(one) for one in taken} - {key})
        if steps > _FIRST_STEPS and _is_in_every_step(key):
            self._seen.add(key)
        progress = mark != self._mark
        if progress:
            self._longest_s[self._key] = max(self._longest_s.get(self._key, 0.0), self.stuck_s)
            self._mark, self._key, self._phase, self._reports = mark, key, phase, 0
            self._since_s = min(now_s, since_s)
        self.stuck_s = max(0.0, now_s - self._since_s)
        longest_s = self._longest_s.get(key, 0.0) if key in self._seen else None
        self.limit_s = limit_s(self._stall_after_s, longest_s)
        return progress

    @property
    def due_s(self) -> float:
        """In how many seconds there is something to say if nothing changes; negative if it is overdue."""
        return self.limit_s * AGAIN**self._reports - self.stuck_s

    @property
    def is_over(self) -> bool:
        """Whether the training has stood still for too long."""
        return self.stuck_s >= self.limit_s and base_phase(self._phase) != OUTSIDE_LOOP

    def reported(self) -> None:
        """Say nothing more until it has lasted four times as long."""
        self._reports += 1

    def excuse(self) -> None:
        """Begin to count anew: what takes long is no stall."""
        self._since_s, self.stuck_s = self._polled_s, 0.0


def _key(phase: str) -> str:
    """Return under which name the time that a phase takes is remembered: callbacks and loggers by their own."""
    base = base_phase(phase)
    return phase if base in (CALLBACK, LOGGING) else base


def _is_in_every_step(key: str) -> bool:
    return key in PHASES and PHASES[key].group != "pause" and key not in (CALLBACK, LOGGING)


# torch.compile at work; while what it has compiled runs, others of its files are on the stack.
_COMPILES = (
    "torch/_dynamo/convert_frame.py",
    "torch/_inductor/graph.py",
    "torch/_inductor/scheduler.py",
    "torch/_inductor/async_compile.py",
    "torch/_inductor/select_algorithm.py",
    "torch/_inductor/runtime/triton_heuristics.py",
    "triton/compiler/",
)
# A person is asked.
_ASKS = ("/pdb.py", "/bdb.py", "pydevd", "debugpy", "/pudb/", "/ipdb/", "/prompt_toolkit/", "/ipykernel/")
_INNERMOST = 12


def is_excused(stack: Sequence[Frame]) -> bool:
    """Return whether a thread that seems to hang compiles, or waits for a person at a debugger or in a notebook."""
    files = [frame.file.replace("\\", "/") for frame in stack]
    if any(part in file for file in files for part in _COMPILES):
        return True
    # A notebook has its kernel at the outer end of each stack, and a debugger is there while it does not stop.
    users = [i for i, frame in enumerate(stack) if not frame.is_library]
    inner = [f"/{file}" for file in files[max([*users, len(files) - _INNERMOST, 0]) :]]
    return any(part in file for file in inner for part in _ASKS)
