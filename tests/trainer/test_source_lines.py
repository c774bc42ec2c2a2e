"""Source lines that a real training names, however long they take."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import decoding
import pytest
from decoding import Decoded
from lightning.pytorch import Callback, Trainer
from trainings import Model, loader, quiet_trainer

from lightning_gpu_tools import GPUUtilizationAdvisor, GPUUtilizationMonitor, load_report
from lightning_gpu_tools.cli import main
from lightning_gpu_tools.training import line_sampler
from lightning_gpu_tools.training.line_sampler import WorkerLines
from lightning_gpu_tools.training.phases import DATA_LOADING

ENOUGH = 40  # samples, so that a busy machine's few at other lines do not matter
MAX_STEPS = 5_000


@pytest.fixture(autouse=True)
def nothing_stays(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Sample often; afterwards Python's switch interval is as it was, and no file is left."""
    monkeypatch.setattr(line_sampler, "MEAN_S", 0.01)
    folders: list[str] = []
    sampled, before_s = WorkerLines.sampled, sys.getswitchinterval()

    def remembered(self: WorkerLines, loop: Any) -> Any:
        try:
            return sampled(self, loop)
        finally:
            folders.append(str(self._folder))

    monkeypatch.setattr(WorkerLines, "sampled", remembered)
    yield
    assert sys.getswitchinterval() == before_s
    assert folders
    assert not any(map(os.path.exists, folders))


class Until(Callback):
    """Trains until enough samples of the loader were taken."""

    def __init__(self, monitor: GPUUtilizationMonitor) -> None:
        self.monitor = monitor

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        recorder = self.monitor._session.recorder
        lines = recorder.lines.seen(recorder.loaders.workers.pids)
        trainer.should_stop = sum(one.samples for one in lines if one.phase == DATA_LOADING) >= ENOUGH


def test_the_loaders_line_is_named_everywhere(tmp_path: Path) -> None:
    monitor, advisor = GPUUtilizationMonitor(), GPUUtilizationAdvisor(min_steps=5, min_seconds=0.01)
    trainer = quiet_trainer(tmp_path, callbacks=[monitor, advisor, Until(monitor)])
    trainer.fit(Model(), loader(Decoded(MAX_STEPS)))
    assert trainer.global_step < MAX_STEPS
    report = load_report(tmp_path)
    finding = next(one for one in report.diagnosis.findings if one.cause == "data_loading")
    line = str(finding.evidence["source_lines"])
    decode = f"{os.path.relpath(decoding.__file__)}:{decoding.LINE} in decode"
    assert line.startswith(f"{decode} (")
    assert f"% of the loader's time is at {decode}." in finding.advice
    (path,) = tmp_path.rglob("gpu_report.json")
    assert json.loads(path.read_text())["lines"][0]["function"] == "decode"
    assert main(["report", str(path), "--full"]) == 0
