"""Picture and page of a report: a separate process draws them, nobody waits for it, and nothing is lost."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from sample_report import REPORT
from trainings import Model, Samples, loader, quiet_trainer

from lightning_gpu_tools import GPUUtilizationAdvisor, GPUUtilizationMonitor, load_report
from lightning_gpu_tools.reports.report import ReportFile
from lightning_gpu_tools.runs.publish import publish, wait_for_drawings

pytest.importorskip("matplotlib", reason="needs the extra plot")

TOO_SHORT = replace(REPORT, diagnosis=replace(REPORT.diagnosis, verdict="too_short"))
PAGE, DATA, PICTURE = FILES = ["gpu_report.html", "gpu_report.json", "gpu_report.png"]


@pytest.fixture(autouse=True)
def no_pictures() -> None:
    """Have reports drawn, unlike in the other tests."""


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def instead_of(package: str, code: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a package of this name, with this code, before the real one."""
    file = folder / "site" / package / "__init__.py"
    file.parent.mkdir(parents=True)
    file.write_text(code)
    monkeypatch.delitem(sys.modules, package, raising=False)
    monkeypatch.syspath_prepend(folder / "site")


def test_a_fit_is_drawn_and_says_so_before(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    advisor = GPUUtilizationAdvisor(min_steps=20, min_seconds=0)
    trainer = quiet_trainer(tmp_path, callbacks=[GPUUtilizationMonitor(), advisor])
    trainer.fit(Model(), loader(Samples(90)))
    folder = tmp_path / "gpu_report"
    assert f"Report: {folder / DATA} (gpu_report.png and gpu_report.html will follow)\n" in capsys.readouterr().out
    wait_for_drawings()
    assert names(folder) == FILES
    assert (folder / PICTURE).read_bytes().startswith(b"\x89PNG")
    assert (folder / PAGE).read_text().startswith("<!DOCTYPE html>")
    assert capsys.readouterr().out == ""


def test_a_run_too_short_to_judge_has_no_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "gpu_report"
    folder.mkdir()
    for name in (PICTURE, PAGE):
        (folder / name).write_text("of an earlier run")
    quiet_trainer(tmp_path, callbacks=[GPUUtilizationMonitor()]).fit(Model(), loader(Samples(3)))
    wait_for_drawings()
    assert load_report(tmp_path).diagnosis.verdict == "too_short"
    assert names(folder) == [DATA]
    assert f"Report: {folder / DATA}\n" in capsys.readouterr().out


def test_the_next_fit_does_not_wait_for_the_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    instead_of("matplotlib", "import time\nwhile True: time.sleep(0.01)", tmp_path, monkeypatch)
    publish(REPORT, ReportFile(tmp_path / "one"))
    publish(TOO_SHORT, ReportFile(tmp_path / "two"))
    assert names(tmp_path / "one") == names(tmp_path / "two") == [DATA]
    publish(TOO_SHORT, ReportFile(tmp_path / "one"))  # which takes the place of the one that is being drawn
    wait_for_drawings()
    assert names(tmp_path / "one") == [DATA, "gpu_report.previous.json"]


def test_why_there_is_no_picture_is_printed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    instead_of("matplotlib", "raise OSError('no fonts\\x1b')", tmp_path, monkeypatch)
    publish(REPORT, ReportFile(tmp_path / "run"))
    wait_for_drawings()
    said = capfd.readouterr().out
    assert said.endswith("The picture of the report could not be drawn: OSError: no fonts\\x1b\n")
    assert names(tmp_path / "run") == [DATA]


PUBLISH = """
import sys
sys.path.insert(0, sys.argv[1])
from sample_report import REPORT
from lightning_gpu_tools.reports.report import ReportFile
from lightning_gpu_tools.runs.publish import publish
publish(REPORT, ReportFile(sys.argv[2]))
"""


def test_a_picture_is_not_lost_when_the_program_ends(
    run_python: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    scratch, folder = tmp_path / "scratch", tmp_path / "run"
    scratch.mkdir()
    child = run_python("-c", PUBLISH, str(Path(__file__).parents[1]), str(folder), env={"TMPDIR": str(scratch)})
    assert (child.returncode, names(folder)) == (0, FILES), child.stderr
    deadline_s = time.monotonic() + 60
    while os.listdir(scratch):  # the process that draws ends a little later
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
