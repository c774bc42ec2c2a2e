"""Facts about training that makes no progress: its processes and its ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

# Phases of a training thread in addition to those of the clock.
SETUP = "setup"  # before the clock of a session starts
TEARDOWN = "teardown"  # after the clock has stopped

Wait = Literal["storage", "lock"]


class Frame(NamedTuple):
    """A function call on a stack."""

    file: str
    line: int
    function: str
    is_library: bool = False  # in an installed package or Python itself, not in the user's program

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


class ProcessFacts(NamedTuple):
    """The training process, or a worker of its DataLoader."""

    pid: int
    state: str = "S"  # R: running, S: waiting, D: waiting for a device, Z or X: ended
    waits_for: Wait | None = None  # None if it is running, waits for something else, or if unknown
    file: str | None = None  # that it reads or writes
    cpu_share: float = 0.0  # of one core, while it was sampled
    stack: Sequence[Frame] = ()  # of its main thread, innermost call last; empty if unknown

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended."""
        return self.state in "ZX"


class Call(NamedTuple):
    """A collective that a rank has called, from torch's record."""

    number: int  # in its process group, from 1
    text: str  # what has to be the same on every rank: "all_reduce of 7 float32 numbers"
    is_done: bool


class GroupCalls(NamedTuple):
    """The last collectives that a rank has called in one process group."""

    group: str  # the same on all its ranks
    description: str  # empty for the default group
    calls: Sequence[Call]  # by number


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFacts:
    """The state of a rank according to its last message."""

    rank: int
    node: int
    pid: int  # on its node
    epoch: int
    step: int
    phase: str  # of its training thread
    epoch_steps: int = 0  # steps of its last complete epoch; 0 before there is one
    has_stalled: bool = False
    silent_s: float = 0.0  # time without a message that was due
    ended: str | None = None  # how its training ended
    # From here on, known once it has stalled:
    waits_in: str | None = None  # the collective in which it waits for other ranks
    line: str = ""  # its innermost line of the user's program, as words: " in training_step (train.py:31)"
    groups: Sequence[GroupCalls] = ()  # empty without torch's record
    why: str = ""  # by its own facts, like the next one
    next_step: str = ""
    stack: Sequence[str] = ()  # its innermost calls


@dataclass(frozen=True, kw_only=True, slots=True)
class StallFacts:
    """A training process that makes no progress."""

    phase: str  # of the training thread
    process: ProcessFacts
    workers: Sequence[ProcessFacts] = ()  # of the loader that training is waiting for
    awaited_worker: int = 0  # the number of the worker that has to deliver the next batch
    memory_stall_percent: float = 0.0  # of the last 10 s, in which every task of the machine waited for memory
    ranks: Sequence[RankFacts] = ()  # all of them, once each has stalled, left or fallen silent
