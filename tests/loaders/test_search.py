"""The search for settings: what it finds, what it leaves untouched, and that it keeps to its budget."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from typing import Any

import pytest
import torch
from loader_switching import Hanging, frozen_states
from torch.utils.data import DataLoader, RandomSampler
from trainings import Samples, Stream

from lightning_gpu_tools import find_loader_settings

LOAD_S, STEP_S = 0.02, 0.005


def test_a_loader_that_waits_gets_workers_and_is_not_touched() -> None:
    generator = torch.Generator().manual_seed(4)
    samples = Samples(90, time.sleep, LOAD_S)
    sampler = RandomSampler(samples, generator=generator)
    loader = DataLoader(samples, batch_size=None, sampler=sampler, generator=generator)
    states, state, attributes = frozen_states(), generator.get_state(), dict(vars(loader))
    result = find_loader_settings(loader, STEP_S, budget_s=6)
    assert frozen_states() == states
    assert torch.equal(generator.get_state(), state)
    assert vars(loader) == attributes
    assert result.original is not None
    assert result.settings is not None
    assert result.original.num_workers == 0
    assert result.settings.num_workers >= 2
    assert not result.applied
    assert "batches/s instead of" in result.reason
    assert not multiprocessing.active_children()


def test_a_loader_in_memory_loses_the_workers_it_does_not_need() -> None:
    loader = DataLoader(Samples(200), batch_size=4, num_workers=4)
    result = find_loader_settings(loader, 0.0005, budget_s=3)
    assert result.settings is not None
    assert result.settings.num_workers == 0


class Broken(Samples):
    def __getitem__(self, index: int) -> torch.Tensor:
        raise KeyError("no such sample")


class Killed(Samples):
    def __getitem__(self, index: int) -> torch.Tensor:
        os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


class Holding(Samples):
    def __init__(self, thing: object) -> None:
        super().__init__(9)
        self.thing = thing


class Stuck:
    """A sampler that cannot be copied."""

    def __init__(self) -> None:
        self.stream = (i for i in range(5))

    def __iter__(self) -> Any:
        return iter(range(5))


@pytest.mark.parametrize(
    ("loader", "why"),
    [
        (DataLoader(Stream(Samples(5))), "`Stream` is iterable and does not split by worker"),
        (range(9), "it is a builtins.range"),
        (DataLoader(Broken(9)), "a worker process cannot load a batch (KeyError: 'no such sample')"),
        (DataLoader(Killed(9)), "DeadWorkerError: a worker process was killed by SIGKILL from outside"),
        (DataLoader(Holding(threading.Lock())), "worker processes cannot copy its dataset (`Holding.thing`)"),
        (DataLoader(Samples(5), sampler=Stuck()), "its sampler yields no batches (TypeError"),
        (DataLoader(Samples(0), sampler=[]), "it has no batches"),
    ],
)
def test_what_cannot_be_tried_keeps_its_settings_with_the_reason(loader: Any, why: str) -> None:
    result = find_loader_settings(loader, 0.01, budget_s=3)
    assert why in result.reason
    assert result.settings == result.original
    assert not result.trials


def test_items_that_hang_end_the_search_within_its_budget() -> None:
    began_s = time.monotonic()
    result = find_loader_settings(DataLoader(Hanging(9), num_workers=3), 0.01, budget_s=2)
    assert time.monotonic() - began_s < 60  # the item alone takes 1,000
    assert "timed out" in result.reason
    assert not multiprocessing.active_children()
