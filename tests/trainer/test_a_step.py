"""A step reaches its report through the files that ARCHITECTURE.md names, and costs little.

The cost is counted in calls of functions, which no busy machine changes. How long these take is measured by
``benchmarks/step_overhead.py`` and ``benchmarks/scale.py``.
"""

import re
import sys
import time
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

PACKAGE = Path(lightning_gpu_tools.__file__).parent
MAX_FILES = 8


def test_a_step_reaches_its_report_through_the_files_of_the_architecture(tmp_path: Path, capsys: Any) -> None:
    text = (PACKAGE.parent / "ARCHITECTURE.md").read_text().partition("## A step\n")[2].partition("\n## ")[0]
    files = re.findall(r"`(\w+/[\w/]+\.py)`", text)[:MAX_FILES]
    calls: set[tuple[str, str]] = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_back is not None:
            calls.add((frame.f_back.f_code.co_filename, frame.f_code.co_filename))

    callbacks = [GPUUtilizationMonitor(), GPUUtilizationAdvisor(min_seconds=0.1)]
    trainer = quiet_trainer(tmp_path, callbacks=callbacks, max_steps=80)
    sys.setprofile(note)
    try:
        trainer.fit(Model(), loader(Samples(80, time.sleep, 0.004)))
    finally:
        sys.setprofile(None)
    assert "Verdict: " in capsys.readouterr().out
    paths = [str(PACKAGE / file) for file in files]
    for place, path in enumerate(paths[1:], start=1):
        assert any((path, other) in calls or (other, path) in calls for other in paths[:place]), path


FROM, STEPS = 120, 40  # after the warm-up and the first judgment


class Counted(Model):
    """Counts the calls of Python functions in this thread, all and ours, from step to step."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: list[tuple[int, int]] = []

    def count(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            every, ours = self.counts[-1]
            self.counts[-1] = every + 1, ours + frame.f_code.co_filename.startswith(str(PACKAGE))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if FROM <= batch_idx < FROM + STEPS:
            self.counts.append((0, 0))
            sys.setprofile(self.count)
        else:
            sys.setprofile(None)
        return super().training_step(batch, batch_idx)


class Empty(Callback):
    def on_train_batch_end(self, *args: Any) -> None:
        pass


def calls_of(callbacks: list[Callback], folder: Path, every: int) -> tuple[float, float]:
    """Return the medians of a step, without what is done every so many seconds: more often where steps are slow."""
    trainer = quiet_trainer(folder, callbacks=callbacks, logger=CSVLogger(folder), log_every_n_steps=every)
    model = Counted()
    trainer.fit(model, loader(Samples(FROM + STEPS + 1)))
    all_calls, ours = zip(*model.counts, strict=True)
    return median(all_calls), median(ours)


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
