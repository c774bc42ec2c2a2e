"""Which collective does not end, by the calls of each rank."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gpu_tools.advice.collectives import BACKWARD_SYNC, SYNC_DIST
from lightning_gpu_tools.advice.open_collectives import open_collective
from lightning_gpu_tools.advice.stall_examples import a_call, a_group, a_rank
from lightning_gpu_tools.advice.stalls import describe_rank, explain_ranks
from lightning_gpu_tools.training.phases import DATA_LOADING
from lightning_gpu_tools.training.stall_facts import Collective, RankFacts

DONE = a_call(3, is_done=True)
HERE = " in training_step (train.py:5)"
LOADS = {"phase": DATA_LOADING, "cause": "dataset", "why": "It sleeps in __getitem__ (data.py:12)."}


def why(*ranks: RankFacts) -> str:
    found = explain_ranks(ranks)
    assert found is not None
    return found.why


def test_who_waits_where_and_who_is_behind() -> None:
    waiting, behind = a_rank(0, groups=a_group(DONE, a_call(4)), line=HERE), a_rank(1, groups=a_group(DONE), **LOADS)
    assert why(waiting, behind) == (
        "All ranks wait for rank 1, at step 5, while waiting for data. It sleeps in __getitem__ (data.py:12). Rank 0 "
        "waits for all_reduce no. 4 of 7 float32 numbers in training_step (train.py:5); rank 1 has called only 3."
    )
    assert describe_rank(waiting).endswith("in forward, waiting for all_reduce no. 4 of 7 float32 numbers")
    assert describe_rank(behind).endswith("while waiting for data")
    assert "; rank 1 has not called it." in why(waiting, a_rank(1, groups=a_group(DONE, name="tp")))


def test_a_rank_that_has_done_its_part_does_not_wait() -> None:
    """The source of a broadcast has, while the others wait for the last one."""
    broadcast = a_call(4, "broadcast")
    calls = [(DONE, broadcast._replace(is_done=True)), (DONE, broadcast), (DONE,)]
    found = explain_ranks([a_rank(i, groups=a_group(*calls[i], ranks=range(3))) for i in range(3)])
    assert found is not None
    assert found.rank == 2
    assert found.why.endswith(" Rank 1 waits for broadcast no. 4 of 7 float32 numbers; rank 2 has called only 3.")


def test_ranks_that_do_the_same_share_a_part_of_the_sentence() -> None:
    groups = [a_group(DONE, *[a_call(4)] * (rank != 2), ranks=range(4)) for rank in range(4)]
    assert why(*(a_rank(rank, groups=groups[rank]) for rank in range(4))).endswith(
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
    ranks = [a_rank(i, collective=BACKWARD_SYNC, groups=a_group(DONE, one)) for i, one in enumerate((a_call(4), call))]
    found = explain_ranks(ranks)
    assert found is not None
    assert found.cause == "collective_mismatch"
    assert found.why.endswith(f" As no. 4, rank 0 calls all_reduce of 7 float32 numbers; {words}.")


def test_different_calls_of_the_program_are_a_mismatch() -> None:
    calls = (a_call(4), a_call(4, "broadcast"))
    ranks = [a_rank(i, collective=f"{calls[i].operation} in act", groups=a_group(calls[i])) for i in range(2)]
    found = explain_ranks(ranks)
    assert found is not None
    assert found.cause == "collective_mismatch"


def test_of_three_ranks_the_odd_one_is_blamed() -> None:
    calls = [a_call(4), a_call(4, size=8), a_call(4)]
    found = explain_ranks([a_rank(i, groups=a_group(call)) for i, call in enumerate(calls)])
    assert found is not None
    assert (found.cause, found.rank) == ("collective_mismatch", 1)


def test_a_mismatch_counts_although_the_call_has_ended() -> None:
    """NCCL ends some calls that do not match, with wrong numbers."""
    groups = [a_group(a_call(3, name, is_done=True), a_call(4)) for name in ("reduce", "broadcast")]
    assert " As no. 3, rank 0 calls reduce of " in why(*(a_rank(i, groups=groups[i]) for i in range(2)))


def test_ranks_may_pass_different_sizes_to_some_collectives() -> None:
    groups = [a_group(a_call(4, "all_to_all", size)) for size in (2, 3)]
    found = explain_ranks([a_rank(i, groups=groups[i]) for i in range(2)])
    assert found is not None
    assert found.cause == "communication"
    assert "shapes" not in found.next_step


def test_a_known_call_of_lightning_says_more_than_the_mismatch() -> None:
    ranks = [
        a_rank(0, groups=a_group(a_call(4))),
        a_rank(1, collective=SYNC_DIST, groups=a_group(a_call(4, "barrier", None))),
    ]
    found = explain_ranks(ranks)
    assert found is not None
    assert (found.cause, found.rank) == ("collective_on_one_rank", 1)
    assert "As no. 4, rank 0 calls all_reduce" in found.why


def test_the_line_is_that_of_the_call_only_if_calls_wait_where_they_are_made() -> None:
    def said(backend: str) -> str:
        calls = (a_call(4), a_call(4, size=8))
        groups = [(a_group(call)[0]._replace(group=f"{backend} 0"),) for call in calls]
        return why(*(a_rank(i, line=HERE, groups=groups[i]) for i in range(2)))

    assert said("gloo").count(HERE) == 2
    assert HERE not in said("nccl")


def test_a_rank_in_backward_that_has_not_called_it_does_not_wait() -> None:
    groups = a_group(DONE, a_call(4)), a_group(DONE)
    found = explain_ranks([a_rank(i, collective=BACKWARD_SYNC, groups=groups[i]) for i in range(2)])
    assert found is not None
    assert (found.cause, found.rank) == ("code", 1)


def test_groups_are_named_if_there_are_several() -> None:
    pairs = [a_group(DONE, *[a_call(4)] * (rank == 0), name="tp") for rank in range(2)]
    whole = [a_group(a_call(9, is_done=True)) for _ in range(2)]
    assert why(*(a_rank(i, groups=(*pairs[i], *whole[i])) for i in range(2))).endswith(
        " In group tp of ranks 0 and 1, rank 0 waits for all_reduce no. 4 of 7 float32 numbers; rank 1 has called only "
        "3."
    )


def test_ranks_that_wait_for_each_other_in_two_groups() -> None:
    first = (*a_group(DONE, a_call(4), name="tp"), *a_group(DONE))
    second = (*a_group(DONE, name="tp"), *a_group(DONE, a_call(4, "broadcast")))
    assert why(a_rank(0, groups=first), a_rank(1, groups=second)).endswith(
        " In the default group, rank 1 waits for broadcast no. 4 of 7 float32 numbers; rank 0 has called only 3 and "
        "waits for all_reduce no. 4 of 7 float32 numbers in group tp of ranks 0 and 1."
    )


def test_the_group_counts_whose_missing_rank_waits_for_nobody() -> None:
    """Rank 0 waits for rank 1 in one group, and rank 1 in the other for rank 2."""
    ranks = [
        a_rank(0, groups=a_group(a_call(4), name="a", ranks=(0, 1))),
        a_rank(1, groups=(*a_group(DONE, name="a"), *a_group(a_call(2), name="b", ranks=(1, 2)))),
        a_rank(2, groups=a_group(a_call(1, is_done=True), name="b", ranks=(1, 2))),
    ]
    found = explain_ranks(ranks)
    assert found is not None
    assert found.rank == 2
    assert "In group b of ranks 1 and 2, rank 1 waits for" in found.why


def test_without_records_stacks_alone_speak() -> None:
    ranks = [a_rank(0, collective=BACKWARD_SYNC), a_rank(1, phase=DATA_LOADING)]
    assert open_collective(ranks) is None
    assert "has called" not in why(*ranks)
    ended = [a_rank(i, groups=a_group(DONE)) for i in range(2)]
    assert open_collective(ended) is None


PROGRAM = st.lists(st.sampled_from([("all_reduce", 7), ("broadcast", 4), ("barrier", None)]), min_size=1, max_size=8)


def that_ran(program: Sequence[tuple[str, int | None]], steps: Sequence[int]) -> list[RankFacts]:
    """Return ranks of which each has come so far in the same program."""
    ended = min(steps)
    return [
        a_rank(
            rank,
            groups=a_group(
                *(a_call(n + 1, *program[n], is_done=n < ended) for n in range(step)), ranks=range(len(steps))
            ),
        )
        for rank, step in enumerate(steps)
    ]


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
