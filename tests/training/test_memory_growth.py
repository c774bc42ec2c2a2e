"""Memory that grows steadily is distinguished from memory that fills up, goes up and down, or is noisy."""

import math
import random

import pytest

from lightning_gpu_tools.training.memory_readings import steady_growth

GIB, MIB = 2**30, 2**20


def grown(sizes: list[float], room_bytes: float | None = None) -> object:
    return steady_growth("process", [(10.0 * i, size) for i, size in enumerate(sizes)], room_bytes)


def test_a_leak_has_its_slope_and_the_time_left() -> None:
    noise = random.Random(1)
    growth = steady_growth(
        "process", [(10.0 * i, GIB + 2 * MIB * i + noise.gauss(0, MIB)) for i in range(200)], room_bytes=720 * MIB
    )
    assert growth is not None
    assert growth.bytes_per_s == pytest.approx(0.2 * MIB, rel=0.02)
    assert growth.left_s == pytest.approx(3600, rel=0.02)
    assert growth.grown_bytes == pytest.approx(0.7 * 400 * MIB, rel=0.02)


@pytest.mark.parametrize(
    "sizes",
    [
        [GIB] * 200,
        [GIB * min(1, i / 60) for i in range(200)],  # a plateau after three tenths of the run
        [GIB * (1 - math.exp(-i / 60)) for i in range(200)],  # fills up
        [GIB * math.sqrt(i / 200) for i in range(200)],  # levels off
        [GIB + 100 * MIB * (i % 20) for i in range(200)],  # epochs
        [4 * GIB - 2 * MIB * i for i in range(200)],
        [GIB + 0.1 * MIB * i for i in range(200)],  # a trifle
        [GIB + 20 * MIB * i for i in range(20)],  # too few samples
        [],
        [GIB],
    ],
)
def test_what_does_not_grow_to_the_end_is_no_alarm(sizes: list[float]) -> None:
    assert grown(sizes) is None


def test_chance_is_hardly_ever_an_alarm() -> None:
    shuffle, alarms = random.Random(0).shuffle, 0
    for _ in range(2000):
        sizes = [GIB + 10 * MIB * place for place in range(60)]
        shuffle(sizes)
        alarms += grown(sizes) is not None
    assert alarms <= 2  # eight medians in rising order: one order in 40320
