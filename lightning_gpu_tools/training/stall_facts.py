"""What is seen of a training that makes no progress: stacks, processes, ranks. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

# What a thread that does not run waits for, by the system call that it is in.
Wait = Literal["storage", "network", "lock", "pipe", "time", "events", "process"]


class Frame(NamedTuple):
    """A function call on a stack.

    Attributes:
        file: Path of the source.
        line: Where it is in it.
        function: Its name.
        is_library: Whether it is of an installed package or of Python itself, not of the user's program.
    """

    file: str
    line: int
    function: str
    is_library: bool = False

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


class Activity(NamedTuple):
    """What a process or a thread does at a moment.

    Attributes:
        pid: Its number.
        state: The kernel's letter: ``R`` runs, ``S`` waits, ``D`` waits for a device, ``Z`` has ended.
        waits_for: What it waits for; ``None`` if it runs, or if that is unknown.
        target: The file or socket of a system call that reads or writes one; ``None`` if it is another call.
        cpu_s: CPU seconds that it has used.
    """

    pid: int
    state: str
    waits_for: Wait | None
    target: str | None
    cpu_s: float

    @property
    def has_ended(self) -> bool:
        """Whether it is gone, though its parent may not have asked yet."""
        return self.state in "ZX"


class WorkerFacts(NamedTuple):
    """A worker of the DataLoader that is waited for.

    Attributes:
        number: Its number in the loader.
        activity: What it does.
        cpu_share: Share of a core that it has used while it was sampled.
        is_awaited: Whether the next batch has to come from it.
        stack: Its Python stack, innermost last; empty where it could not be asked.
    """

    number: int
    activity: Activity
    cpu_share: float
    is_awaited: bool
    stack: tuple[Frame, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFacts:
    """Where a rank stands, as it has published last.

    Attributes:
        rank: Its number.
        node: The number of its node.
        pid: Its process there.
        epoch: Epochs begun.
        step: Training steps begun.
        phase: What its training thread is doing, as in ``phase_s``.
        stuck_s: For how long it has made no progress.
        is_over: Whether that is longer than it should be.
        silent_s: For how long it has published nothing, if it should have; else 0.
        ended: How its training has ended; ``None`` if it has not.
        collective: Where it waits for other ranks, in words; ``None`` if it does not.
        cause: Why it stands, as it sees that itself; ``None`` before it is over.
        why: The same in words.
        next_step: What to do.
        stack: The innermost calls of its training thread then.
    """

    rank: int
    node: int
    pid: int
    epoch: int
    step: int
    phase: str
    stuck_s: float
    is_over: bool
    silent_s: float = 0.0
    ended: str | None = None
    collective: str | None = None
    cause: str | None = None
    why: str | None = None
    next_step: str | None = None
    stack: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class StallFacts:
    """A training process that makes no progress.

    Attributes:
        phase: What the training thread is doing, as in ``phase_s``, or ``"setup"``.
        stack: Its Python stack, innermost last.
        activity: What the thread does; ``None`` if this is not Linux.
        cpu_share: Share of a core that it has used while it was sampled.
        workers: Those of the loader that is waited for; empty if it waits for none.
        gpu_busy_percent: How busy the GPUs are; ``None`` without any.
        swapped_pages_per_s: Pages that the machine swaps in and out.
        memory_stall_percent: Share of the last ten seconds in which every task of the machine waited for memory; 0
            where the kernel does not report it.
    """

    phase: str
    stack: tuple[Frame, ...] = ()
    activity: Activity | None = None
    cpu_share: float = 0.0
    workers: tuple[WorkerFacts, ...] = ()
    gpu_busy_percent: float | None = None
    swapped_pages_per_s: float = 0.0
    memory_stall_percent: float = 0.0


def users_frame(stack: tuple[Frame, ...]) -> Frame | None:
    """Return the innermost call of the user's program; ``None`` if there is none."""
    return next((frame for frame in reversed(stack) if not frame.is_library), None)
