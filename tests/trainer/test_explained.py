"""Fits of many kinds: the report explains where nearly all of the time went."""

import time
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer
from trainings import Model, Samples, burn, loader, quiet_trainer

from lightning_gpu_tools import GPUUtilizationAdvisor, GPUUtilizationMonitor, NumWorkersFinder
from lightning_gpu_tools.runs import session
from lightning_gpu_tools.trainer.fit_session import FitSession
from lightning_gpu_tools.training.step_clock import StepClock

STEPS = 40


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time by what this thread computes: other processes take none of it, however busy the machine is."""
    monkeypatch.setattr(session, "StepClock", lambda: StepClock(time.thread_time))


class Watch(Callback):
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.clock = FitSession.of(trainer, self).clock


@pytest.mark.parametrize(
    ("samples", "callbacks", "options"),
    [
        pytest.param(Samples(STEPS), [], {"val_check_interval": 10}, id="validation in mid-epoch"),
        pytest.param(Samples(200, burn, 0.001), [NumWorkersFinder(budget_s=0.5)], {}, id="loader search"),
    ],
)
def test_a_report_explains_where_the_time_went(
    tmp_path: Path, samples: Samples, callbacks: list[Callback], options: dict[str, Any]
) -> None:
    watch = Watch()
    own = [GPUUtilizationMonitor(report=False), GPUUtilizationAdvisor(min_steps=5, min_seconds=0), watch]
    trainer = quiet_trainer(tmp_path, callbacks=[*own, *callbacks], **options)
    trainer.fit(Model(), loader(samples), loader(Samples(4)))
    assert watch.clock.steps > 0
    assert watch.clock.wall_s == pytest.approx(sum(watch.clock.seconds.values()))
    assert watch.clock.seconds.get("unexplained", 0.0) / watch.clock.wall_s <= 0.05
