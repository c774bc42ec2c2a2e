"""Fits of many kinds: the report explains where nearly all of the time went."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    Checkpoint,
    LearningRateFinder,
    ModelCheckpoint,
)
from lightning.pytorch.loggers import CSVLogger
from trainings import Boom, Model, Raise, Samples, Tunable, burn, loader, quiet_trainer

from lightning_gpu_tools import GPUUtilizationAdvisor, GPUUtilizationMonitor, NumWorkersFinder
from lightning_gpu_tools.runs import session
from lightning_gpu_tools.trainer.measuring_callback import FitSession
from lightning_gpu_tools.training.step_clock import StepClock

STEPS = 40


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time by what this thread computes: other processes take none of it, however busy the machine is."""
    monkeypatch.setattr(session, "StepClock", lambda: StepClock(time.thread_time))


class Watch(Callback):
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.clock = FitSession.of(trainer, self).clock


class Manual(Model):
    automatic_optimization = False

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        loss = self.layer(batch).square().mean() / 1e4
        self.manual_backward(loss)
        optimizer = self.optimizers()
        optimizer.step()
        optimizer.zero_grad()


class Fetching(Model):
    def training_step(self, dataloader_iter: Any) -> torch.Tensor:
        batch, *_ = next(dataloader_iter)
        return self.layer(batch).square().mean() / 1e4


class Data(LightningDataModule):
    def train_dataloader(self) -> Any:
        burn(0.005)  # as one that reads an index
        return loader(Samples(STEPS))

    def val_dataloader(self) -> Any:
        return loader(Samples(4))


class FineTune(LearningRateFinder):
    """As in the recipe of Lightning's documentation: looks for a learning rate at some epochs."""

    def on_fit_start(self, *args: Any) -> None:
        """Not at the beginning."""

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.current_epoch == 1:
            self.lr_find(trainer, pl_module)


AT_STEP = 100  # a fit that ends with an exception; what Lightning does then is short in comparison


Fit = tuple[LightningModule, dict[str, Any], dict[str, Any]]


def fit(
    model: Callable[[], LightningModule] = Model,
    data: Callable[[], Any] = lambda: {"train_dataloaders": loader(Samples(STEPS))},
    callbacks: Sequence[Callable[[], Callback]] = (),
    *,
    val: int = 0,
    log: bool = False,
    **options: Any,
) -> Callable[[Path], Fit]:
    """Return what makes a model, what it is fitted on, and the options of its Trainer."""

    def make(folder: Path) -> Fit:
        made = [one() for one in callbacks]
        saves = {"enable_checkpointing": True} if any(isinstance(one, Checkpoint) for one in made) else {}
        logs = {"logger": CSVLogger(folder)} if log else {}
        loaders = {"val_dataloaders": loader(Samples(val))} if val else {}
        return model(), {**data(), **loaders}, {"callbacks": made, **saves, **logs, **options}

    return make


def on(make: Callable[[], Any]) -> Callable[[], dict[str, Any]]:
    return lambda: {"train_dataloaders": make()}


def every_step(**options: Any) -> Callable[[], Callback]:
    return lambda: ModelCheckpoint(every_n_train_steps=1, **options)


BARE = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
KINDS = {
    "validation in mid-epoch": fit(val=4, val_check_interval=10, num_sanity_val_steps=0),
    "barebones": fit(barebones=True, **dict.fromkeys(BARE)),
    "reloading": fit(Model, lambda: {"datamodule": Data()}, max_epochs=3, reload_dataloaders_every_n_epochs=1),
    "logger": fit(log=True, log_every_n_steps=1),
    "checkpoint at every step": fit(callbacks=[every_step()]),
    "manual optimization": fit(Manual),
    "dataloader_iter": fit(Fetching),
    "exception": fit(max_epochs=3, callbacks=[lambda: Raise(at_step=AT_STEP)]),
    "learning rate finder in mid-fit": fit(
        Tunable, dict, callbacks=[lambda: FineTune(num_training_steps=4, update_attr=False)], max_epochs=3
    ),
    "loader search": fit(
        data=on(lambda: loader(Samples(200, burn, 0.001))), callbacks=[lambda: NumWorkersFinder(budget_s=0.5)]
    ),
}


def train(make: Callable[[Path], Fit], folder: Path, **more: Any) -> tuple[StepClock, Trainer]:
    model, loaders, options = make(folder)
    watch = Watch()
    callbacks = [GPUUtilizationMonitor(report=False), GPUUtilizationAdvisor(min_steps=5, min_seconds=0), watch]
    trainer = quiet_trainer(folder, **{**options, "callbacks": [*callbacks, *options["callbacks"]]})
    with contextlib.suppress(Boom):
        trainer.fit(model, **loaders, **more)
    return watch.clock, trainer


def explained(clock: StepClock) -> float:
    assert clock.wall_s == pytest.approx(sum(clock.seconds.values()))
    return 1 - clock.seconds.get("unexplained", 0.0) / clock.wall_s


@pytest.mark.parametrize("kind", KINDS)
def test_a_report_explains_where_the_time_went(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.chdir(tmp_path)
    clock, _ = train(KINDS[kind], tmp_path)
    assert clock.steps > 0
    assert explained(clock) >= 0.95


def test_each_of_several_fits_of_one_trainer_is_explained(tmp_path: Path) -> None:
    clock, trainer = train(fit(callbacks=[every_step()]), tmp_path)
    watch = next(callback for callback in trainer.callbacks if isinstance(callback, Watch))  # type: ignore[attr-defined]
    model = trainer.lightning_module
    trainer.validate(model, loader(Samples(4)), verbose=False)
    assert watch.clock is not clock
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, loader(Samples(STEPS)))
    assert (watch.clock.steps, clock.steps) == (STEPS, STEPS)
    assert explained(watch.clock) >= 0.95
    resumed, _ = train(fit(max_epochs=3), tmp_path, ckpt_path=trainer.checkpoint_callback.best_model_path)
    assert resumed.steps == STEPS
    assert explained(resumed) >= 0.95
