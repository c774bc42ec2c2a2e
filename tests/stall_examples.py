"""Synthetic stalled processes and ranks, and for each cause some that it explains and similar ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_gpu_tools.advice.collectives import BACKWARD_SYNC
from lightning_gpu_tools.training.phases import DATA_LOADING, FORWARD, LOGGING, VALIDATION
from lightning_gpu_tools.training.stall_facts import (
    Activity,
    Collective,
    Frame,
    GroupCalls,
    RankFacts,
    StallFacts,
    Wait,
    WorkerFacts,
)

Facts = StallFacts | Sequence[RankFacts]


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
    return RankFacts(rank=number, is_over=True, **{**defaults, **facts})


def _loads(*workers: WorkerFacts) -> StallFacts:
    return StallFacts(phase=DATA_LOADING, workers=workers)


def _ranks(*facts: dict[str, Any]) -> tuple[RankFacts, ...]:
    return tuple(a_rank(i, **one) for i, one in enumerate(facts))


_TOKENIZES = a_stack("train.py:tokenize")
_WAITS: dict[str, Any] = {"collective": BACKWARD_SYNC}
_SAVES: dict[str, Any] = {"collective": "barrier in save"}
# By the name of a cause: a process, or ranks, that it explains, and similar ones stalled for another reason.
EXAMPLES: dict[str, tuple[Facts, Facts]] = {
    "blocked_worker": (_loads(a_worker(0, "lock"), a_worker(1, "time", awaited=True)), _loads()),
    "callback": (StallFacts(phase=f"{LOGGING}/WandbLogger"), StallFacts(phase=VALIDATION)),
    "code": (
        StallFacts(phase=FORWARD, gpu_busy_percent=0.0, cpu_share=0.9),
        StallFacts(phase=FORWARD, gpu_busy_percent=100.0, cpu_share=0.9),
    ),
    "collective_mismatch": (
        _ranks(*({**_WAITS, "groups": a_group(a_call(3, is_done=True), a_call(4, size=size))} for size in (7, 6))),
        _ranks(*({**_WAITS, "groups": a_group(a_call(4))} for _ in range(2))),
    ),
    "collective_on_one_rank": (_ranks(_SAVES, _WAITS, _WAITS), _ranks(_SAVES, _SAVES, _SAVES)),
    "communication": (_ranks(_WAITS, _WAITS), _ranks(_WAITS, {"phase": DATA_LOADING})),
    "dataset": (StallFacts(phase=DATA_LOADING), StallFacts(phase=VALIDATION)),
    "dead_worker": (
        _loads(a_worker(0, "events"), a_worker(1, None, "Z")),
        _loads(a_worker(0, "events"), a_worker(1, "network")),
    ),
    "deadlocked_workers": (
        _loads(a_worker(0, "lock"), a_worker(1, "lock")),
        _loads(a_worker(0, "lock"), a_worker(1, "events")),
    ),
    "gpu": (StallFacts(phase=FORWARD, gpu_busy_percent=100.0), StallFacts(phase=FORWARD, gpu_busy_percent=0.0)),
    "held_lock": (
        StallFacts(phase=FORWARD, stack=_TOKENIZES, lock_is_held=True),
        StallFacts(phase=FORWARD, stack=_TOKENIZES),
    ),
    "rank_left": (_ranks(_WAITS, {"ended": "stopped by SystemExit at step 3"}), _ranks(_WAITS, {"ended": "completed"})),
    "rank_silent": (_ranks(_WAITS, {"silent_s": 30.0}), _ranks(_WAITS, {})),
    "storage": (
        StallFacts(phase=VALIDATION, activity=Activity(1, "D", "storage", "/nfs/x", 0.0)),
        StallFacts(phase=VALIDATION, activity=Activity(1, "S", "network", None, 0.0)),
    ),
    "swap": (
        StallFacts(phase=FORWARD, swapped_pages_per_s=30_000.0),
        StallFacts(phase=FORWARD, swapped_pages_per_s=300.0),
    ),
    "uneven_batches": (_ranks(_WAITS, {**_WAITS, "epoch": 2}), _ranks(_WAITS, _WAITS)),
}
