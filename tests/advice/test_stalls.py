"""Stalls: how long each phase may take, excuses, the words for what is seen, and the collective that waits."""

from typing import Any

import pytest
from synthetic import a_rank, a_stack, a_stall

from lightning_gpu_tools.advice.diagnosis import explain_stall
from lightning_gpu_tools.advice.findings import Finding
from lightning_gpu_tools.advice.stalls import FACTOR, MIN_S, RARE_S, Patience, collective_of, is_excused
from lightning_gpu_tools.training.phases import (
    CHECKPOINT,
    DATA_LOADING,
    FORWARD,
    GARBAGE_COLLECTION,
    OUTSIDE_LOOP,
    RANK_WAIT,
    VALIDATION,
)
from lightning_gpu_tools.training.stall_facts import Call, Frame, GroupCalls, ProcessFacts, RankFacts

INTERVAL_S = 5.0


class Run:
    """A training that is polled."""

    def __init__(self, stall_after_s: Any = "auto", steps: int = 10) -> None:
        self.patience = Patience(stall_after_s, INTERVAL_S)
        self.now_s, self.steps, self.mark = 1000.0, steps, 0

    def stay(self, phase: str, seconds: float) -> float | None:
        """Make progress, and stay in a phase; return after how many seconds training has stalled."""
        self.mark += 1
        until_s, stalled_s = self.now_s + seconds, None
        self.poll(phase)
        while self.now_s < until_s:
            self.now_s = min(until_s, self.now_s + INTERVAL_S)
            self.poll(phase)
            if self.patience.has_stalled and stalled_s is None:
                stalled_s = self.patience.stuck_s
        return stalled_s

    def poll(self, phase: str) -> None:
        self.patience.poll(self.now_s, self.mark, phase, self.steps)


@pytest.mark.parametrize("phase", [FORWARD, DATA_LOADING])
def test_a_step_may_take_a_minute_or_five_times_the_longest(phase: str) -> None:
    run = Run()
    assert run.stay(phase, MIN_S + 2 * INTERVAL_S) == pytest.approx(MIN_S, abs=INTERVAL_S)
    run = Run()
    run.stay(phase, 40)
    assert run.stay(phase, FACTOR * 40 + 2 * INTERVAL_S) == pytest.approx(FACTOR * 40, abs=INTERVAL_S)


@pytest.mark.parametrize(
    ("phase", "steps"), [(VALIDATION, 10), (CHECKPOINT, 10), ("callback/Sampler", 10), ("setup", 0), (FORWARD, 1)]
)
def test_rare_phases_and_first_steps_may_take_longer(phase: str, steps: int) -> None:
    run = Run(steps=steps)
    assert run.stay(phase, RARE_S + 2 * INTERVAL_S) == pytest.approx(RARE_S, abs=INTERVAL_S)
    run.steps = 10
    assert run.stay(FORWARD, MIN_S + 2 * INTERVAL_S) is not None


def test_a_number_of_seconds_applies_to_every_phase() -> None:
    for phase in (FORWARD, VALIDATION):
        assert Run(20.0).stay(phase, 40) == 20
        assert Run(20.0).stay(phase, 19) is None


def test_garbage_collection_and_stopped_processes_are_no_stalls() -> None:
    run = Run()
    run.stay(VALIDATION, 100)
    run.poll(GARBAGE_COLLECTION)
    assert not run.patience.has_stalled
    assert run.patience.stuck_s == 100
    run = Run(stall_after_s=20.0)
    run.stay(FORWARD, 10)
    run.now_s += 3600  # Ctrl-Z
    run.poll(FORWARD)
    assert not run.patience.has_stalled
    assert run.patience.stuck_s == pytest.approx(10, abs=INTERVAL_S)
    assert Run(stall_after_s=20.0).stay(OUTSIDE_LOOP, 3600) is None


@pytest.mark.parametrize(
    ("stack", "excused"),
    [
        (a_stack("train.py:training_step", "torch/_dynamo/convert_frame.py:__call__", "torch/fx/graph.py:run"), True),
        (a_stack("torch/_dynamo/eval_frame.py:_fn", "train.py:forward", "torch/nn/linear.py:forward"), False),
        (a_stack("train.py:training_step", "lib/pdb.py:interaction", "lib/cmd.py:cmdloop"), True),
        (a_stack("ipykernel/kernelapp.py:start", "train.py:fit", "train.py:training_step"), False),
    ],
)
def test_compilers_and_people_may_take_their_time(stack: tuple[Frame, ...], excused: bool) -> None:
    assert is_excused(stack) == excused


WORKERS = (ProcessFacts(100, waits_for="lock", stack=a_stack("train.py:decode")), ProcessFacts(101, waits_for="lock"))
BUSY = ProcessFacts(101, cpu_share=0.9)


@pytest.mark.parametrize(
    ("facts", "cause", "words"),
    [
        ({}, "blocked_worker", "All 2 workers wait for a lock in decode (train.py:7). A process that was forked"),
        ({"workers": (WORKERS[0], BUSY), "awaited_worker": 1}, "blocked_worker", "of 2 computes (90% of a core)."),
        ({"workers": (ProcessFacts(100, "D", "storage", "/nfs/x"), BUSY)}, "storage", "waits for storage (/nfs/x)."),
        ({"phase": "callback/\x1b[31mA", "workers": ()}, "code", "The training process waits in wait (train.py:7)."),
    ],
)
def test_the_wait_of_a_process_is_named(facts: dict[str, Any], cause: str, words: str) -> None:
    found = explain_stall(a_stall(**{"phase": DATA_LOADING, "workers": WORKERS, **facts}))
    assert found.cause == cause
    assert words in found.why


WAITS = a_rank(0, waits_in="all_reduce", line=" in training_step (train.py:7)")
LOADS = a_rank(1, phase=DATA_LOADING, why="It waits in __getitem__ (data.py:12).", next_step="Check it.")


@pytest.mark.parametrize(
    ("rank", "why"),
    [
        (LOADS, "All ranks wait for rank 1, at step 5, while waiting for data. It waits in __getitem__ (data.py:12)."),
        (a_rank(1, ended="stopped by SystemExit at step 3"), "Rank 1 stopped training at step 5 (stopped by"),
        (a_rank(1, silent_s=30.0), "Rank 1 (PID 101 on node 0) has been silent for 30 s, since step 5, in forward"),
    ],
)
def test_the_rank_that_all_wait_for_is_named(rank: RankFacts, why: str) -> None:
    found = explain_stall(a_stall(FORWARD, WAITS, rank))
    assert (found.cause, found.evidence.get("rank"), why in found.why) == ("rank_behind", 1, True)
    assert found.advice
    assert explain_stall(a_stall(FORWARD, rank)).cause == "code"  # alone


def test_uneven_batches_come_before_the_calls_that_differ_for_it() -> None:
    calls = (Call(4, "all_reduce of 5 float32 numbers", False), Call(4, "all_reduce of 7 float32 numbers", False))
    found = explain_stall(a_stall(FORWARD, *(a_rank(i, calls[i], epoch_steps=13 - i) for i in (0, 1))))
    assert (found.cause, found.evidence.get("rank")) == ("collective", 1)
    assert found.why.startswith("Rank 1 had 12 batches in an epoch, rank 0 13. Collective no. 4: rank 0 called")
    assert found.advice.startswith("Give every rank the same number of batches: DistributedSampler(")
    equal = explain_stall(a_stall(FORWARD, *(a_rank(i, calls[i], epoch_steps=13) for i in (0, 1))))
    assert equal.why.startswith("Ranks wait for each other in different calls: ")


# The collective that does not complete, from the calls of each rank


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
