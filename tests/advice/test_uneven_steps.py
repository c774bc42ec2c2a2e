"""Uneven steps of trainings on a clock that moves by hand: their causes, evidence and words."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from statistics import median

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from measured_runs import run_of

from lightning_gpu_tools.advice.diagnosis import diagnose
from lightning_gpu_tools.advice.examples import LOADER
from lightning_gpu_tools.advice.uneven_steps import MIN_UNEVEN, period, uneven
from lightning_gpu_tools.training.storage import Storage

Step = dict[str, float]
WARM_UP = 20


def steps(count: int = 400, usual: Step | None = None, **seconds: Callable[[int], float]) -> list[Step]:
    """Return steps of 20 ms, with more seconds in the phases that are given by a function of the step's number."""
    usual = usual or {"training_step": 0.02}
    found = []
    for number in range(1, count + 1):
        more = {phase.replace("__", "/"): more_s(number) for phase, more_s in seconds.items()}
        found.append({phase: usual.get(phase, 0.0) + more.get(phase, 0.0) for phase in {**usual, **more}})
    return found


def every(count: int, seconds: float) -> Callable[[int], float]:
    return lambda number: seconds if number % count == 0 and number > WARM_UP else 0.0


def until(last: int, seconds: float) -> Callable[[int], float]:
    return lambda number: seconds if number <= last else 0.0


def at(numbers: set[int], seconds: float) -> Callable[[int], float]:
    return lambda number: seconds if number in numbers else 0.0


NOW_AND_THEN = set(random.Random(3).sample(range(WARM_UP + 10, 400), 12))


@pytest.mark.parametrize(
    ("seconds", "cause", "evidence", "why"),
    [
        (
            {"training_step": every(20, 0.4)},
            "slow_steps",
            {"kind": "periodic", "phase": "training_step", "every_steps": 20, "slow_steps": 18},
            "Slow steps take 46 % of the wall time (18 of 379 steps took 21 times the median, every 20 steps, in "
            '"training step").',
        ),
        (
            {"training_step": at(NOW_AND_THEN, 0.4)},
            "slow_steps",
            {"kind": "irregular", "slow_steps": 12},
            '12 of 379 steps took 21 times the median, in "training step")',
        ),
        (
            {"trainer": every(50, 1.0)},
            "slow_steps",
            {"kind": "periodic", "phase": "trainer", "period": "log_every_n_steps"},
            'every 50 steps, the period of log_every_n_steps, in "Trainer overhead")',
        ),
        (
            {"callback__Slow": every(20, 0.4)},
            "callback",
            {"name": "Slow", "every_steps": 20},
            "The callback Slow takes 49 % of the wall time (19 ms per step; 18 of 379 steps took 21 times the median, "
            "every 20 steps).",
        ),
        (
            {"data_loading": every(40, 2.0)},
            "data_loading",
            {"kind": "slow_batches", "every_steps": 40},
            "(9 of 379 steps took 101 times the median, every 40 steps)",
        ),
        (
            {"data_loading": until(100, 0.1)},
            "data_loading",
            {"kind": "cold_cache", "first_steps": 99, "of_steps": 400},
            "(99 % of it in the first 99 of 400 steps)",
        ),
        (
            {"training_step": until(100, 0.1)},
            "slow_steps",
            {"kind": "beginning", "first_steps": 99},
            '(in the first 99 of 400 steps "training step" took 5.9 times as long)',
        ),
        ({"checkpoint": every(50, 2.0)}, "checkpoint", {"every_steps": 50, "slow_steps": 7}, "every 50 steps"),
    ],
)
def test_uneven_steps_are_named(
    seconds: dict[str, Callable[[int], float]], cause: str, evidence: dict[str, object], why: str
) -> None:
    diagnosis = diagnose(run_of(steps(**seconds)))
    first = diagnosis.findings[0]
    assert (diagnosis.verdict, first.cause) == ("low", cause)
    assert evidence.items() <= first.evidence.items()
    assert why in diagnosis.why
    assert first.advice in diagnosis.next_step


@pytest.mark.parametrize(
    ("file_system", "is_network", "words"),
    [
        ("nfs4", True, "/d is on nfs4, a network file system. To speed up the beginning, copy the data to a local"),
        ("ext4", False, "Later steps need no change: by then the data is cached. /d is on ext4."),
        ("tmpfs", False, "Later steps need no change. /d is on tmpfs, which is memory."),
    ],
)
def test_the_storage_of_a_slow_beginning_is_named(file_system: str, is_network: bool, words: str) -> None:
    storage = Storage(path="/d", file_system=file_system)
    finding = diagnose(run_of(steps(data_loading=until(100, 0.1)), storage=storage)).findings[0]
    assert words in finding.advice
    assert ("copy" in finding.advice) is is_network
    assert finding.evidence["file_system"] == file_system


