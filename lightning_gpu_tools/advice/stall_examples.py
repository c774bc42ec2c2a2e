"""Synthetic stalled processes and ranks: the sick and healthy examples of causes, also used by tests."""

from __future__ import annotations

from typing import Any

from lightning_gpu_tools.training.phases import FORWARD
from lightning_gpu_tools.training.stall_facts import Call, Frame, GroupCalls, ProcessFacts, RankFacts, StallFacts


def a_stack(*calls: str) -> tuple[Frame, ...]:
    """Return a stack of ``file:function`` calls; those in ``train.py`` are the user's program."""
    split = [call.partition(":") for call in calls]
    return tuple(Frame(file, 7, function, file != "train.py") for file, _, function in split)


def a_stall(phase: str = FORWARD, *ranks: RankFacts, **facts: Any) -> StallFacts:
    """Return a stalled training process that waits in a function of the user."""
    defaults = {"process": ProcessFacts(100, stack=a_stack("train.py:wait"))}
    return StallFacts(phase=phase, ranks=ranks, **{**defaults, **facts})


def a_rank(number: int, *calls: Call, **facts: Any) -> RankFacts:
    """Return a stalled rank with these calls in the default group."""
    defaults: dict[str, Any] = {"node": 0, "pid": 100 + number, "epoch": 1, "step": 5, "phase": FORWARD}
    if calls:
        defaults["groups"] = (GroupCalls("nccl 0", "", calls),)
        defaults["waits_in"] = next((call.text for call in calls if not call.is_done), None)
    return RankFacts(rank=number, has_stalled=True, **{**defaults, **facts})
