"""Facts about a training that makes no progress: stacks, processes, ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

# Phases of a training thread beside those of the clock.
SETUP = "setup"  # before the clock of a session runs
TEARDOWN = "teardown"  # after it has stopped

# What a thread that does not run waits for, by the system call that it is in.
Wait = Literal["storage", "network", "lock", "pipe", "time", "events", "process"]


class Frame(NamedTuple):
    """A function call on a stack."""

    file: str
    line: int
    function: str
    is_library: bool = False  # of an installed package or of Python itself, not of the user's program

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


class Activity(NamedTuple):
    """The activity of a process or a thread at a moment."""

    pid: int
    state: str  # R runs, S waits, D waits for a device, Z has ended
    waits_for: Wait | None  # None if it runs, or if that is unknown
    target: str | None  # the file or socket that it reads or writes
    cpu_s: float  # used so far

    @property
    def has_ended(self) -> bool:
        """Whether it is gone."""
        return self.state in "ZX"


class WorkerFacts(NamedTuple):
    """A worker of the DataLoader that is waited for."""

    number: int  # in the loader
    activity: Activity
    cpu_share: float  # of a core, while it was sampled
    is_awaited: bool  # the next batch has to come from it
    stack: tuple[Frame, ...] = ()  # innermost last; empty where it could not be asked


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFacts:
    """Where a rank stands, by the last that it has published."""

    rank: int
    node: int
    pid: int  # on its node
    epoch: int
    step: int
    phase: str  # of its training thread
    stuck_s: float  # without progress
    is_over: bool  # that is longer than it should be
    silent_s: float = 0.0  # without a message that was due
    ended: str | None = None  # how its training has ended
    collective: str | None = None  # where it waits for other ranks, in words
    cause: str | None = None  # by its own judgment, as the next two
    why: str | None = None
    next_step: str | None = None
    stack: Sequence[str] = ()  # the innermost calls of its training thread then

    @property
    def has_completed(self) -> bool:
        """Whether its training has come to its end, without an error."""
        return self.ended == "completed"


@dataclass(frozen=True, kw_only=True, slots=True)
class StallFacts:
    """A training process that makes no progress."""

    phase: str  # of the training thread, or SETUP
    stack: tuple[Frame, ...] = ()  # innermost last
    activity: Activity | None = None  # of the training thread; None if this is not Linux
    cpu_share: float = 0.0  # of a core, while it was sampled
    workers: tuple[WorkerFacts, ...] = ()  # of the loader that is waited for
    gpu_busy_percent: float | None = None
    swapped_pages_per_s: float = 0.0  # by the whole machine
    memory_stall_percent: float = 0.0  # of the last 10 s, for every task; 0 if unknown
    lock_is_held: bool = False  # Python's lock (the GIL), by C code: nothing but phase and stack is known then


def users_frame(stack: tuple[Frame, ...]) -> Frame | None:
    """Return the innermost call of the user's program; ``None`` if there is none."""
    return next((frame for frame in reversed(stack) if not frame.is_library), None)
