"""Source lines that a real training names, however long they take."""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import decoding
import pytest
from advised import finding_on
from decoding import Decoded
from lightning.pytorch import Callback, Trainer
from trainings import Model, loader, quiet_trainer

from lightning_gpu_tools import GPUUtilizationAdvisor, GPUUtilizationMonitor, load_report
from lightning_gpu_tools.cli import main
from lightning_gpu_tools.files import scratch_prefix
from lightning_gpu_tools.training import line_sampler
from lightning_gpu_tools.training.phases import DATA_LOADING

ENOUGH = 40  # samples, so that a busy machine's few at other lines do not matter
MAX_STEPS = 5_000


def state() -> tuple[float, set[Path]]:
    """Return Python's switch interval and the temporary files of this process."""
    return sys.getswitchinterval(), {*Path(tempfile.gettempdir()).glob(f"{scratch_prefix()}*")}


class Until(Callback):
    """Trains until enough samples of the loader were taken."""

    def __init__(self, monitor: GPUUtilizationMonitor) -> None:
        self.monitor = monitor

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        recorder: Any = self.monitor._session.recorder  # type: ignore[union-attr]
        lines = recorder.lines.seen(recorder.loaders.workers.pids)
        trainer.should_stop = sum(one.samples for one in lines if one.phase == DATA_LOADING) >= ENOUGH


def test_the_loaders_line_is_named_everywhere_and_nothing_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_sampler, "MEAN_S", 0.01)
    before = state()
    monitor, advisor = GPUUtilizationMonitor(), GPUUtilizationAdvisor(min_steps=5, min_seconds=0.01)
    trainer = quiet_trainer(tmp_path, callbacks=[monitor, advisor, Until(monitor)])
    trainer.fit(Model(), loader(Decoded(MAX_STEPS)))
    assert state() == before
    assert trainer.global_step < MAX_STEPS
    report = load_report(tmp_path)
    finding = finding_on(report, "data_loading")
    line = str(finding.evidence["source_lines"])
    decode = f"{os.path.relpath(decoding.__file__)}:{decoding.LINE} in decode"
    assert line.startswith(f"{decode} (")
    assert f"% of the loader's time is at {decode}." in finding.advice
    (path,) = tmp_path.rglob("gpu_report.json")
    assert json.loads(path.read_text())["lines"][0]["function"] == "decode"
    assert main(["report", str(path), "--full"]) == 0
