"""Faults in the thread beside a training change nothing of the training."""

from __future__ import annotations

import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer
from trainings import Model, Samples, background_threads, loader, quiet_trainer

from lightning_gpu_tools import GPUUtilizationMonitor, load_report
from lightning_gpu_tools.reports.report import ReportFile
from lightning_gpu_tools.runs import run_report


class WaitFor(Callback):
    """Waits at a step until something has happened in the thread."""

    def __init__(self, event: threading.Event, at_step: int = 30) -> None:
        self.event, self.at_step = event, at_step

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == self.at_step:
            assert self.event.wait(20)


def test_a_fault_in_the_thread_is_warned_about_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sound, failed, trains_in = ReportFile.save, threading.Event(), threading.get_ident()

    def fail(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == trains_in:
            return sound(*args, **kwargs)
        failed.set()
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(ReportFile, "save", fail)
    monkeypatch.setattr(run_report, "FIRST_WRITE_S", 0.0)
    trainer = quiet_trainer(
        tmp_path, callbacks=[GPUUtilizationMonitor(), WaitFor(failed)], log_every_n_steps=5, max_epochs=3
    )
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        trainer.fit(Model(), loader(Samples(40)))
    assert trainer.global_step == 120
    message = "Writing the report while training runs failed: PermissionError: [Errno 13] Permission denied."
    assert [str(one.message) for one in warned].count(message) == 1
    assert load_report(tmp_path).outcome == "completed"
    assert background_threads() == []
