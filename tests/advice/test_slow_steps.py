"""Trainings with a few slow steps, on a clock that moves by hand: their phase, period, batches, and words."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from measured_runs import run_of

from lightning_gpu_tools.advice.diagnosis import diagnose

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
    assert (first.cause, first.basis, first.evidence["batch_items_times"]) == ("slow_steps", "heuristic", 5)
    assert "Put samples of similar length into one batch" in first.advice
