"""A stall: a time without progress in training, and the words for it: of processes, their lines, and phases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_gpu_tools.training.phases import CALLBACK, LOGGING, PHASES, TRAINING_STEP
from lightning_gpu_tools.training.stall_facts import SETUP, TEARDOWN, Frame, ProcessFacts, RankFacts
from lightning_gpu_tools.units import format_duration, printable

_COMPUTES = 0.2  # our default, in cores: a process that uses less is waiting


@dataclass(frozen=True, kw_only=True, slots=True)
class Stall:
    """A time in which training made no progress for longer than the limit.

    Attributes:
        began_at: Start time, ISO 8601, UTC.
        lasted_s: Duration, so far if it is not over; a lower bound if the run was killed during the stall.
        is_over: Whether training continued.
        step: Number of training steps begun.
        phase: Phase of the training thread, as in ``phase_s``, or ``"setup"`` or ``"teardown"``.
        cause: Cause in one word, such as ``blocked_worker``.
        why: Reason, in sentences: the process or rank that waits, and what for.
        next_step: What to do.
        rank: Rank that the others waited for; ``None`` if there is none.
        stack: Python stack of that rank's training thread, or of the reporting rank's, innermost call last.
        ranks: State of each rank as text, for at most 64 ranks; empty with one rank.
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


def headline(phase: str, stuck_s: float, step: int) -> str:
    """Return the first sentence about a stall."""
    return f"Training has made no progress for {format_duration(stuck_s)}, {phase_phrase(phase)} at step {step}."


def describe_rank(rank: RankFacts) -> str:
    """Return the state of a rank: its step, epoch, and what it does or waits for."""
    if rank.ended is not None:
        state = f"ended ({printable(rank.ended)})"
    elif rank.silent_s:
        state = f"silent for {format_duration(rank.silent_s)}"
    else:
        state = phase_phrase(rank.phase) if rank.waits_in is None else f"waiting in {printable(rank.waits_in)}"
    return f"rank {rank.rank}: step {rank.step} of epoch {rank.epoch}, {state}"


def is_idle(process: ProcessFacts) -> bool:
    """Return whether a process waits instead of computing."""
    return process.cpu_share < _COMPUTES


def activity_phrase(process: ProcessFacts) -> str:
    """Return a process's activity and its source line: ``"waits for a lock in __getitem__ (data.py:41)"``."""
    if process.waits_for == "storage":
        activity = "waits for storage" + (f" ({printable(process.file)})" if process.file else "")
    elif not is_idle(process):
        activity = f"computes ({100 * process.cpu_share:.0f}% of a core)"
    else:
        activity = "waits for a lock" if process.waits_for == "lock" else "waits"
    return activity + in_function(process.stack)


def in_function(stack: Sequence[Frame]) -> str:
    """Return the innermost call in the user's program: ``" in __getitem__ (data.py:41)"``; empty without a stack."""
    frame = next((frame for frame in reversed(stack) if not frame.is_library), stack[-1] if stack else None)
    return "" if frame is None else f" in {printable(frame.function)} ({printable(frame.file)}:{frame.line})"


def phase_phrase(phase: str) -> str:
    """Return a phase as a phrase: ``"while waiting for data"``."""
    base, _, name = phase.partition("/")
    if name and base in (CALLBACK, LOGGING, TRAINING_STEP):
        return f"in {printable(name)}"
    words = {SETUP: "during setup", TEARDOWN: "after its last step", TRAINING_STEP: "in the training step"}
    label = PHASES[base].label if base in PHASES else printable(base)
    return words.get(base) or (f"while {label}" if label.split()[0].endswith("ing") else f"in {label}")