@pytest.mark.parametrize(
    ("seconds", "options", "but"),
    [
        ({"training_step": at({200}, 3.0)}, {}, '1 of 379 steps took 151 times the median, in "training step": 27 %'),
        ({"training_step": at({1}, 30.0)}, {}, 'in the first of 400 steps "training step" took over 100 times as long'),
        (
            {"training_step": every(4, 0.05)},
            {"accumulate_grad_batches": 4},
            'every 4 steps, the period of accumulate_grad_batches, in "training step"',
        ),
    ],
)
def test_uneven_steps_that_no_change_prevents_are_no_finding(
    seconds: dict[str, Callable[[int], float]], options: dict[str, int], but: str
) -> None:
    diagnosis = diagnose(run_of(steps(**seconds), **options))
    assert (diagnosis.verdict, diagnosis.findings) == ("healthy", ())
    assert diagnosis.why.startswith("Nothing on the host slows training down, but ")
    assert but in diagnosis.why


def test_longer_batches_explain_slow_steps() -> None:
    long = NOW_AND_THEN | set(range(60, 400, 7))
    varying = [
        {"training_step": 0.02 * length, "items": 1000 * length}
        for number in range(1, 401)
        for length in (5 if number in long else 1,)
    ]
    first = diagnose(run_of(varying)).findings[0]
    assert (first.cause, first.evidence["kind"], first.basis) == ("slow_steps", "longer_batches", "heuristic")
    assert first.evidence["batch_items_times"] == 5


@pytest.mark.parametrize(("later_s", "kind"), [(0.001, "cold_cache"), (0.03, "too_few_workers")])
def test_a_wait_that_goes_on_keeps_its_cause(later_s: float, kind: str) -> None:
    diagnosis = diagnose(run_of(steps(data_loading=lambda number: 0.1 if number <= 250 else later_s)))
    assert diagnosis.findings[0].evidence["kind"] == kind
    assert "% of it in the first 249 of 400 steps" in diagnosis.why


def test_workers_that_are_too_few_deliver_in_bursts_and_are_no_slow_batches() -> None:
    bursts = run_of(steps(data_loading=every(4, 0.1)), loader=dataclasses.replace(LOADER, num_workers=4))
    finding = diagnose(bursts).findings[0]
    assert (finding.cause, finding.evidence["kind"]) == ("data_loading", "too_few_workers")


def test_a_slow_beginning_is_no_slow_beginning_before_it_ends() -> None:
    assert diagnose(run_of(steps(120, data_loading=until(100, 0.1)))).findings[0].evidence["kind"] != "cold_cache"


@pytest.mark.parametrize(("utilization", "verdict"), [(97.0, "healthy"), (60.0, "low")])
def test_on_a_gpu_slow_steps_count_while_it_is_idle(utilization: float, verdict: str) -> None:
    """A host that is ahead waits for the GPU at once: in the step that logs."""
    run = run_of(steps(training_step=every(50, 1.0)), on_gpu=True, utilization_percent=utilization)
    diagnosis = diagnose(run)
    assert diagnosis.verdict == verdict
    assert ("slow_steps" in [finding.cause for finding in diagnosis.findings]) == (verdict == "low")
    assert all(finding.share <= 1 - utilization / 100 + 1e-9 for finding in diagnosis.findings)


@pytest.mark.parametrize(("slow_s", "verdict"), [(0.068, "low"), (0.062, "healthy")])
def test_a_finding_begins_at_a_tenth_of_the_wall_time(slow_s: float, verdict: str) -> None:
    """One step in twenty takes longer by a tenth of twenty others, or a bit less."""
    run = run_of(steps(3000, training_step=every(20, slow_s - 0.02)))
    assert diagnose(run).verdict == verdict


# --- laws --------------------------------------------------------------------------------------------------------


@given(
    st.integers(2, 500), st.integers(0, 500), st.integers(5, 64), st.randoms(use_true_random=False), st.floats(0, 0.15)
)
def test_a_period_that_is_found_is_the_true_one(
    every_steps: int, first: int, count: int, chance: random.Random, missed: float
) -> None:
    due = [first + i * every_steps for i in range(count)]
    seen = [number for i, number in enumerate(due) if i < 4 or chance.random() >= missed]
    assert period(seen) == every_steps


@given(st.integers(4, 64), st.integers(0, 10**6))
def test_steps_at_random_hardly_ever_have_a_period(count: int, seed: int) -> None:
    chance = random.Random(seed)
    found = period(sorted(chance.sample(range(10_000), count)))
    assert found is None or count < 10


_SECONDS = st.sampled_from([0.02, 0.02, 0.02, 0.021, 0.022, 0.04, 0.1, 0.5, 2.0])
_PHASES = st.sampled_from(["training_step/forward", "trainer", "data_loading", "callback/Slow"])


@given(st.lists(st.tuples(_SECONDS, _PHASES), min_size=150, max_size=300))
@example([(0.02, "trainer")] * 200 + [(2.0, "trainer")] * 2)
@example([(0.02, "trainer")] * 100 + [(0.022, "callback/Slow")] * 100)
def test_uneven_steps_are_never_passed_over_in_silence(timed: list[tuple[float, str]]) -> None:
    spent = [{"training_step/forward": 0.02, phase: one} for one, phase in timed]
    seconds = [sum(step.values()) for step in spent]
    run = run_of(spent)
    later = seconds[WARM_UP:]
    lost_s = sum(one - median(later) for one in later if one > 2.5 * median(later))
    diagnosis = diagnose(run)
    if lost_s > 1.5 * MIN_UNEVEN * run.wall_s:
        assert diagnosis.findings or ", but " in diagnosis.why
    if max(seconds) < 2 * min(seconds):
        assert uneven(run) == []
