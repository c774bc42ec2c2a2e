"""The search for settings: what it finds, what it leaves untouched, and that it keeps to its budget."""

import multiprocessing
import os
import re
import signal
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from loader_switching import frozen_states, shorten_trials
from synthetic import a_host
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
    assert result.original.num_workers == 0 < 2 <= result.settings.num_workers
    assert (result.applied, "batches/s instead of" in result.reason) == (False, True)
    assert (result.trials[0].batch_s or 0) >= LOAD_S + STEP_S  # of the current settings
    assert not multiprocessing.active_children()


class Hanging(Samples):
    def __getitem__(self, index: int) -> torch.Tensor:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(1000)
        return super().__getitem__(index)


class Broken(Samples):
    def __getitem__(self, index: int) -> torch.Tensor:
        raise KeyError("no such sample")


class Killed(Samples):
    def __getitem__(self, index: int) -> torch.Tensor:
        os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


@pytest.mark.parametrize(
    ("loader", "why"),
    [
        (range(9), "it is a builtins.range"),
        (DataLoader(Broken(9)), "a worker process cannot load a batch (KeyError: 'no such sample')"),
        (DataLoader(Killed(9)), "RuntimeError: a worker process was killed by SIGKILL, but not by the kernel"),
        # A generator cannot be copied.
        (DataLoader(Samples(5), sampler=(i for i in range(5))), "its sampler yields no batches (TypeError"),
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

    def __init__(self, oversleeps: float = 1.0, seconds_per_cpu_s: float = 1.0) -> None:
        self.oversleeps, self.seconds_per_cpu_s = oversleeps, seconds_per_cpu_s
        self.now_s = self.cpu_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += self.oversleeps * seconds

    def thread_time(self) -> float:
        self.cpu_s += 0.0001
        self.now_s += 0.0001 * self.seconds_per_cpu_s
        return self.cpu_s


def test_the_stand_in_takes_as_long_as_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(oversleeps=1.3)
    monkeypatch.setattr(search, "time", clock)
    trials = search.Trials(DataLoader(Samples(9)), Step(0.01), budget_s=30)
    began_s = clock.now_s
    for _ in range(20):
        trials.stand_in()
    assert (clock.now_s - began_s) / 20 == pytest.approx(0.01, rel=0.03)


def test_what_a_step_computes_is_faster_once_it_no_longer_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, rest_s = Clock(seconds_per_cpu_s=1.5), 0.005
    monkeypatch.setattr(search, "time", clock)
    trials = search.Trials(DataLoader(Samples(9)), Step(0.02, cpu_s=0.01, threads=1), budget_s=30)
    # It computes less if other programs slow it down.
    assert trials.rehearse(0.04) == pytest.approx(0.02, rel=0.05)
    computed_s = (0.02 - rest_s) / 1.5
    for now in (1.0, 4.0):
        clock.seconds_per_cpu_s, began_s = now, clock.now_s
        trials.stand_in()
        assert clock.now_s - began_s == pytest.approx(rest_s + now * computed_s, rel=0.05)


def test_a_stand_in_that_is_slower_than_the_step_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = SimpleNamespace(**{**vars(time), "sleep": lambda seconds: time.sleep(seconds + 0.03)})
    monkeypatch.setattr(search, "time", slow)
    loader = DataLoader(Samples(90, time.sleep, LOAD_S), batch_size=None)
    step = Step(STEP_S, wait_s=LOAD_S, error_s=0.0001)
    result = search.search(loader, step=step, host=a_host(8.0), cuda=False, budget_s=6)
    assert result.settings == result.original
    assert {trial.settings.num_workers for trial in result.trials} == {0}
    trained_ms, tried_ms = re.search(r"training took ([\d.]+) ms .* a trial took ([\d.]+) ms", result.reason).groups()  # type: ignore[union-attr]
    assert float(trained_ms) == pytest.approx(1000 * (step.wait_s + step.step_s))
    assert float(tried_ms) >= 30  # of the stand-in alone
