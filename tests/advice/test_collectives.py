"""The collective that does not complete, from the calls of each rank."""

from __future__ import annotations

import pytest

from lightning_gpu_tools.advice.diagnosis import explain_stall
from lightning_gpu_tools.advice.examples import a_rank, a_stack, a_stall
from lightning_gpu_tools.advice.findings import Finding
from lightning_gpu_tools.advice.stalls import collective_of
from lightning_gpu_tools.training.phases import FORWARD, RANK_WAIT
from lightning_gpu_tools.training.stall_facts import Call, GroupCalls, RankFacts

REDUCE, BROADCAST = "all_reduce of 7 float32 numbers", "broadcast of 4 float32 numbers"
DONE, OPEN = Call(3, REDUCE, True), Call(4, REDUCE, False)


def explained(*ranks: RankFacts) -> Finding:
    return explain_stall(a_stall(FORWARD, *ranks))


def of_groups(rank: int, *groups: GroupCalls) -> RankFacts:
    calls = [call for group in groups for call in group.calls if not call.is_done]
    return a_rank(rank, groups=groups, waits_in=calls[0].text if calls else None)


def test_waiting_ranks_and_the_missing_rank_are_named() -> None:
    found = explained(a_rank(0, DONE, OPEN), a_rank(1, DONE), a_rank(2, DONE, OPEN))
    assert (found.cause, found.evidence.get("rank")) == ("rank_behind", 1)
    assert found.why.endswith(f" Collective no. 4: ranks 0 and 2 called {REDUCE}; rank 1 did not call it.")


@pytest.mark.parametrize("text", [BROADCAST, "all_reduce of 8 float32 numbers", "all_reduce of 7 int64 numbers"])
def test_calls_that_differ_are_named(text: str) -> None:
    found = explained(a_rank(0, DONE, OPEN), a_rank(1, DONE, Call(4, text, False)))
    assert (found.cause, found.evidence.get("rank")) == ("collective", None)
    assert found.why.endswith(f" Collective no. 4: rank 0 called {REDUCE}; rank 1 called {text}.")
    assert explained(a_rank(0, OPEN), a_rank(1, Call(4, text, False)), a_rank(2, OPEN)).evidence["rank"] == 1


def test_a_difference_counts_although_the_call_has_ended() -> None:
    """NCCL ends some calls that do not match, with wrong numbers."""
    found = explained(a_rank(0, DONE, OPEN), a_rank(1, Call(3, BROADCAST, True), OPEN))
    assert found.cause == "collective"
    assert "Collective no. 3:" in found.why


def test_the_group_counts_whose_missing_rank_waits_for_nobody() -> None:
    """Rank 0 waits for rank 1 in one group, and rank 1 in the other for rank 2."""
    found = explained(
        of_groups(0, GroupCalls("nccl 1", "a", [OPEN])),
        of_groups(1, GroupCalls("nccl 1", "a", [DONE]), GroupCalls("nccl 2", "b", [OPEN])),
        of_groups(2, GroupCalls("nccl 2", "b", [DONE])),
    )
    assert found.evidence.get("rank") == 2
    assert f"Collective no. 4 of group b: rank 1 called {REDUCE}; rank 2 did not call it." in found.why


@pytest.mark.parametrize(
    ("stack", "phase", "groups", "collective"),
    [
        (("train.py:hook", "torch/distributed/distributed_c10d.py:barrier"), FORWARD, (), "barrier"),
        (("torch/autograd/graph.py:_engine_run_backward",), FORWARD, (), "backward"),
        (("train.py:step",), f"{RANK_WAIT}/training step", (), "backward"),
        (("train.py:step",), FORWARD, (), None),
    ],
)
def test_the_collective_of_a_rank(
    stack: tuple[str, ...], phase: str, groups: tuple[GroupCalls, ...], collective: str | None
) -> None:
    assert collective_of(a_stack(*stack), phase, groups) == collective
