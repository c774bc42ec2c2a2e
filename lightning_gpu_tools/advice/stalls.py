"""A stall: a time without progress in training, the reason, and the text about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_gpu_tools.advice.cause import Explanation
from lightning_gpu_tools.advice.open_collectives import open_collective, sentence, waits_of, with_open_calls
from lightning_gpu_tools.advice.stall_causes import STALL_CAUSES
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


def explain_process(facts: StallFacts) -> Explanation:
    """Return why a process makes no progress, from its own facts."""
    found = ((name, cause.find(facts)) for name, cause in STALL_CAUSES.items() if cause.find is not None)
    return next(one._replace(cause=name) for name, one in found if one is not None)


def explain_ranks(ranks: Sequence[RankFacts]) -> Explanation | None:
    """Return the rank that the others wait for, and why; ``None`` with one rank."""
    if len(ranks) < 2:
        return None
    held_up = open_collective(ranks)
    ranks = with_open_calls(ranks, held_up)
    for name, cause in STALL_CAUSES.items():
        if cause.find_among_ranks is not None and (found := cause.find_among_ranks(ranks)) is not None:
            details = "" if held_up is None else f" {sentence(held_up, ranks)}"
            return found._replace(cause=found.cause or name, why=found.why + details)
    return None


def headline(phase: str, stuck_s: float, step: int) -> str:
    """Return the first sentence about a stall."""
    return f"Training has made no progress for {format_duration(stuck_s)}, {during(phase)} at step {step}."


def describe_rank(one: RankFacts) -> str:
    """Return the state of a rank: its step, epoch, and what it does or waits for."""
    if one.ended is not None:
        state = f"ended ({printable(one.ended)})"
    elif one.silent_s:
        state = f"silent for {format_duration(one.silent_s)}"
    else:
        state = during(one.phase) if one.collective is None else f"waiting in {printable(one.collective)}"
        if (waits_for := waits_of(one)) is not None:
            state += f"{', waiting' if one.collective is None else ''} for {waits_for}"
    return f"rank {one.rank}: step {one.step} of epoch {one.epoch}, {state}"
