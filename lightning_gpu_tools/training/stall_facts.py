"""Facts about training that makes no progress: stacks, processes, ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

# Phases of a training thread in addition to those of the clock.
SETUP = "setup"  # before the clock of a session starts
TEARDOWN = "teardown"  # after the clock has stopped

# The reason why a thread sleeps, from its current system call.
Wait = Literal["storage", "network", "lock", "file lock", "pipe", "time", "events", "process"]


class Frame(NamedTuple):
    """A function call on a stack."""

    file: str
    line: int
    function: str
    is_library: bool = False  # in an installed package or Python itself, not in the user's program

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


class Activity(NamedTuple):
    """The activity of a process or a thread at one moment."""

    pid: int
    state: str  # R: running, S: waiting, D: waiting for a device, Z: ended
    waits_for: Wait | None  # None if it is running, or if unknown
    target: str | None  # the file or socket that it is reading, writing or locking
    cpu_s: float  # CPU seconds used so far

    @property
    def has_ended(self) -> bool:
        """Whether the process or thread has ended."""
        return self.state in "ZX"


class WorkerFacts(NamedTuple):
    """A worker of the DataLoader that training is waiting for."""

    number: int  # within the loader
    activity: Activity
    cpu_share: float  # of one core, while it was sampled
    is_awaited: bool  # the next batch has to come from this worker
    stack: tuple[Frame, ...] = ()  # innermost last; empty if it could not be sampled


class Collective(NamedTuple):
    """A collective that a rank has called, from torch's record."""

    number: int  # in its process group, from 1
    operation: str  # such as "all_reduce"
    size: int | None  # number of elements that this rank passes; None if it passes none
    dtype: str  # of these
    is_done: bool


class GroupCalls(NamedTuple):
    """The last collectives that a rank has called in one process group."""

    group: str  # the same on all its ranks
    description: str
    ranks: Sequence[int]  # in the group; empty if unknown
    calls: Sequence[Collective]  # by number

    @property
    def first_open(self) -> Collective | None:
        """The first collective that has not completed."""
        return next((call for call in self.calls if not call.is_done), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFacts:
    """The state of a rank according to its last published facts."""

    rank: int
    node: int
    pid: int  # on its node
    epoch: int
    step: int
    phase: str  # of its training thread
    stuck_s: float  # time without progress
    has_stalled: bool  # whether stuck_s exceeds the limit
    epoch_steps: int = 0  # steps of its last complete epoch; 0 before there is one
    silent_s: float = 0.0  # time without a message that was due
    ended: str | None = None  # how its training ended
    collective: str | None = None  # description of where it waits for other ranks
    line: str = ""  # the innermost call of the user's program, as words at the end of a sentence
    groups: Sequence[GroupCalls] = ()  # by torch's record, once the limit has passed; empty if there is none
    cause: str | None = None  # by its own diagnosis, like the next two
    why: str | None = None
    next_step: str | None = None
    stack: Sequence[str] = ()  # the innermost calls of its training thread at that time

    @property
    def has_completed(self) -> bool:
        """Whether its training ended without an error."""
        return self.ended == "completed"


@dataclass(frozen=True, kw_only=True, slots=True)
class StallFacts:
    """A training process that makes no progress."""

    phase: str  # of the training thread, or SETUP
    stack: tuple[Frame, ...] = ()  # innermost last
    activity: Activity | None = None  # of the training thread; None outside Linux
    cpu_share: float = 0.0  # of one core, while it was sampled
    workers: tuple[WorkerFacts, ...] = ()  # of the loader that training is waiting for
    gpu_busy_percent: float | None = None
    swapped_pages_per_s: float = 0.0  # on the whole machine
    memory_stall_percent: float = 0.0  # of the last 10 s, with all tasks stalled; 0 if unknown


def users_frame(stack: tuple[Frame, ...]) -> Frame | None:
    """Return the innermost call in the user's program; ``None`` if there is none."""
    return next((frame for frame in reversed(stack) if not frame.is_library), None)
