"""Seeded simulations of steady rises, noise, jumps and slow beginnings."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import pytest

from lightning_gpu_tools.advice.trend import rise, slope, steady_rise

RUNS = 1000

Draw = Callable[[random.Random], Sequence[float]]


def noise(deviation: float, remembers: float = 0.0, count: int = 40) -> Draw:
    """Return flat runs whose windows deviate by so much, each like the one before it to some extent."""

    def draw(rng: random.Random) -> list[float]:
        now, values = rng.gauss(0, 1), []
        for _ in range(count):
            now = remembers * now + math.sqrt(1 - remembers**2) * rng.gauss(0, 1)
            values.append(math.exp(deviation * now))
        return values

    return draw


def with_stalls(rng: random.Random) -> list[float]:
    return [value + (rng.random() < 0.1) * rng.paretovariate(1.5) for value in noise(0.1)(rng)]


def with_jumps(count: int, times: float) -> Draw:
    """Return runs that become so many times as long, each time at once, at random moments."""

    def draw(rng: random.Random) -> list[float]:
        values = noise(0.05)(rng)
        at = [rng.randrange(len(values)) for _ in range(count)]
        return [value * times ** sum(place >= one for one in at) for place, value in enumerate(values)]

    return draw


def with_slow_beginning(rng: random.Random) -> list[float]:
    return [value * (1 + 4 * math.exp(-place / 5)) for place, value in enumerate(noise(0.05)(rng))]


def with_cold_start(rng: random.Random) -> list[float]:
    """Return runs that slow down for a while, as caches fill up, and then no more."""
    return [value * (2 - math.exp(-place / 4)) for place, value in enumerate(noise(0.02)(rng))]


def rising(times: float, deviation: float, shape: Callable[[float], float] = float) -> Draw:
    def draw(rng: random.Random) -> list[float]:
        values = noise(deviation)(rng)
        return [value * (1 + (times - 1) * shape(i / (len(values) - 1))) for i, value in enumerate(values)]

    return draw


def with_stalls_in(draw: Draw) -> Draw:
    return lambda rng: [value + 50.0 * (place % 13 == 5) for place, value in enumerate(draw(rng))]


def share_found(draw: Draw, runs: int = RUNS) -> float:
    rng = random.Random(0)
    return sum(steady_rise(draw(rng)) is not None for _ in range(runs)) / runs


FLAT = {
    "noise": (noise(0.3), 0.001),
    "noise that lasts": (noise(0.2, remembers=0.7), 0.003),
    "fewer windows": (noise(0.2, count=24), 0.001),
    "stalls": (with_stalls, 0.001),
    "a jump": (with_jumps(1, 1.6), 0.003),
    "two jumps": (with_jumps(2, 1.4), 0.003),
    "a slow beginning": (with_slow_beginning, 0.0),
    "a rise that ends": (with_cold_start, 0.003),
    "one long step at the end": (lambda rng: [*noise(0.05)(rng), 1e3], 0.0),
}


@pytest.mark.parametrize(("flat", "at_most"), FLAT.values(), ids=FLAT)
def test_a_run_that_does_not_slow_down_steadily_has_no_rise(flat: Draw, at_most: float) -> None:
    assert share_found(flat) <= at_most


RISING = {
    "steps that become 1.6 times as long": (rising(1.6, 0.02), 0.99),
    "1.25 times": (rising(1.25, 0.02), 0.9),
    "ever faster": (rising(3.0, 0.05, lambda part: part**2), 0.99),
    "ever slower": (rising(3.0, 0.05, math.sqrt), 0.95),
    "with a stall in every thirteenth window": (with_stalls_in(rising(3.0, 0.02)), 0.99),
}


@pytest.mark.parametrize(("draw", "at_least"), RISING.values(), ids=RISING)
def test_a_run_that_slows_down_steadily_has_one(draw: Draw, at_least: float) -> None:
    assert share_found(draw, 200) >= at_least


def test_its_95_percent_interval_holds_the_truth() -> None:
    rng, times = random.Random(1), 1.6
    found = [steady_rise(rising(times, 0.03)(rng)) for _ in range(300)]
    inside = [one.lower.times <= times <= one.upper.times for one in found if one is not None]
    assert len(inside) > 250
    assert 0.9 < sum(inside) / len(inside) < 1.0


@pytest.mark.parametrize("shape", [float, math.sqrt, lambda part: part**1.2, lambda part: part**3])
def test_the_interval_holds_the_estimate(shape: Callable[[float], float]) -> None:
    rng = random.Random(2)
    found = [steady_rise(rising(4.0, 0.03, shape)(rng)) for _ in range(100)]
    assert sum(one is not None for one in found) > 50
    assert all(one.lower.times <= one.line.times <= one.upper.times for one in found if one is not None)


def test_a_line_without_noise_is_found_exactly() -> None:
    found = steady_rise([10.0 + i for i in range(31)])
    assert found is not None
    assert found.line == found.lower == found.upper == (10.0, 40.0, 15.0)
    assert found.line.times == 4.0
    assert slope([5.0, 7.0, 9.0, 11.0, 13.0, 400.0]) == 2.0


def test_a_line_through_a_curve_begins_near_its_lowest_value() -> None:
    found = steady_rise([1.0 + (i / 10) ** 3 for i in range(31)])
    assert found is not None
    assert found.line.first == 0.75
    assert 10.0 < found.line.last < 28.0


@pytest.mark.parametrize(
    ("values", "ends"),
    [([1, 2, 3, 4, 5, 6], (1.5, 5.5)), ([5, 5, 5, 5, 5, 5], None), ([1, 9, 2, 8, 3, 7], None), ([], None)],
)
def test_a_quantity_rises_if_most_pairs_of_readings_do(values: list[float], ends: tuple[float, float] | None) -> None:
    assert rise([(10.0 * step, value) for step, value in enumerate(values)]) == ends
