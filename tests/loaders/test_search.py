"""The search for settings: what it finds, what it leaves untouched, and that it keeps to its budget."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from typing import Any

import pytest
import torch
from loader_switching import Hanging, frozen_states, shorten_trials
from torch.utils.data import DataLoader, RandomSampler
from trainings import Samples

from lightning_gpu_tools import find_loader_settings
from lightning_gpu_tools.loaders import search
from lightning_gpu_tools.loaders.plan import Step

LOAD_S, STEP_S = 0.02, 0.005


def test_a_loader_that_waits_gets_workers_and_is_not_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_trials(monkeypatch.setattr)
    generator = torch.Generator().manual_seed(4)
    samples = Samples(90, time.sleep, LOAD_S)
    sampler = RandomSampler(samples, generator=generator)
    loader = DataLoader(samples, batch_size=None, sampler=sampler, generator=generator)
    states, state, attributes = frozen_states(), generator.get_state(), dict(vars(loader))
    result = find_loader_settings(loader, STEP_S, budget_s=30)
    assert frozen_states() == states
    assert torch.equal(generator.get_state(), state)
    assert vars(loader) == attributes
    assert result.original is not None
    assert result.settings is not None
    assert result.original.num_workers == 0
    assert result.settings.num_workers >= 2
    assert not result.applied
    assert "batches/s instead of" in result.reason
    assert (result.trials[0].batch_s or 0) >= LOAD_S + STEP_S  # of the current settings
    assert not multiprocessing.active_children()


class Broken(Samples):
    def __getitem__(self, index: int) -> torch.Tensor:
        raise KeyError("no such sample")


class Killed(Samples):
    def __getitem__(self, index: int) -> torch.Tensor:
        os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


class Stuck:
    """A sampler that cannot be copied."""

    def __init__(self) -> None:
        self.stream = (i for i in range(5))

    def __iter__(self) -> Any:
        return iter(range(5))


@pytest.mark.parametrize(
    ("loader", "why"),
    [
        (range(9), "it is a builtins.range"),
        (DataLoader(Broken(9)), "a worker process cannot load a batch (KeyError: 'no such sample')"),
        (DataLoader(Killed(9)), "RuntimeError: a worker process was killed by SIGKILL, but not by the kernel"),
        (DataLoader(Samples(5), sampler=Stuck()), "its sampler yields no batches (TypeError"),
    ],
)
def test_what_cannot_be_tried_keeps_its_settings_with_the_reason(loader: Any, why: str) -> None:
    result = find_loader_settings(loader, 0.01, budget_s=3)
    assert why in result.reason
    assert result.settings == result.original
    assert not result.trials


def test_items_that_hang_end_the_search_within_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 60.0)  # torch's wait for each worker
    began_s = time.monotonic()
    result = find_loader_settings(DataLoader(Hanging(9), num_workers=3), 0.01, budget_s=2)
    assert time.monotonic() - began_s < 60  # the item alone takes 1,000
    assert "timed out" in result.reason
    assert not multiprocessing.active_children()


class Clock:
    """Time that passes only where a program sleeps or computes."""

    now_s = cpu_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += 1.3 * seconds

    def thread_time(self) -> float:
        self.cpu_s += 0.0001
        self.now_s += 0.0002  # workers have the core half of the time
        return self.cpu_s


@pytest.mark.parametrize(
    ("step", "seconds"), [(Step(0.01), 0.01), (Step(0.02, cpu_s=0.01, threads=1), 0.01 + 2 * 0.01)]
)
def test_the_stand_in_takes_as_long_as_the_step(step: Step, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(search, "time", clock)
    trials = search.Trials(DataLoader(Samples(9)), step, budget_s=30)
    for _ in range(20):
        trials.stand_in()
    assert clock.now_s / 20 == pytest.approx(seconds, rel=0.03)
