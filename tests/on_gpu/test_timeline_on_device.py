"""The GPU's idle time by its own events, against what a training was built to leave idle."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from trainings import Model, Samples, Spending, loader, quiet_trainer

from lightning_gpu_tools.trainer.fit_timer import FitTimer
from lightning_gpu_tools.training.run_measurements import GpuIdle
from lightning_gpu_tools.training.step_clock import StepClock

pytestmark = pytest.mark.gpu

STEPS = 200


class Watch(Callback):
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.clock = StepClock()
        FitTimer(trainer, self.clock)


class Busy(Model):
    """A step that keeps the GPU busy for about so many milliseconds and the host for hardly any."""

    def __init__(self, kernel_ms: float) -> None:
        super().__init__()
        self.kernel_ms = kernel_ms

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        torch.cuda._sleep(int(self.kernel_ms * 1e6))  # in cycles; the clock is between 1 and 2 GHz
        return super().training_step(batch, batch_idx)


def train(folder: Path, model: Model, *others: Callback, data_s: float = 0.0) -> GpuIdle:
    """Train and return the idle times."""
    watch = Watch()
    trainer = quiet_trainer(folder, accelerator="gpu", callbacks=[watch, *others])
    trainer.fit(model, loader(Samples(STEPS, time.sleep, data_s)))
    idle = watch.clock.gpu_idle()
    assert idle is not None
    assert idle.samples > STEPS / 20
    return idle


def idle_share(idle: GpuIdle, phase: str) -> float:
    """Return in which share of the host's time for a phase the GPU was idle; a busy host takes longer for both."""
    return idle.idle_s.get(phase, 0.0) / idle.host_s[phase]


def test_a_wait_that_the_gpu_feels_is_idle_time(tmp_path: Path) -> None:
    idle = train(tmp_path, Busy(1.0), data_s=0.020)
    assert 0.75 < idle_share(idle, "data_loading") <= 1.02


def test_a_wait_behind_gpu_work_is_none(tmp_path: Path) -> None:
    idle = train(tmp_path, Busy(60.0), data_s=0.005)
    assert idle_share(idle, "data_loading") < 0.1


def test_a_slow_callback_is_idle_time_by_its_name(tmp_path: Path) -> None:
    idle = train(tmp_path, Busy(1.0), Spending(time.sleep, "on_train_batch_end", 0.020))
    assert 0.75 < idle_share(idle, "callback/Spending") <= 1.02


class RefusesToWait(Callback):
    """Makes every wait of the host an error while steps are measured; moving the model to the GPU waits, too."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        torch.cuda.set_sync_debug_mode("error")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        torch.cuda.set_sync_debug_mode("default")


def test_looking_makes_the_host_wait_for_nothing(tmp_path: Path) -> None:
    try:
        train(tmp_path, Model(), RefusesToWait())
    finally:
        torch.cuda.set_sync_debug_mode("default")
