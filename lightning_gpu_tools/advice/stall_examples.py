"""Synthetic stalled processes and ranks: the sick and healthy examples of causes, also used by tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_gpu_tools.training.phases import FORWARD
from lightning_gpu_tools.training.stall_facts import (
    Activity,
    Collective,
    Frame,
    GroupCalls,
    RankFacts,
    Wait,
    WorkerFacts,
)


def a_stack(*calls: str) -> tuple[Frame, ...]:
    """Return a stack of ``file:function`` calls; those in ``train.py`` are the user's program."""
    split = [call.partition(":") for call in calls]
    return tuple(Frame(file, 7, function, file != "train.py") for file, _, function in split)


def a_worker(number: int, waits_for: Wait | None, state: str = "S", *, awaited: bool = False) -> WorkerFacts:
    """Return a worker of the DataLoader that uses no CPU time."""
    return WorkerFacts(number, Activity(100 + number, state, waits_for, None, 0.0), 0.0, awaited)


def a_call(number: int, operation: str = "all_reduce", size: int | None = 7, *, is_done: bool = False) -> Collective:
    """Return a collective of float32 numbers that has not ended."""
    return Collective(number, operation, size, "float32", is_done)


def a_group(*calls: Collective, name: str = "default_pg", ranks: Sequence[int] = (0, 1)) -> tuple[GroupCalls]:
    """Return the calls of a rank whose only group is this one."""
    return (GroupCalls(f"nccl {name}", name, ranks, calls),)


def a_rank(number: int, **facts: Any) -> RankFacts:
    """Return a rank that has made no progress for 70 s."""
    defaults = {"node": 0, "pid": 100 + number, "epoch": 1, "step": 5, "phase": FORWARD, "stuck_s": 70.0}
    return RankFacts(rank=number, has_stalled=True, **{**defaults, **facts})
