"""The trials on a real loader with real workers, where time passes by the hand of the test only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, get_worker_info
from trainings import HandClock, Samples

from lightning_gpu_tools.advice.loader_trials import LoaderResult, LoaderTrial
from lightning_gpu_tools.host import read_host_budget
from lightning_gpu_tools.loaders.ranks import OneRank
from lightning_gpu_tools.loaders.switch import Switch
from lightning_gpu_tools.loaders.tuning import Terms, Tuning

STEP_S, LOAD_S = 0.010, 0.040


def usual_wait(workers: int) -> float:
    return max(0.0, LOAD_S / workers - STEP_S) if workers else LOAD_S


class Training:
    """A loop over a loader whose waits and steps cost what a test says, by the number of workers in use."""

    def __init__(self, wait: Callable[[int], float] = usual_wait, *, sample: Callable[[int], int] = int) -> None:
        self.clock, self.wait = HandClock(), wait
        self.step: Callable[[int], float] = lambda workers: STEP_S
        self.results: list[LoaderResult] = []
        self.reports: list[LoaderTrial] = []
        loader = DataLoader(_Mapped(sample), batch_size=None, sampler=_waiting(self))
        self.switch = Switch(loader, watched=True, clock=self.clock)

    def tune(self, **terms: Any) -> Tuning:
        known = {"host": read_host_budget(), "cuda": False, "budget_s": 30.0}
        tuning = Tuning(
            self.switch,
            Terms(**{**known, **terms}),
            ranks=OneRank(),
            report=self.reports.append,
            conclude=self.results.append,
        )
        self.switch.listener = tuning
        return tuning

    def run(self, epochs: int = 1, *, pause_every: int = 10**9) -> list[int]:
        seen = []
        for _ in range(epochs):
            for batch in self.switch.loader:
                seen.append(int(batch))
                self.clock.spend(self.step(self.switch.settings.num_workers))
                if len(seen) % pause_every == 0:
                    self.clock.spend(1000.0)
                    self.switch.pause()
        self.switch.close()
        return seen


def _waiting(training: Training) -> Any:
    """Return a sampler, which the training process asks once a batch: there the wait is spent."""

    class Waiting:
        # It holds nothing: what a sampler holds and training changes is for other settings to keep away from.
        def __iter__(self) -> Iterator[int]:
            for i in range(len(self)):
                training.clock.spend(training.wait(training.switch.settings.num_workers))
                yield i

        def __len__(self) -> int:
            return 6000

    return Waiting()


class _Mapped(Samples):
    def __init__(self, sample: Callable[[int], int]) -> None:
        super().__init__(6000)
        self.sample = sample

    def __getitem__(self, index: int) -> Any:
        return self.sample(index)


def test_the_fewest_workers_that_are_fast_enough_are_found_and_left_on() -> None:
    training = Training()
    tuning = training.tune()
    assert training.run() == list(range(6000))
    result = tuning.result
    assert result is not None
    assert result.settings is not None
    assert result.settings.num_workers in (4, 5)
    assert (result.applied, result.confirmed) == (True, True)
    assert training.switch.settings == result.settings
    assert [(item.applied, item.confirmed) for item in training.results] == [(True, None), (True, True)]
    assert training.reports == list(result.trials)
    assert result.seconds <= 30 + 2  # the confirmation is no search
    users = result.scores[0]
    assert users.batches_per_s == pytest.approx(1 / (STEP_S + LOAD_S))
    assert users.wait_s == pytest.approx(LOAD_S)
    assert result.trials[0].cost is not None
    assert result.trials[0].cost.wall_s == pytest.approx(LOAD_S)
    assert result.trials[1].cost is not None
    assert result.trials[1].cost.cpu_s is not None
    assert result.trials[1].start_s is not None
    assert 0 < result.trials[1].start_s < 60
    assert result.wait_share == pytest.approx(0.0, abs=1e-6)


def test_it_is_taken_back_if_it_is_slower_in_use() -> None:
    training = Training()
    tuning = training.tune()
    training.step = lambda workers: 0.5 if tuning.result is not None and workers else STEP_S
    training.run()
    assert tuning.result is not None
    assert (tuning.result.applied, tuning.result.confirmed) == (False, False)
    assert "slower than yours, so yours are back" in tuning.result.reason
    assert training.switch.settings == training.switch.users


def test_a_machine_that_became_slower_altogether_is_not_held_against_it() -> None:
    training = Training()
    tuning = training.tune()
    training.step = lambda workers: 0.5 if tuning.result is not None else STEP_S
    training.wait = lambda workers: usual_wait(workers) * (10 if tuning.result is not None else 1)
    training.run()
    assert tuning.result is not None
    assert (tuning.result.applied, tuning.result.confirmed) == (True, True)


def test_what_is_not_to_be_applied_is_not() -> None:
    training = Training()
    tuning = training.tune(apply=False)
    training.run()
    assert tuning.result is not None
    assert tuning.result.settings is not None
    assert tuning.result.settings.num_workers in (4, 5)
    assert not tuning.result.applied
    assert training.switch.settings == training.switch.users
    assert len(training.results) == 1


def test_validation_and_checkpoints_do_not_count() -> None:
    training = Training()
    tuning = training.tune()
    training.run(pause_every=7)
    assert tuning.result is not None
    assert tuning.result.scores[0].batches_per_s == pytest.approx(1 / (STEP_S + LOAD_S))
    assert tuning.result.seconds < 40


def test_settings_that_fail_are_left_out() -> None:
    def fails_in_company(index: int) -> int:
        info = get_worker_info()
        if info is not None and info.num_workers > 2:
            raise MemoryError("no room for so many")
        return index

    training = Training(sample=fails_in_company)
    tuning = training.tune()
    assert training.run() == list(range(6000))
    assert tuning.result is not None
    assert tuning.result.settings is not None
    assert tuning.result.settings.num_workers in (1, 2)
    failed = [item for item in tuning.result.scores if item.failed is not None]
    assert failed
    assert all("no room for so many" in str(item.failed) and item.visits == 1 for item in failed)


def test_a_sampler_that_draws_as_it_goes_keeps_its_settings() -> None:
    training = Training(lambda workers: usual_wait(workers) + 0 * float(torch.rand(1)))
    tuning = training.tune()
    training.run()
    assert tuning.result is not None
    assert "draws random numbers as it goes" in tuning.result.reason
    assert len(tuning.result.trials) == 1
    assert training.switch.settings == training.switch.users


def test_a_slow_surprise_is_cut_short() -> None:
    training = Training(lambda workers: 5.0 if workers else LOAD_S)
    tuning = training.tune(budget_s=10.0)
    training.run()
    assert tuning.result is not None
    assert tuning.result.settings == tuning.result.users
    # Beyond the budget: what the workers are handed when they start, two each here, and the fewest steps of a trial.
    assert tuning.result.seconds < 10 + 2 * 5 * tuning.result.trials[1].settings.num_workers + 4 * 5


def test_slow_loading_that_uses_the_budget_up_is_tried_with_workers_all_the_same() -> None:
    training = Training(lambda workers: 5.0 / max(1, workers))
    training.step = lambda workers: 2.0
    tuning = training.tune(budget_s=10.0)
    training.run()
    assert tuning.result is not None
    assert tuning.result.settings is not None
    assert tuning.result.settings.num_workers > 1
    assert tuning.result.applied
    assert tuning.result.trials[0].seconds < 5 * (5.0 + 2.0)
