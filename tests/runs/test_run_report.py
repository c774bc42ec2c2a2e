"""The end of a fit: its report is written, then printed, and what fails costs only itself."""

from __future__ import annotations

import io
import re
import shlex
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger
from sample_report import REPORT
from trainings import Model, Samples, loader, logged, quiet_trainer

from lightning_gpu_tools import GPUUtilizationMonitor, load_report
from lightning_gpu_tools.cli import main
from lightning_gpu_tools.reports.report import ReportFile
from lightning_gpu_tools.runs import publish as publishing
from lightning_gpu_tools.runs import run_report
from lightning_gpu_tools.runs.publish import publish


def train(folder: Path, *others: Callback, steps: int = 3) -> None:
    trainer = quiet_trainer(folder, callbacks=[GPUUtilizationMonitor(), *others])
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
    assert f"Report: {tmp_path / 'gpu_report' / 'gpu_report.json'} (the run is too short for a picture)\n" in printed


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


@pytest.mark.parametrize("folders", [("my runs", "my runs"), ("version_0", "version_1")])
def test_the_advised_command_compares_the_next_run_with_this_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], folders: tuple[str, str]
) -> None:
    commands = []
    for folder, step_s in zip(folders, (0.1, 0.05), strict=True):
        report = replace(REPORT, step_s_blocks=tuple(step_s + i / 1e4 for i in range(8)))
        publish(report, ReportFile(tmp_path / folder))
        commands += re.findall("lightning-gpu-tools (report .*)", capsys.readouterr().out)
    assert main(shlex.split(commands[0])) == 0
    assert capsys.readouterr().out.startswith("FASTER: 100 ms per mean step before, 50.4 ms now")
