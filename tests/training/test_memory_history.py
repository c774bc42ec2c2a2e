"""Memory that grows over a run, by numbers and a clock that the test sets."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from trainings import HandClock

from lightning_gpu_tools.host import read_host_budget
from lightning_gpu_tools.training import memory_history
from lightning_gpu_tools.training.memory_history import MemoryHistory

GIB, MIB = 2**30, 2**20


@pytest.fixture(autouse=True)
def room(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = replace(read_host_budget(), memory_available_bytes=64 * GIB)
    monkeypatch.setattr(memory_history, "read_host_budget", lambda: budget)


def sampled(resident_bytes: Callable[[float], float], seconds: float) -> tuple[MemoryHistory, dict[str, float]]:
    """Return what has been sampled as often as asked for, and when each alarm was raised."""
    clock = HandClock()
    began_s = clock()
    memory = MemoryHistory(None, clock, lambda: int(resident_bytes(clock() - began_s)))
    raised: dict[str, float] = {}
    while clock() - began_s < seconds:
        clock.spend(memory.poll())
        for growth in memory.alarms:
            raised.setdefault(growth.whose, clock() - began_s)
    return memory, raised


def test_fast_growth_is_seen_after_twelve_seconds() -> None:
    """2.3 GiB a minute, by steps of 20 ms that keep 0.8 MiB each."""
    memory, raised = sampled(lambda s: GIB + 2.3 * GIB / 60 * (s // 0.02 * 0.02), 33)
    (growth,) = memory.growth()
    assert growth.whose == "process"
    assert growth.bytes_per_s * 60 == pytest.approx(2.3 * GIB, rel=0.02)
    assert raised[growth.whose] < 13


@pytest.mark.parametrize(("hours_left", "minutes"), [(10, 60), (0.9, 1), (10, 1), (24 * 7, 60)])
def test_an_alarm_looks_as_far_ahead_as_growth_was_seen(hours_left: float, minutes: float) -> None:
    memory, raised = sampled(lambda s: GIB + 64 * GIB * s / (3600 * hours_left), 60 * minutes)
    assert len(raised) == (hours_left < 24 * min(1, minutes / 5))
    assert len(memory.alarms) == len(raised)  # each once
    (growth,) = memory.growth()
    assert growth.left_s == pytest.approx(hours_left * 3600, rel=0.02)


def test_the_workers_growth_is_not_the_processs(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = HandClock()
    began_s = clock()
    monkeypatch.setattr(
        memory_history, "private_memory_bytes", lambda pids: [GIB + 10 * MIB * (clock() - began_s) for _ in pids]
    )
    memory = MemoryHistory(None, clock, lambda: GIB, worker_pids=lambda: [1, 2, 3])
    while clock() - began_s < 60:
        clock.spend(memory.poll())
    (growth,) = memory.growth()
    assert growth.whose == "workers"
    assert growth.bytes_per_s == pytest.approx(30 * MIB, rel=0.02)
    assert [alarm.whose for alarm in memory.alarms] == ["workers"]


@pytest.mark.parametrize("where", ["training", "validation"])
def test_growth_is_booked_where_it_happens(where: str) -> None:
    clock = HandClock()
    state = {"bytes": GIB, "phase": "training"}
    memory = MemoryHistory(None, clock, lambda: state["bytes"], is_validating=lambda: state["phase"] == "validation")
    for i in range(240):
        state["phase"] = "validation" if i % 4 == 3 else "training"
        state["bytes"] += (40 if state["phase"] == where else 1) * MIB
        clock.spend(memory.poll())
    (growth,) = memory.growth()
    assert growth.phase == where
