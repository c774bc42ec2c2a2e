"""Memory that grows over a run, by numbers and a clock that the test sets."""

from dataclasses import replace

import pytest
import torch
from trainings import HandClock

from lightning_gpu_tools.host import read_host_budget
from lightning_gpu_tools.training import memory_history
from lightning_gpu_tools.training.memory_growth import MemoryGrowth
from lightning_gpu_tools.training.memory_history import MemoryHistory

GIB, MIB = 2**30, 2**20


def history(resident_bytes: list[int]) -> tuple[MemoryHistory, list[MemoryGrowth]]:
    """Return what has been sampled, once a minute, and the alarms."""
    clock, sizes = HandClock(), iter(resident_bytes)
    memory = MemoryHistory(torch.device("cpu"), clock, lambda: next(sizes))
    alarms = []
    for _ in resident_bytes:
        clock.spend(60.0)
        memory.poll()
        memory.poll()  # nothing: not due
        alarms += memory.alarms()
    return memory, alarms


def leak(minutes: int) -> list[int]:
    return [GIB + 4 * MIB * minute for minute in range(minutes)]


@pytest.mark.parametrize(("hours_left", "alarms"), [(10, 1), (24 * 7, 0)])
def test_a_leak_full_within_a_day_alarms_once(monkeypatch: pytest.MonkeyPatch, hours_left: int, alarms: int) -> None:
    budget = replace(read_host_budget(), memory_available_bytes=4 * MIB * 60 * hours_left)
    monkeypatch.setattr(memory_history, "read_host_budget", lambda: budget)
    memory, raised = history(leak(60))
    assert len(raised) == alarms
    (growth,) = memory.growth()
    assert growth.what == "The memory of the process (RSS)"
    assert growth.bytes_per_s == pytest.approx(4 * MIB / 60)
    assert growth.left_s == pytest.approx(hours_left * 3600)


def test_memory_that_is_kept_once_is_no_leak() -> None:
    memory, alarms = history([GIB, *[GIB + 100 * MIB] * 47])
    assert memory.growth() == ()
    assert alarms == []
