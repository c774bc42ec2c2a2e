"""Trainings with a few slow steps, on a clock that moves by hand: their phase, period, batches, and words."""

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from synthetic import a_block, cpu_run, gpu_run, run_of

from lightning_gpu_tools.advice.diagnosis import diagnose
from lightning_gpu_tools.training.run_measurements import RunMeasurements

WARM_UP = 20
NOW_AND_THEN = set(random.Random(3).sample(range(WARM_UP + 10, 400), 12))


def steps(count: int = 400, **seconds: Callable[[int], float]) -> list[dict[str, float]]:
    """Return steps of 20 ms, with more seconds in the phases that are given by a function of the step's number."""
    found = []
    for number in range(1, count + 1):
        step = {"training_step": 0.02}
        for phase, more_s in seconds.items():
            step[phase.replace("__", "/")] = step.get(phase, 0.0) + more_s(number)
        found.append(step)
    return found


def every(count: int, seconds: float) -> Callable[[int], float]:
    return lambda number: seconds if number % count == 0 and number > WARM_UP else 0.0


def at(numbers: set[int], seconds: float) -> Callable[[int], float]:
    return lambda number: seconds if number in numbers else 0.0


@pytest.mark.parametrize(
    ("seconds", "phase", "period", "why", "advice"),
    [
        ({"training_step": every(20, 0.4)}, "training_step", 20, "18 of 379 steps", "Find what runs every 20 steps in"),
        ({"training_step": at(NOW_AND_THEN, 0.4)}, "training_step", None, "12 of 379 steps", "Find what the slow"),
        ({"data_loading": every(40, 2.0)}, "data_loading", 40, 'in "waiting for data"', "every 40 steps"),
    ],
)
def test_slow_steps_are_named_with_their_phase_and_period(
    seconds: dict[str, Callable[[int], float]], phase: str, period: int | None, why: str, advice: str
) -> None:
    diagnosis = diagnose(run_of(steps(**seconds)))
    (first,) = diagnosis.findings
    assert (first.cause, first.evidence["phase"], first.evidence.get("every_steps")) == ("slow_steps", phase, period)
    assert why in diagnosis.why
    assert advice in first.advice


@pytest.mark.parametrize(
    ("seconds", "options", "causes"),
    [
        ({"training_step": at({200}, 3.0)}, {}, []),
        ({"training_step": every(4, 0.05)}, {"accumulate_grad_batches": 4}, []),
        ({"training_step": every(20, 0.03)}, {}, []),
        ({"callback__Slow": every(20, 0.4)}, {}, ["callback"]),
        ({"data_loading": lambda number: 0.63 if number % 20 == 0 else 0.03}, {}, ["data_loading"]),
        ({"unexplained": every(20, 0.4)}, {}, ["slow_steps"]),
        ({"training_step": every(50, 1.0)}, {"on_gpu": True, "utilization_percent": 97.0}, []),
    ],
    ids=["one step", "accumulation", "small", "callback", "loader", "unexplained", "busy GPU"],
)
def test_what_is_chance_or_has_another_cause_is_no_finding(
    seconds: dict[str, Callable[[int], float]], options: dict[str, Any], causes: list[str]
) -> None:
    """A host that is ahead of a busy GPU waits for it at once, in the step that logs."""
    assert [one.cause for one in diagnose(run_of(steps(**seconds), **options)).findings] == causes


def test_longer_batches_explain_slow_steps() -> None:
    long = NOW_AND_THEN | set(range(60, 400, 7))
    varying = [
        {"training_step": 0.02 * length, "items": 1000 * length}
        for number in range(1, 401)
        for length in (5 if number in long else 1,)
    ]
    first = diagnose(run_of(varying)).findings[0]
    assert (first.cause, first.basis) == ("slow_steps", "heuristic")
    assert "5.0 times as many elements per batch. Put samples of similar length into one batch" in first.advice


# Steps that take longer and longer, and what changes with them


BLOCKS = 30
UP = [i / (BLOCKS - 1) for i in range(BLOCKS)]  # from 0 to 1
FORWARD, CALLBACK = "training_step/forward", "callback/Recorder"
GROWING = {"resident_bytes": [1e9 + 2e9 * part for part in UP]}


def of(steps: list[dict[str, float]], utilization: float | None = None, **options: Any) -> RunMeasurements:
    """Return a run with these milliseconds by phase in each block of ten steps."""
    phase_s = {phase: sum(one[phase] for one in steps) / 100 for phase in steps[0]}
    measured = {"steps": 10 * len(steps), "blocks": [a_block(one) for one in steps], "phase_s": phase_s}
    make = cpu_run({}) if utilization is None else gpu_run({}, utilization)
    return replace(make, **{"wall_s": sum(phase_s.values()), **measured, **options})


def run(slower: Mapping[str, float], usual_ms: float = 20.0, **options: Any) -> RunMeasurements:
    """Return steps of 20 ms that get longer, up to these milliseconds in each phase at the end."""
    phases = {FORWARD: usual_ms, **dict.fromkeys(slower.keys() - {FORWARD}, 0.0)}
    return of([{one: ms + part * slower.get(one, 0.0) for one, ms in phases.items()} for part in UP], **options)


@pytest.mark.parametrize(
    ("readings", "kind", "words"),
    [
        ({"batch_items": [1000 + 2000 * part for part in UP]}, "larger_batches", "batches have 2.1 times as many"),
        ({"lost_clock_percent": [30 * part for part in UP]}, "lower_clock", "clock has lost 21% of its maximum"),
        (GROWING, "kept_memory", "memory has grown by 1.28 GiB"),
        ({"lost_clock_percent": [30.0 - 30 * part for part in UP], "batch_items": [5.0] * 9}, "unknown", "mostly in"),
    ],
)
def test_the_quantity_that_changed_with_the_steps_is_named(readings: dict[Any, Any], kind: str, words: str) -> None:
    diagnosis = diagnose(run({FORWARD: 20.0}, readings=readings))
    first = diagnosis.findings[0]
    assert (first.cause, first.evidence["kind"], first.evidence["phase"]) == ("slowing_down", kind, FORWARD)
    assert (first.basis == "measured") == (kind == "unknown")
    assert words in diagnosis.why


@pytest.mark.parametrize(
    "measured",
    [
        run({"rank_wait": 20.0}),
        run({"validation": 20.0}),
        run({CALLBACK: 20.0}, usual_ms=200.0),
        run({CALLBACK: 12.0}, utilization=100.0),
        of([{FORWARD: 20.0, CALLBACK: 20.0 * (i < 10)} for i in range(BLOCKS)]),
    ],
    ids=["ranks", "validation", "small", "hidden", "slow beginning"],
)
def test_other_waits_and_small_changes_are_no_slowing_down(measured: RunMeasurements) -> None:
    assert "slowing_down" not in [one.cause for one in diagnose(measured).findings]
