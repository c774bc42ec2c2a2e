"""find_loader_settings: finds what helps, and leaves the loader and the random numbers as they are."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler
from trainings import Samples, Stream

from lightning_gpu_tools import find_loader_settings
from lightning_gpu_tools.loaders.random_state import random_state


def test_a_loader_that_waits_gets_workers_and_nothing_is_consumed() -> None:
    generator = torch.Generator().manual_seed(4)
    samples = Samples(90, time.sleep, 0.03)
    sampler = RandomSampler(samples, generator=generator)
    loader = DataLoader(samples, batch_size=None, sampler=sampler, generator=generator)
    before, attributes = random_state([generator]), dict(vars(loader))
    result = find_loader_settings(loader, 0.01, budget_s=3)
    assert random_state([generator]) == before
    assert vars(loader) == attributes
    assert result.users is not None
    assert result.settings is not None
    assert result.users.num_workers == 0
    assert result.settings.num_workers >= 2
    assert not result.applied
    assert "batches/s against" in result.reason
    assert len(result.trials) >= 3


class Drawing(Samples):
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(4)


def test_a_dataset_that_draws_random_numbers_does_not_disturb_those_of_the_process() -> None:
    before = random_state()
    find_loader_settings(DataLoader(Drawing(50)), 0.005, budget_s=1)
    assert random_state() == before


@pytest.mark.parametrize(
    ("loader", "why"),
    [(DataLoader(Stream(Samples(5))), "its dataset is iterable"), (range(9), "it is a builtins.range")],
)
def test_what_cannot_be_changed_is_left_alone(loader: Any, why: str) -> None:
    result = find_loader_settings(loader, 0.01)
    assert why in result.reason
    assert result.settings == result.users
    assert not result.trials


class Stuck:
    """A sampler that cannot be copied."""

    def __init__(self) -> None:
        self.stream = (i for i in range(5))

    def __iter__(self) -> Any:
        return iter(range(5))


def test_a_sampler_that_cannot_be_copied_is_not_touched() -> None:
    result = find_loader_settings(DataLoader(Samples(5), sampler=Stuck()), 0.01)
    assert "its sampler cannot be copied (TypeError" in result.reason


@pytest.mark.parametrize(("name", "options"), [("step_time_s", (0.0, 1.0)), ("budget_s", (1.0, float("nan")))])
def test_times_that_are_none_are_refused(name: str, options: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match=f"{name} must be a positive number of seconds"):
        find_loader_settings(DataLoader(Samples(5)), options[0], budget_s=options[1])


def test_a_loader_without_batches_is_refused() -> None:
    with pytest.raises(ValueError, match="no batches"):
        find_loader_settings(DataLoader(Samples(0), sampler=[]), 0.01)


def test_the_datasets_own_error_comes_out() -> None:
    class Broken(Samples):
        def __getitem__(self, index: int) -> torch.Tensor:
            raise KeyError("broken")

    with pytest.raises(KeyError, match="broken"):
        find_loader_settings(DataLoader(Broken(5)), 0.01)
