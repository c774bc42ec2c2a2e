"""Stalls: how long each phase may take, excuses, and the words for what is seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gpu_tools.advice.collectives import collective_of
from lightning_gpu_tools.advice.stall_causes import STALL_CAUSES
from lightning_gpu_tools.advice.stall_examples import a_rank, a_stack
from lightning_gpu_tools.advice.stall_excuses import is_excused
from lightning_gpu_tools.advice.stall_patience import AGAIN, FACTOR, MIN_S, UNKNOWN_S, Patience
from lightning_gpu_tools.advice.stalls import describe_rank, explain_process, explain_ranks, headline
from lightning_gpu_tools.training.phases import (
    CHECKPOINT,
    DATA_LOADING,
    FORWARD,
    GARBAGE_COLLECTION,
    OUTSIDE_LOOP,
    RANK_WAIT,
    VALIDATION,
)
from lightning_gpu_tools.training.stall_facts import Frame, RankFacts, StallFacts

INTERVAL_S = 5.0


class Run:
    """A training that is polled."""

    def __init__(self, stall_after_s: float | str = "auto") -> None:
        self.patience = Patience(stall_after_s, INTERVAL_S)  # type: ignore[arg-type]
        self.now_s, self.steps, self.since_s, self.taken = 1000.0, 0, 1000.0, set[str]()

    def stay(self, phase: str, seconds: float, *, steps: int = 0) -> list[float]:
        """Return after how many seconds of a phase a stall was reported."""
        self.steps += steps
        self.since_s, said = self.now_s, []
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self.now_s = min(until_s, self.now_s + INTERVAL_S)
            said += [self.patience.stuck_s] if self.poll(phase) else []
        self.taken.add(phase)
        return said

    def poll(self, phase: str) -> bool:
        self.patience.poll(self.now_s, (self.steps, self.since_s), phase, self.since_s, self.steps, self.taken)
        due = self.patience.has_stalled and self.patience.due_s <= 0
        if due:
            self.patience.reported()
        return due


def test_a_phase_that_never_completed_may_take_ten_minutes() -> None:
    for phase in (FORWARD, DATA_LOADING, VALIDATION, CHECKPOINT, "callback/Sampler"):
        run = Run()
        assert run.stay(phase, UNKNOWN_S - 1) == []
        assert Run().stay(phase, UNKNOWN_S + INTERVAL_S) == [pytest.approx(UNKNOWN_S, abs=INTERVAL_S)]


def test_each_phase_is_judged_by_the_longest_that_it_has_taken() -> None:
    run = Run()
    run.stay(VALIDATION, 100, steps=10)
    run.stay(FORWARD, 1, steps=10)
    assert run.stay(VALIDATION, FACTOR * 100 - 2 * INTERVAL_S * FACTOR) == []
    assert run.stay(FORWARD, MIN_S + INTERVAL_S) == [pytest.approx(MIN_S, abs=INTERVAL_S)]
    run.stay("callback/A", 100)
    run.stay(FORWARD, 1, steps=1)
    assert run.stay("callback/B", UNKNOWN_S - 1) == []  # another callback, which may take long for a good reason


def test_a_stall_is_reported_again_after_four_times_as_long() -> None:
    run = Run(stall_after_s=20.0)
    assert run.stay(FORWARD, 20 * AGAIN**2 + INTERVAL_S) == [20, 20 * AGAIN, 20 * AGAIN**2]
    assert run.stay(DATA_LOADING, 19) == []


def test_a_stall_is_reported_before_torch_ends_a_process_that_waits() -> None:
    for timeout_s, expected_s in ((600.0, 450.0), (1800.0, UNKNOWN_S)):
        patience = Patience("auto", INTERVAL_S, timeout_s)
        assert patience.limit_s == expected_s
        patience.poll(1000.0, 0, FORWARD, 1000.0, 0, ())
        assert patience.limit_s == expected_s
    assert Patience(700.0, INTERVAL_S, 600.0).limit_s == 700.0


@given(st.lists(st.tuples(st.sampled_from([FORWARD, DATA_LOADING, VALIDATION]), st.floats(0.01, 3.0)), max_size=30))
def test_no_phase_alarms_that_takes_at_most_three_times_as_long_as_before(stays: list[tuple[str, float]]) -> None:
    run, longest = Run(), {}
    for phase, factor in stays:
        # A poll may come an interval after a phase began or ended.
        seconds = max(MIN_S - 2 * INTERVAL_S, longest.get(phase, 0.0) * factor)
        assert run.stay(phase, seconds, steps=5) == []
        longest[phase] = max(longest.get(phase, 0.0), seconds)


def test_garbage_is_no_progress_and_a_stopped_process_no_stall() -> None:
    run = Run(stall_after_s=20.0)
    run.stay(DATA_LOADING, 10)
    assert run.stay(GARBAGE_COLLECTION, 0.1) == []
    run = Run(stall_after_s=20.0)
    run.stay(FORWARD, 10)
    run.now_s += 3600  # Ctrl-Z
    assert not run.poll(FORWARD)
    assert run.patience.stuck_s == pytest.approx(10, abs=INTERVAL_S)
    assert Run(stall_after_s=20.0).stay(OUTSIDE_LOOP, 3600) == []


@pytest.mark.parametrize(
    ("stack", "excused"),
    [
        (a_stack("train.py:training_step", "torch/_dynamo/convert_frame.py:__call__", "torch/fx/graph.py:run"), True),
        (a_stack("torch/_dynamo/eval_frame.py:_fn", "train.py:forward", "torch/nn/linear.py:forward"), False),
        (a_stack("train.py:training_step", "lib/pdb.py:interaction", "lib/cmd.py:cmdloop"), True),
        (a_stack("site-packages/debugpy/server.py:run", *["train.py:fit"] * 20, "lib/queue.py:get"), False),
        (a_stack("ipykernel/kernelapp.py:start", "train.py:fit", "train.py:training_step"), False),
        (a_stack("train.py:on_train_start", "ipykernel/kernelbase.py:_input_request"), True),
    ],
)
def test_compilers_and_people_may_take_their_time(stack: tuple[Frame, ...], excused: bool) -> None:
    assert is_excused(stack) == excused


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (STALL_CAUSES["dead_worker"].sick, "Worker 1 (PID 101) of 2 has exited"),
        (STALL_CAUSES["blocked_worker"].sick, "Worker 1 (PID 101) of 2 sleeps"),
        (STALL_CAUSES["storage"].sick, "(/nfs/x)"),
        (STALL_CAUSES["gpu"].sick, "100 % busy"),
        (STALL_CAUSES["code"].sick, "computes (90 % of a core)"),
        (STALL_CAUSES["callback"].sick, "WandbLogger makes no progress"),
        (StallFacts(phase="callback/\x1b[31mA", stack=a_stack("train.py:wait")), "\\x1b[31mA makes"),
        (StallFacts(phase=f"{RANK_WAIT}/training step"), "This rank waits for others."),
    ],
)
def test_the_wait_of_a_process_is_named(facts: StallFacts, words: str) -> None:
    assert words in explain_process(facts).why


@pytest.mark.parametrize("stack", [(), a_stack("train.py:decode")])
@pytest.mark.parametrize("name", [name for name, one in STALL_CAUSES.items() if isinstance(one.sick, StallFacts)])
def test_advice_speaks_of_that_line_only_if_one_was_named(name: str, stack: tuple[Frame, ...]) -> None:
    sick = STALL_CAUSES[name].sick
    assert isinstance(sick, StallFacts)
    workers = tuple(one._replace(stack=stack) for one in sick.workers)
    found = explain_process(replace(sick, stack=stack, workers=workers))
    assert "that line" not in found.next_step or "(train.py:7)" in found.why


@pytest.mark.parametrize(("percent", "waited"), [(0.0, ""), (40.0, ", and every task waited for memory in 40 % of")])
def test_waits_for_memory_are_named_only_if_there_were_any(percent: float, waited: str) -> None:
    why = explain_process(StallFacts(phase=FORWARD, swapped_pages_per_s=3e4, memory_stall_percent=percent)).why
    assert why.startswith(f"The machine swaps 30,000 pages per second{waited}")
    assert ("waited" in why) == bool(waited)


def test_a_rank_is_described_by_its_state() -> None:
    for name, words in (("rank_left", "ended (stopped by SystemExit at step 3)"), ("rank_silent", "silent for 30 s")):
        rank = STALL_CAUSES[name].sick[1]
        assert describe_rank(rank) == f"rank 1: step 5 of epoch 1, {words}"


UNEQUAL_CALLS = STALL_CAUSES["collective_mismatch"].sick


@pytest.mark.parametrize(
    ("ranks", "cause", "behind"),
    [
        (STALL_CAUSES["communication"].healthy, "code", 1),
        (STALL_CAUSES["collective_on_one_rank"].sick, "collective_on_one_rank", 0),
        (STALL_CAUSES["uneven_batches"].sick, "uneven_batches", 0),
        ((a_rank(0, collective="backward"), a_rank(1, ended="completed", step=3)), "uneven_batches", 1),
        ([replace(one, epoch_steps=12 + one.rank) for one in UNEQUAL_CALLS], "uneven_batches", 0),
        (STALL_CAUSES["rank_left"].sick, "rank_left", 1),
        (STALL_CAUSES["rank_silent"].sick, "rank_silent", 1),
    ],
)
def test_the_rank_that_all_wait_for_is_named(ranks: Sequence[RankFacts], cause: str, behind: int | None) -> None:
    explanation = explain_ranks(ranks)
    assert explanation is not None
    assert (explanation.cause, explanation.rank) == (cause, behind)
    assert explain_ranks(ranks[:1]) is None


def test_a_collective_is_known_by_the_stack() -> None:
    save = a_stack(
        "train.py:hook", "lightning/trainer.py:save_checkpoint", "torch/distributed/distributed_c10d.py:barrier"
    )
    assert collective_of(save, CHECKPOINT, 2) == "saving a checkpoint"
    assert collective_of(save, CHECKPOINT, 1) is None
    own = a_stack("train.py:training_step", "torch/distributed/distributed_c10d.py:all_gather")
    assert collective_of(own, FORWARD, 2) == "all_gather in training_step"
    assert collective_of(a_stack("train.py:training_step"), FORWARD, 2) is None
    assert collective_of(a_stack("torch/graph.py:_engine_run_backward"), f"{RANK_WAIT}/training step", 2) == "backward"


@pytest.mark.parametrize(
    ("phase", "words"),
    [
        (VALIDATION, "in validation at step 812."),
        (DATA_LOADING, "while waiting for data at step 812."),
        (FORWARD, "in forward at step 812."),
        ("callback/Sampler", "in Sampler at step 812."),
        ("setup", "during setup at step 812."),
    ],
)
def test_the_headline_says_since_when_and_where(phase: str, words: str) -> None:
    assert headline(phase, 62.0, 812) == f"Training has made no progress for 62 s, {words}"
