"""``lightning-gpu-tools report`` as a program."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from sample_report import REPORT

from lightning_gpu_tools.reports.report import save_report
from lightning_gpu_tools.reports.text import render_text

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


def test_two_runs_are_compared_by_exit_code(run_cli: RunCli, tmp_path: Path) -> None:
    blocks = tuple(0.05 + 0.0001 * (i % 7) for i in range(40))
    old = replace(REPORT, step_s_blocks=blocks)
    save_report(old, tmp_path / "old")
    save_report(replace(old, step_s_blocks=tuple(1.1 * block for block in blocks)), tmp_path / "slow")
    save_report(replace(old, settings={**old.settings, "batch_size": 32}), tmp_path / "other")

    def against_old(name: str, *options: str) -> "CompletedProcess[str]":
        return run_cli("report", str(tmp_path / name), "--against", str(tmp_path / "old"), *options)

    slow = against_old("slow", "--max-slowdown", "5%")
    assert (slow.returncode, slow.stderr) == (1, "")
    assert slow.stdout.startswith("SLOWER: a step took 50.3 ms and now takes 55.3 ms: +10.0 %")
    assert against_old("slow", "--max-slowdown", "20").returncode == 0
    other = against_old("other", "--format", "json")
    assert other.returncode == 3
    assert json.loads(other.stdout)["reasons"] == ["the batch size differs: 64 before, 32 now"]
    assert "Following its advice has brought: batch_size 64 -> 32: -50 %" in against_old("other").stdout
    assert against_old("slow", "--format", "markdown").stdout.startswith("**SLOWER:** ")
    assert run_cli("report", str(tmp_path / "slow"), "--max-slowdown", "5%").returncode == 2
    assert against_old("slow", "--max-slowdown", "-5%").returncode == 2
    assert against_old("missing").returncode == 1


def test_a_pull_request_gets_markdown(run_cli: RunCli, tmp_path: Path) -> None:
    save_report(REPORT, tmp_path)
    lines = run_cli("report", str(tmp_path), "--format", "markdown").stdout.splitlines()
    assert lines[0].startswith("**GPU utilization: LOW** (stopped by KeyError")
    assert lines[2].startswith("- **Why:** Waiting for data")
    assert lines.count("```text") == lines.count("```") == 1


def test_a_reader_that_goes_away_gets_no_traceback(run_python: RunCli, tmp_path: Path) -> None:
    save_report(REPORT, tmp_path)
    code = (
        "import subprocess, sys\n"
        "command = [sys.executable, '-m', 'lightning_gpu_tools', 'report', sys.argv[1], '--format', 'json']\n"
        "job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)\n"
        "job.stdout.close()\n"
        "sys.exit(job.stderr.read().decode())"
    )
    assert run_python("-c", code, str(tmp_path)).stderr.strip() == ""


@pytest.mark.parametrize("form", ["text", "markdown"])
def test_a_terminal_that_cannot_show_every_sign_gets_the_rest(run_cli: RunCli, tmp_path: Path, form: str) -> None:
    save_report(REPORT, tmp_path)
    result = run_cli("report", str(tmp_path), "--format", form, env={"PYTHONIOENCODING": "ascii"})
    assert (result.returncode, result.stderr) == (0, "")
    assert "LOW" in result.stdout
