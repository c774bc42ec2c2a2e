"""Places of a report: the logger's folder, a folder of its own, or a URL."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from trainings import Model, Samples, loader, quiet_trainer

from lightning_gpu_tools import GPUUtilizationMonitor, load_report, watch
from lightning_gpu_tools.cli import main
from lightning_gpu_tools.runs import run_report


@pytest.fixture
def bucket() -> Iterator[Any]:
    """An empty file system in memory, as any other that is reached by a URL."""
    memory = fsspec.filesystem("memory")
    yield memory
    memory.rm("/", recursive=True)


def train(folder: str | Path, *callbacks: Callback, steps: int = 3, **options: Any) -> Trainer:
    trainer = quiet_trainer(folder, callbacks=[GPUUtilizationMonitor(), *callbacks], **options)  # type: ignore[arg-type]
    trainer.fit(Model(), loader(Samples(steps)))
    return trainer


def test_without_a_logger_the_report_has_a_folder_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*exists and is not empty")
        train(tmp_path, ModelCheckpoint(tmp_path), enable_checkpointing=True)
    assert sorted(path.suffix for path in tmp_path.iterdir()) == ["", ".ckpt"]
    assert [path.name for path in (tmp_path / "gpu_report").iterdir()] == ["gpu_report.json"]
    assert "Report: gpu_report/gpu_report.json (the run is too short for a picture)\n" in capsys.readouterr().out
    with watch() as run:
        list(run.batches(range(3)))
    assert load_report("gpu_report").settings["model"] != "Model"  # of the loop
    assert load_report("gpu_report/gpu_report.previous.json").settings["model"] == "Model"


class WaitsForTheReport(Callback):
    """Waits in the last step until the report has been written meanwhile."""

    def __init__(self, bucket: Any) -> None:
        self.bucket = bucket
        self.seen: list[str] = []

    def on_train_end(self, *args: Any) -> None:
        deadline_s = time.monotonic() + 60
        while not self.seen and time.monotonic() < deadline_s:
            time.sleep(0.01)
            self.seen = [path for path in self.bucket.find("/") if path.endswith("gpu_report.json")]
        self.outcome = load_report("memory://bucket").outcome


def test_a_report_is_written_to_a_url(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    bucket: Any,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_report, "FIRST_WRITE_S", 0.05)
    folder = "memory://bucket/run/gpu_report"
    waits = WaitsForTheReport(bucket)
    train("memory://bucket/run", waits, steps=80, enable_checkpointing=True)
    assert waits.outcome.startswith("running: step ")
    assert load_report(folder).outcome == "completed"
    assert f"Report: {folder}/gpu_report.json (the run is too short for a picture)\n" in capsys.readouterr().out
    assert os.listdir(tmp_path) == []
    assert not bucket.glob("/bucket/**/*.previous.json")  # what it wrote while it ran was its own
    assert bucket.glob("/bucket/run/**/*.ckpt")
    assert main(["report", "memory://bucket/run"]) == 0
    assert f"Newest report in memory://bucket/run: {folder}/gpu_report.json" in capsys.readouterr().err
    train("memory://bucket/run", steps=5)  # the next run
    assert load_report("memory://bucket/run").steps == 5
    assert load_report(f"{folder}/gpu_report.previous.json").steps == 80
    assert not [path for path in bucket.find("/") if path.endswith(".part")]


def test_a_url_that_cannot_be_reached_is_named_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with (
        pytest.warns(UserWarning, match=r"not written to 'nosuch://bucket/run': Protocol not known: nosuch"),
        watch(folder="nosuch://bucket/run") as run,
    ):
        assert list(run.batches(range(3))) == [0, 1, 2]
    assert os.listdir(tmp_path) == []
