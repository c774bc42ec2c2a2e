"""A stall: a time without progress in training, the reason, and the text about it."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_gpu_tools.advice.causes.order import STALL_CAUSES
from lightning_gpu_tools.advice.findings import Finding
from lightning_gpu_tools.advice.stall_words import during
from lightning_gpu_tools.training.stall_facts import RankFacts, StallFacts
from lightning_gpu_tools.units import format_duration, printable


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


def explain(facts: StallFacts) -> Finding:
    """Return why training makes no progress, by the first cause that applies."""
    return next(finding for cause in STALL_CAUSES.values() for finding in cause.find(facts))


def headline(phase: str, stuck_s: float, step: int) -> str:
    """Return the first sentence about a stall."""
    return f"Training has made no progress for {format_duration(stuck_s)}, {during(phase)} at step {step}."


def describe_rank(rank: RankFacts) -> str:
    """Return the state of a rank: its step, epoch, and what it does or waits for."""
    if rank.ended is not None:
        state = f"ended ({printable(rank.ended)})"
    elif rank.silent_s:
        state = f"silent for {format_duration(rank.silent_s)}"
    else:
        state = during(rank.phase) if rank.waits_in is None else f"waiting in {printable(rank.waits_in)}"
    return f"rank {rank.rank}: step {rank.step} of epoch {rank.epoch}, {state}"
