"""The report of a fit: it is written, then printed, and what fails costs only itself."""

import io
import os
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from trainings import Model, Samples, background_threads, loader, logged, quiet_trainer

from lightning_gpu_tools import GPUUtilizationMonitor, load_report, watch
from lightning_gpu_tools.cli import main
from lightning_gpu_tools.reports.report import ReportFile
from lightning_gpu_tools.runs import publish as publishing
from lightning_gpu_tools.runs import run_report


def train(folder: str | Path, *others: Callback, steps: int = 3, **options: Any) -> None:
    trainer = quiet_trainer(folder, callbacks=[GPUUtilizationMonitor(), *others], **options)  # type: ignore[arg-type]
    trainer.fit(Model(), loader(Samples(steps)))
    assert trainer.global_step == steps


def fail(*args: Any, **kwargs: Any) -> Any:
    raise ZeroDivisionError("of ours")


class PrintsUnfinishedLines(io.StringIO):
    """Rich's stand-in for the stdout of a notebook: it prints an unfinished line by printing it once more."""

    def write(self, text: str) -> int:
        if not text.endswith("\n"):
            raise RecursionError
        return super().write(text)


def test_the_report_is_printed_in_writes_of_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", PrintsUnfinishedLines())
        train(tmp_path)
        printed = sys.stdout.getvalue()  # type: ignore[attr-defined]
    assert "Verdict: " in printed
    assert f"Report: {tmp_path / 'gpu_report' / 'gpu_report.json'}\nThe run is too short for a picture.\n" in printed


@pytest.mark.parametrize(
    ("owner", "name", "says", "files"),
    [
        (publishing, "render_text", "could not be shown: ZeroDivisionError: of ours", ["gpu_report.json"]),
        (publishing, "earlier_report", "could not be compared with the previous one: Zero", ["gpu_report.json"]),
        (ReportFile, "save", "could not be written to", []),
    ],
)
def test_a_fault_in_the_report_costs_only_itself_and_is_printed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    owner: Any,
    name: str,
    says: str,
    files: list[str],
) -> None:
    monkeypatch.setattr(owner, name, fail)
    train(tmp_path)
    printed = capsys.readouterr().out
    assert f"The report {says}" in printed
    assert ("Verdict: " in printed) is (name != "render_text")
    assert [path.name for path in tmp_path.rglob("gpu_report.*")] == files


class Broken(CSVLogger):
    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        if any(name.startswith("gpu_tools/") for name in metrics):
            raise ConnectionError("the server is away")


def test_every_logger_gets_the_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken, csv = Broken(tmp_path / "broken"), CSVLogger(tmp_path / "csv")
    trainer = quiet_trainer(tmp_path, callbacks=[GPUUtilizationMonitor()], logger=[broken, csv])
    trainer.fit(Model(), loader(Samples(90)))
    report = load_report(broken.log_dir)
    summary = report.diagnosis.summary()
    numbers = {f"gpu_tools/{name}": value for name, value in summary.items() if isinstance(value, float)}
    assert {"cause", "cause_share", "max_speedup"} <= summary.keys()
    assert {"gpu_tools/waiting_share", "gpu_tools/step_p50_s", "gpu_tools/step_p95_s"} <= numbers.keys()
    metrics = logged(Path(csv.log_dir)).items()
    assert {name: values[89] for name, values in metrics if name.startswith("gpu_tools/")} == numbers
    assert "The summary could not be sent to Broken: ConnectionError: the server is away" in capsys.readouterr().out


def test_no_filter_hides_that_there_is_no_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_report, "diagnose", fail)
    with warnings.catch_warnings(record=True) as shown:
        warnings.filterwarnings("ignore", message=".*without a report")
        train(tmp_path)
    assert "because of an internal error: ZeroDivisionError: of ours" in str([str(one.message) for one in shown])


# Faults in the thread beside a training


def test_a_fault_in_the_thread_is_warned_about_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sound, failed, trains_in = ReportFile.save, threading.Event(), threading.get_ident()

    def fail(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == trains_in:
            return sound(*args, **kwargs)
        failed.set()
        raise PermissionError(13, "Permission denied")

    def wait(trainer: Trainer, *args: Any) -> None:
        assert trainer.global_step != 30 or failed.wait(20)

    monkeypatch.setattr(ReportFile, "save", fail)
    monkeypatch.setattr(run_report, "FIRST_WRITE_S", 0.0)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        train(tmp_path, LambdaCallback(on_train_batch_end=wait), steps=120)
    message = "Writing the report while training runs failed: PermissionError: [Errno 13] Permission denied."
    assert [str(one.message) for one in warned].count(message) == 1
    assert load_report(tmp_path).outcome == "completed"
    assert background_threads() == []


# Places of a report: the logger's folder, a folder of its own, or a URL


def test_without_a_logger_the_report_has_a_folder_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*exists and is not empty")
        train(tmp_path, ModelCheckpoint(tmp_path), enable_checkpointing=True)
    assert sorted(path.suffix for path in tmp_path.iterdir()) == ["", ".ckpt"]
    assert [path.name for path in (tmp_path / "gpu_report").iterdir()] == ["gpu_report.json"]
    assert "Report: gpu_report/gpu_report.json\n" in capsys.readouterr().out
    with watch() as run:
        list(run.batches(range(3)))
    assert load_report("gpu_report").settings["model"] != "Model"  # of the loop
    assert load_report("gpu_report/gpu_report.previous.json").settings["model"] == "Model"


def test_a_report_is_written_to_a_url(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    memory_files: type[Any],
) -> None:
    bucket, outcomes = memory_files(), []

    def wait(*args: Any) -> None:
        """Wait in the last step until the report has been written meanwhile."""
        deadline_s = time.monotonic() + 60
        while not any(path.endswith("gpu_report.json") for path in bucket.find("/")):
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        outcomes.append(load_report("memory://bucket").outcome)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_report, "FIRST_WRITE_S", 0.05)
    folder = "memory://bucket/run/gpu_report"
    train("memory://bucket/run", LambdaCallback(on_train_end=wait), steps=80, enable_checkpointing=True)
    assert outcomes[0].startswith("running: step ")
    assert load_report(folder).outcome == "completed"
    assert f"Report: {folder}/gpu_report.json\n" in capsys.readouterr().out
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
