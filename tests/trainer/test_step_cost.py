"""The cost of monitor and advisor in a training step, counted in calls of functions, which no busy machine changes.

How long these take is measured by ``benchmarks/step_overhead.py`` and ``benchmarks/scale.py``.
"""

import sys
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger
from trainings import Model, Samples, loader, quiet_trainer

import lightning_gpu_tools
from lightning_gpu_tools import GPUUtilizationAdvisor, GPUUtilizationMonitor
from lightning_gpu_tools.runs import session

PACKAGE = str(Path(lightning_gpu_tools.__file__).parent)
FROM, STEPS = 120, 40  # after the warm-up and the first judgment


class Empty(Callback):
    def on_train_batch_end(self, *args: Any) -> None:
        pass


class Counted(Model):
    """Counts the calls of Python functions in this thread in each of 40 steps: all, and ours."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[int, int]] = []

    def count(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            every, ours = self.calls[-1]
            self.calls[-1] = every + 1, ours + frame.f_code.co_filename.startswith(PACKAGE)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if FROM <= batch_idx < FROM + STEPS:
            self.calls.append((0, 0))
            sys.setprofile(self.count)
        else:
            sys.setprofile(None)
        return super().training_step(batch, batch_idx)


def calls_of(callbacks: list[Callback], folder: Path, every: int) -> tuple[float, float]:
    trainer = quiet_trainer(folder, callbacks=callbacks, logger=CSVLogger(folder), log_every_n_steps=every)
    model = Counted()
    trainer.fit(model, loader(Samples(FROM + STEPS + 1)))
    # Without what is done every so many seconds: more often where steps are slow.
    every_call, ours = zip(*model.calls, strict=True)
    return median(every_call), median(ours)


def test_a_step_makes_fewer_calls_than_with_two_empty_callbacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "_LOG_EVERY_S", 60.0)
    ours = {}
    for every in (50, 1):
        empty, empty_ours = calls_of([Empty(), Empty()], tmp_path / f"empty {every}", every)
        # Without the running report, which is measured every so many seconds and not steps.
        callbacks = [GPUUtilizationMonitor(report=False, interval_s=60.0), GPUUtilizationAdvisor()]
        with_ours, ours[every] = calls_of(callbacks, tmp_path / f"ours {every}", every)
        assert empty_ours == 0
        assert with_ours < empty
    assert 10 < ours[50] < 60
    assert ours[1] - ours[50] < 10  # around the logger; hardly one asks whether to log
