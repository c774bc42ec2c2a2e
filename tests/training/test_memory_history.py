"""A process that really keeps more and more, looked at over a time that the test lets pass."""

from dataclasses import replace

import pytest
import torch

from lightning_gpu_tools.host import read_host_budget
from lightning_gpu_tools.training import memory_history
from lightning_gpu_tools.training.memory_growth import MemoryGrowth
from lightning_gpu_tools.training.memory_history import MemoryHistory

MIB = 2**20


def history(
    monkeypatch: pytest.MonkeyPatch, kept_bytes_a_minute: list[int]
) -> tuple[MemoryHistory, list[MemoryGrowth]]:
    """Return what has looked, once a minute, and the alarms."""
    now_s = 1000.0
    monkeypatch.setattr(memory_history.time, "monotonic", lambda: now_s)
    looks = MemoryHistory(torch.device("cpu"))
    kept, alarms = [], []
    for size in kept_bytes_a_minute:
        kept.append(bytearray(b"x") * size)
        now_s += 60.0
        looks.poll()
        looks.poll()  # nothing: not due
        alarms += looks.alarms()
    return looks, alarms


def room(monkeypatch: pytest.MonkeyPatch, size_bytes: int) -> None:
    budget = replace(read_host_budget(), memory_available_bytes=size_bytes)
    monkeypatch.setattr(memory_history, "read_host_budget", lambda: budget)


def test_a_leak_is_reported_with_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    looks, _ = history(monkeypatch, [4 * MIB] * 48)
    (growth,) = looks.growth()
    assert growth.what == "The memory of the process (RSS)"
    assert growth.bytes_per_s == pytest.approx(4 * MIB / 60, rel=0.1)
    assert growth.left_s is not None
    assert growth.left_s > 0


def test_what_is_kept_once_is_no_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    looks, alarms = history(monkeypatch, [100 * MIB, *[0] * 47])
    assert looks.growth() == ()
    assert alarms == []


def test_what_will_be_full_within_a_day_is_told_once_and_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    room(monkeypatch, 4 * MIB * 60 * 10)
    _, (alarm,) = history(monkeypatch, [4 * MIB] * 60)
    assert alarm.left_s == pytest.approx(10 * 3600, rel=0.1)


def test_what_will_be_full_in_a_week_is_no_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    room(monkeypatch, 4 * MIB * 60 * 24 * 7)
    looks, alarms = history(monkeypatch, [4 * MIB] * 60)
    assert alarms == []
    assert looks.growth() != ()
