"""A process that really keeps more and more, looked at over a time that the test lets pass."""

import pytest
import torch

from lightning_gpu_tools.monitoring import memory_history
from lightning_gpu_tools.monitoring.memory_history import MemoryHistory

MIB = 2**20


def history(monkeypatch: pytest.MonkeyPatch, kept_bytes_a_minute: list[int]) -> MemoryHistory:
    now_s = 1000.0
    monkeypatch.setattr(memory_history.time, "monotonic", lambda: now_s)
    looks = MemoryHistory(torch.device("cpu"))
    kept = []
    for size in kept_bytes_a_minute:
        kept.append(bytearray(b"x") * size)
        now_s += 60.0
        looks.look()
        looks.look()  # nothing: not due
    return looks


def test_a_leak_is_reported_with_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    (growth,) = history(monkeypatch, [4 * MIB] * 48).growth()
    assert growth.what == "The memory of the process (RSS)"
    assert growth.bytes_per_s == pytest.approx(4 * MIB / 60, rel=0.1)
    assert growth.left_s is not None
    assert growth.left_s > 0


def test_what_is_kept_once_is_no_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    assert history(monkeypatch, [100 * MIB, *[0] * 47]).growth() == ()
