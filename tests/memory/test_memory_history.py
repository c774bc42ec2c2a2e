"""Memory that grows over a run, not memory that fills up or varies, by numbers and a clock that the test sets."""

import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from trainings import HandClock

from lightning_gpu_tools.host import read_host_budget
from lightning_gpu_tools.memory import history
from lightning_gpu_tools.memory.history import MemoryHistory, steady_growth

GIB, MIB = 2**30, 2**20


def test_a_leak_has_its_slope_and_the_time_left() -> None:
    noise = random.Random(1)
    points = [(10.0 * i, GIB + 2 * MIB * i + noise.gauss(0, MIB)) for i in range(200)]
    growth = steady_growth("process", points, room_bytes=720 * MIB)
    assert growth.bytes_per_s == pytest.approx(0.2 * MIB, rel=0.02)
    assert growth.left_s == pytest.approx(3600, rel=0.02)
    assert growth.grown_bytes == pytest.approx(0.7 * 400 * MIB, rel=0.02)


@pytest.mark.parametrize(
    "sizes",
    [
        [GIB * min(1, i / 60) for i in range(200)],  # a plateau after three tenths of the run
        [GIB * (1 - math.exp(-i / 60)) for i in range(200)],  # fills up
        [GIB + 100 * MIB * (i % 20) for i in range(200)],  # epochs
        [GIB + 0.1 * MIB * i for i in range(200)],  # a trifle
        [GIB + 20 * MIB * i for i in range(20)],  # too few samples
    ],
)
def test_what_does_not_grow_to_the_end_is_no_alarm(sizes: list[float]) -> None:
    assert steady_growth("process", [(10.0 * i, size) for i, size in enumerate(sizes)], None) is None


@pytest.fixture(autouse=True)
def room(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = replace(read_host_budget(), memory_available_bytes=64 * GIB)
    monkeypatch.setattr(history, "read_host_budget", lambda: budget)


class Host:
    """Memory that a test sets, by a clock that it moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = HandClock()
        self.began_s = self.clock()
        self.process_bytes: Callable[[float], float] = lambda seconds: GIB
        monkeypatch.setattr(history, "monotonic", self.clock)
        monkeypatch.setattr(history, "resident_memory_bytes", lambda: int(self.process_bytes(self.seconds)))

    @property
    def seconds(self) -> float:
        return self.clock() - self.began_s

    def sample(self, seconds: float, **options: Any) -> tuple[MemoryHistory, dict[str, float]]:
        """Return what has been sampled as often as asked for, and when each alarm was raised."""
        memory, raised = MemoryHistory(**options), dict[str, float]()
        while self.seconds < seconds:
            self.clock.spend(memory.poll())
            for growth in memory.alarms:
                raised.setdefault(growth.whose, self.seconds)
        return memory, raised


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(monkeypatch)


@pytest.mark.parametrize(("hours_left", "minutes"), [(10, 60), (10, 1), (24 * 7, 60)])
def test_an_alarm_looks_as_far_ahead_as_growth_was_seen(host: Host, hours_left: float, minutes: float) -> None:
    host.process_bytes = lambda s: GIB + 64 * GIB * s / (3600 * hours_left)
    memory, raised = host.sample(60 * minutes)
    assert len(raised) == (hours_left < 24 * min(1, minutes / 5))
    assert len(memory.alarms) == len(raised)  # each once
    (growth,) = memory.growth()
    assert growth.left_s == pytest.approx(hours_left * 3600, rel=0.02)


def test_the_workers_growth_is_not_the_processs(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "private_memory_bytes", lambda pids: [GIB + 10 * MIB * host.seconds for _ in pids])
    memory, _ = host.sample(60, worker_pids=lambda: [1, 2, 3])
    (growth,) = memory.growth()
    assert growth.whose == "workers"
    assert growth.bytes_per_s == pytest.approx(30 * MIB, rel=0.02)
    assert [alarm.whose for alarm in memory.alarms] == ["workers"]
