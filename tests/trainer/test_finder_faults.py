"""Whatever fails around the finder, training goes on as without it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from torch.utils.data import DataLoader, get_worker_info
from trainings import Boom, Model, Raise, Samples, quiet_trainer

from lightning_gpu_tools import NumWorkersFinder
from lightning_gpu_tools.trainer import num_workers_finder

LOAD_S, STEP_S = 0.016, 0.004


class InWorkers(Samples):
    """Does something else in worker processes."""

    def __init__(self, act: Any, count: int = 60) -> None:
        super().__init__(count, time.sleep, LOAD_S)
        self.act = act

    def __getitem__(self, index: int) -> torch.Tensor:
        if get_worker_info() is not None:
            self.act()
        return super().__getitem__(index)


class Batches(Callback):
    def __init__(self) -> None:
        self.seen: list[int] = []
        self.workers: list[int] = []

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, index: int) -> None:
        self.seen.append(int(batch[0, 0]))
        self.workers.append(trainer.train_dataloader.num_workers)


def fit(folder: Path, finder: NumWorkersFinder, act: Any, *callbacks: Callback, count: int = 60) -> Batches:
    seed_everything(7)
    batches = Batches()
    trainer = quiet_trainer(folder, callbacks=[finder, batches, *callbacks])
    trainer.fit(Model(time.sleep, STEP_S), DataLoader(InWorkers(act, count)))
    return batches


def fail() -> None:
    raise OSError("not in a worker")


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (fail, "OSError: not in a worker"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "killed by SIGKILL"),
        (lambda: time.sleep(1000), "timed out"),
    ],
)
def test_what_fails_in_a_trial_costs_no_more_than_the_budget(tmp_path: Path, act: Any, said: str) -> None:
    finder = NumWorkersFinder(budget_s=1.5)
    batches = fit(tmp_path, finder, act)
    assert batches.seen == list(range(60))
    assert set(batches.workers) == {0}
    assert finder.result is not None
    assert said in finder.result.reason
    assert finder.result.seconds < 2.5
    assert not multiprocessing.active_children()


class WhenApplied(Callback):
    """Does something once the settings found have been in use for some steps."""

    def __init__(self, finder: NumWorkersFinder, act: Any) -> None:
        self.finder, self.act, self.steps = finder, act, 0

    def on_train_batch_end(self, *args: Any) -> None:
        self.steps += self.finder.result is not None and self.finder.result.applied
        if self.steps == 5:
            self.act()


def kill_the_workers() -> None:
    for worker in multiprocessing.active_children():
        worker.kill()


def test_settings_that_fail_in_use_are_taken_back_without_losing_a_batch(tmp_path: Path) -> None:
    finder = NumWorkersFinder(budget_s=1.5)
    with pytest.warns(UserWarning, match="killed by SIGKILL.*The original settings are back"):
        batches = fit(tmp_path, finder, lambda: None, WhenApplied(finder, kill_the_workers))
    assert batches.seen == list(range(60))
    assert batches.workers[-1] == 0
    assert finder.result is not None
    assert finder.result.settings == finder.result.original
    assert finder.result.confirmed is False
    assert "They failed in use" in finder.result.reason


def test_settings_that_turn_out_slower_are_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(num_workers_finder, "CONFIRM_STEPS", 20)
    slow = tmp_path / "slow"
    finder = NumWorkersFinder(budget_s=1.5)
    batches = fit(
        tmp_path, finder, lambda: slow.exists() and time.sleep(0.3), WhenApplied(finder, slow.touch), count=100
    )
    assert batches.seen == list(range(100))
    assert max(batches.workers) >= 2
    assert batches.workers[-1] == 0
    assert finder.result is not None
    assert finder.result.confirmed is False
    assert "they were slower" in finder.result.reason


@pytest.mark.parametrize("broken", ["search", "step_cost", "read_host_budget", "switchable", "restore", "is_slower"])
def test_a_fault_of_the_finder_never_reaches_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    def fault(*args: Any, **kwargs: Any) -> Any:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(num_workers_finder, broken, fault)
    monkeypatch.setattr(num_workers_finder, "CONFIRM_STEPS", 5)
    batches = fit(tmp_path, NumWorkersFinder(budget_s=1.0), lambda: None)
    assert batches.seen == list(range(60))
    for worker in multiprocessing.active_children():  # which only `restore` would have ended
        assert broken == "restore"
        worker.kill()


@pytest.mark.parametrize("at_step", [10, 40])
def test_an_exception_of_the_training_stays_what_it_is(tmp_path: Path, at_step: int) -> None:
    finder = NumWorkersFinder(budget_s=1.0)
    with pytest.raises(Boom, match=f"at step {at_step}"):
        fit(tmp_path, finder, lambda: None, Raise(at_step))
    assert not multiprocessing.active_children()
    assert finder.result is not None
