"""``lightning-gpu-tools report`` as a program."""

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

from test_report import REPORT

from lightning_gpu_tools.report import save_report
from lightning_gpu_tools.report_text import render_text

RunCli = Callable[..., "CompletedProcess[str]"]


def test_it_prints_the_report_again(run_cli: RunCli, tmp_path: Path) -> None:
    save_report(REPORT, tmp_path)
    result = run_cli("report", str(tmp_path))
    assert (result.returncode, result.stdout) == (0, render_text(REPORT) + "\n")
    as_json = run_cli("report", str(tmp_path / "gpu_report.json"), "--format", "json")
    assert as_json.returncode == 0
    assert json.loads(as_json.stdout) == json.loads((tmp_path / "gpu_report.json").read_text())


def test_no_report_is_an_error_with_its_path_and_an_empty_stdout(run_cli: RunCli, tmp_path: Path) -> None:
    result = run_cli("report", str(tmp_path / "nowhere"))
    assert (result.returncode, result.stdout) == (1, "")
    assert str(tmp_path / "nowhere") in result.stderr
    assert "Traceback" not in result.stderr
