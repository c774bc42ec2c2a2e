"""The collective that does not complete, from the calls of each rank."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gpu_tools.advice.cause import Explanation
from lightning_gpu_tools.advice.collectives import BACKWARD_SYNC, SYNC_DIST
from lightning_gpu_tools.advice.open_collectives import open_collective
from lightning_gpu_tools.advice.stall_examples import a_call, a_group, a_rank
from lightning_gpu_tools.advice.stalls import describe_rank, explain_ranks
from lightning_gpu_tools.training.phases import DATA_LOADING
from lightning_gpu_tools.training.stall_facts import Collective, GroupCalls, RankFacts

DONE = a_call(3, is_done=True)
HERE = " in training_step (train.py:5)"
LOADS = {"phase": DATA_LOADING, "cause": "dataset", "why": "It sleeps in __getitem__ (data.py:12)."}


def explained(*ranks: RankFacts) -> Explanation:
    found = explain_ranks(ranks)
    assert found is not None
    return found


def of_calls(*groups: tuple[GroupCalls, ...], **facts: str) -> Explanation:
    """Return why ranks with these calls have stalled."""
    return explained(*(a_rank(rank, groups=one, **facts) for rank, one in enumerate(groups)))


def test_ranks_that_wait_and_the_rank_behind_are_named() -> None:
    waiting, behind = a_rank(0, groups=a_group(DONE, a_call(4)), line=HERE), a_rank(1, groups=a_group(DONE), **LOADS)
    assert explained(waiting, behind).cause == "dataset"
    assert explained(waiting, behind).why == (
        "All ranks wait for rank 1, at step 5, while waiting for data. It sleeps in __getitem__ (data.py:12). Rank 0 "
        "waits for all_reduce no. 4 of 7 float32 numbers in training_step (train.py:5); rank 1 has called only 3."
    )
    assert describe_rank(waiting).endswith("in forward, waiting for all_reduce no. 4 of 7 float32 numbers")
    assert describe_rank(behind).endswith("while waiting for data")
    assert "; rank 1 has not called it." in explained(waiting, a_rank(1, groups=a_group(DONE, name="tp"))).why


def test_a_rank_that_has_done_its_part_does_not_wait() -> None:
    """The source of a broadcast is done, while the others wait for the last one."""
    broadcast = a_call(4, "broadcast")
    calls = (DONE, broadcast._replace(is_done=True)), (DONE, broadcast), (DONE,)
    found = of_calls(*(a_group(*one, ranks=range(3)) for one in calls))
    assert found.rank == 2
    assert found.why.endswith(" Rank 1 waits for broadcast no. 4 of 7 float32 numbers; rank 2 has called only 3.")


def test_ranks_that_do_the_same_share_a_part_of_the_sentence() -> None:
    found = of_calls(*(a_group(DONE, *[a_call(4)] * (rank != 2), ranks=range(4)) for rank in range(4)))
    assert found.why.endswith(
        " Ranks 0, 1 and 3 wait for all_reduce no. 4 of 7 float32 numbers; rank 2 has called only 3."
    )


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (a_call(4, "broadcast", 1), "rank 1 calls broadcast of 1 float32 number"),
        (a_call(4, size=8), "rank 1 calls all_reduce of 8 float32 numbers"),
        (a_call(4)._replace(dtype="int64"), "rank 1 calls all_reduce of 7 int64 numbers"),
        (a_call(4, "barrier", None), "rank 1 calls barrier"),
    ],
)
def test_a_mismatch_is_named_that_stacks_do_not_show(call: Collective, words: str) -> None:
    found = of_calls(a_group(DONE, a_call(4)), a_group(DONE, call), collective=BACKWARD_SYNC)
    assert found.cause == "collective_mismatch"
    assert found.why.endswith(f" As no. 4, rank 0 calls all_reduce of 7 float32 numbers; {words}.")


def test_different_calls_of_the_program_are_a_mismatch() -> None:
    calls = (a_call(4), a_call(4, "broadcast"))
    found = explained(*(a_rank(i, collective=f"{calls[i].operation} in act", groups=a_group(calls[i])) for i in (0, 1)))
    assert found.cause == "collective_mismatch"


def test_of_three_ranks_the_odd_one_is_blamed() -> None:
    found = of_calls(*map(a_group, (a_call(4), a_call(4, size=8), a_call(4))))
    assert (found.cause, found.rank) == ("collective_mismatch", 1)


def test_a_mismatch_counts_although_the_call_has_ended() -> None:
    """NCCL ends some calls that do not match, with wrong numbers."""
    found = of_calls(*(a_group(a_call(3, name, is_done=True), a_call(4)) for name in ("reduce", "broadcast")))
    assert " As no. 3, rank 0 calls reduce of " in found.why


def test_ranks_may_pass_different_sizes_to_some_collectives() -> None:
    found = of_calls(*(a_group(a_call(4, "all_to_all", size)) for size in (2, 3)))
    assert found.cause == "communication"
    assert "shapes" not in found.next_step


def test_a_known_call_of_lightning_says_more_than_the_mismatch() -> None:
    found = explained(
        a_rank(0, groups=a_group(a_call(4))),
        a_rank(1, collective=SYNC_DIST, groups=a_group(a_call(4, "barrier", None))),
    )
    assert (found.cause, found.rank) == ("collective_on_one_rank", 1)
    assert "As no. 4, rank 0 calls all_reduce" in found.why


@pytest.mark.parametrize(("backend", "lines"), [("gloo", 2), ("nccl", 0)])
def test_the_line_is_that_of_the_call_only_if_calls_wait_where_they_are_made(backend: str, lines: int) -> None:
    groups = (a_group(call)[0]._replace(group=f"{backend} 0") for call in (a_call(4), a_call(4, size=8)))
    assert of_calls(*((one,) for one in groups), line=HERE).why.count(HERE) == lines


def test_a_rank_in_backward_that_has_not_called_it_does_not_wait() -> None:
    found = of_calls(a_group(DONE, a_call(4)), a_group(DONE), collective=BACKWARD_SYNC)
    assert (found.cause, found.rank) == ("code", 1)


def test_ranks_that_wait_for_each_other_in_two_groups() -> None:
    first = (*a_group(DONE, a_call(4), name="tp"), *a_group(DONE))
    second = (*a_group(DONE, name="tp"), *a_group(DONE, a_call(4, "broadcast")))
    assert of_calls(first, second).why.endswith(
        " In the default group, rank 1 waits for broadcast no. 4 of 7 float32 numbers; rank 0 has called only 3 and "
        "waits for all_reduce no. 4 of 7 float32 numbers in group tp of ranks 0 and 1."
    )


def test_the_group_counts_whose_missing_rank_waits_for_nobody() -> None:
    """Rank 0 waits for rank 1 in one group, and rank 1 in the other for rank 2."""
    found = of_calls(
        a_group(a_call(4), name="a", ranks=(0, 1)),
        (*a_group(DONE, name="a"), *a_group(a_call(2), name="b", ranks=(1, 2))),
        a_group(a_call(1, is_done=True), name="b", ranks=(1, 2)),
    )
    assert found.rank == 2
    assert "In group b of ranks 1 and 2, rank 1 waits for" in found.why


def test_without_records_the_stacks_decide() -> None:
    ranks = [a_rank(0, collective=BACKWARD_SYNC), a_rank(1, phase=DATA_LOADING)]
    assert open_collective(ranks) is None
    assert "has called" not in explained(*ranks).why
    assert open_collective([a_rank(i, groups=a_group(DONE)) for i in range(2)]) is None


PROGRAM = st.lists(st.sampled_from([("all_reduce", 7), ("broadcast", 4), ("barrier", None)]), min_size=1, max_size=8)


def that_ran(program: Sequence[tuple[str, int | None]], steps: Sequence[int]) -> list[RankFacts]:
    """Return ranks that have each made these many calls of the same program."""
    ended, ranks = min(steps), []
    for rank, step in enumerate(steps):
        calls = [a_call(n + 1, *program[n], is_done=n < ended) for n in range(step)]
        ranks.append(a_rank(rank, groups=a_group(*calls, ranks=range(len(steps)))))
    return ranks


@given(PROGRAM, st.data())
def test_of_ranks_that_run_the_same_program_those_behind_are_missing(
    program: list[tuple[str, int | None]], data: st.DataObject
) -> None:
    steps = data.draw(st.lists(st.integers(0, len(program)), min_size=2, max_size=5))
    found, last = open_collective(that_ran(program, steps)), min(steps)
    if max(steps) == last:
        assert found is None
    elif last:  # a rank without a call has no record
        assert found is not None
        assert not found.differs
        assert found.number == last + 1
        assert found.missing == {rank: last for rank, step in enumerate(steps) if step == last}


@given(PROGRAM, PROGRAM, st.data())
def test_the_order_of_ranks_does_not_matter(
    program: list[tuple[str, int | None]], other: list[tuple[str, int | None]], data: st.DataObject
) -> None:
    ranks = that_ran(program, data.draw(st.lists(st.integers(0, len(program)), min_size=2, max_size=4)))
    (deviant,) = that_ran(other, [len(other)])
    ranks.append(a_rank(len(ranks), groups=deviant.groups))
    assert explain_ranks(data.draw(st.permutations(ranks))) == explain_ranks(ranks)
