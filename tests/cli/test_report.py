"""``lightning-gpu-tools report`` as a program."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from sample_report import REPORT

from lightning_gpu_tools.reports.report import ReportFile, load_report
from lightning_gpu_tools.reports.text import render_text
from lightning_gpu_tools.training.run_measurements import SourceLine

Call = Callable[..., "CompletedProcess[str]"]


@pytest.fixture
def report(call: Call) -> Call:
    return lambda *arguments: call("report", *map(str, arguments))


def test_it_prints_the_report_again(tmp_path: Path, report: Call) -> None:
    saved = replace(REPORT, confirmation="num_workers 0 -> 6: 2.1x, confirmed.")
    file = ReportFile(tmp_path).save(saved)
    assert report(tmp_path).stdout == render_text(saved) + "\n"
    assert json.loads(report(file, "--format", "json").stdout) == json.loads(Path(file).read_text())
    assert report(tmp_path, "--format", "markdown").stdout == f"```text\n{render_text(saved)}\n```\n"
    assert report(tmp_path, "--format", "html").stdout.startswith("<!DOCTYPE html>")


def test_two_runs_are_compared_by_exit_code(tmp_path: Path, report: Call) -> None:
    blocks = tuple(0.05 + 0.0001 * (i % 7) for i in range(40))
    old = replace(REPORT, step_s_blocks=blocks)
    ReportFile(tmp_path / "old").save(old)
    ReportFile(tmp_path / "slow").save(replace(old, step_s_blocks=tuple(1.1 * block for block in blocks)))
    ReportFile(tmp_path / "other").save(replace(old, settings={**old.settings, "batch_size": 32}))
    faster = replace(old, step_s_blocks=tuple(block / 1.5 for block in blocks))
    ReportFile(tmp_path / "advised").save(replace(faster, settings={**old.settings, "num_workers": 4}))

    def against_old(name: str, *options: str) -> tuple[int, str]:
        answer = report(tmp_path / name, "--against", tmp_path / "old", *options)
        return answer.returncode, answer.stdout

    code, shown = against_old("slow", "--max-slowdown", "5%")
    assert code == 1
    assert shown.startswith("SLOWER: 50.3 ms per mean step before, 55.3 ms now: +10.0%")
    assert against_old("slow", "--max-slowdown", "20")[0] == 0
    code, shown = against_old("other", "--format", "json")
    assert code == 3
    assert json.loads(shown)["reasons"] == ["batch_size differs: 64 before, 32 now"]
    code, shown = against_old("advised")
    assert code == 0
    assert shown.startswith("FASTER: 1.50x after num_workers None -> 4 (95% interval 1.50x to 1.50x): ")
    assert max(map(len, shown.splitlines())) <= 100
    assert against_old("slow", "--format", "markdown")[1].startswith("```text\nSLOWER: ")


def save(folder: Path, steps: int) -> None:
    """Save a report that is as many seconds old as it has steps."""
    file = ReportFile(folder).save(replace(REPORT, steps=steps))
    os.utime(file, (1e9 - steps,) * 2)


def test_a_folder_of_runs_gives_the_newest_one(tmp_path: Path, report: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, age in {"lightning_logs/version_9": 20, "lightning_logs/version_10": 10, "gpu_report": 30}.items():
        save(tmp_path / folder, age)
    (tmp_path / "lightning_logs" / "version_11").mkdir()
    monkeypatch.chdir(tmp_path)

    def reported(*arguments: str) -> tuple[str, str]:
        answer = report(*arguments)
        return answer.stdout.split("steps in")[0].split("; ")[-1].strip(), answer.stderr

    newest = "Newest report in {}: lightning_logs/version_10/gpu_report.json\n"
    assert reported("lightning_logs") == ("10", newest.format("lightning_logs"))
    assert reported(".") == reported() == ("10", newest.format("."))
    assert reported("gpu_report") == reported("gpu_report/gpu_report.json") == ("30", "")
    assert load_report(tmp_path).steps == 10
    save(tmp_path, 40)
    assert reported(".") == ("40", "")  # its own, and none below

    answer = report("--against", "gpu_report.json")
    assert answer.returncode == 3
    assert "cannot compare: the newest report in . is OLD itself. Train again" in answer.stderr


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("", "There is no gpu_report.json in {} or below it. Pass the file itself."),
        ("nowhere", "Cannot read a report from '{}': No such file or directory."),
        ("nosuch://nowhere", "Cannot read a report from '{}': Protocol not known: nosuch. Check the URL"),
    ],
)
def test_where_there_is_no_report_the_path_is_named(tmp_path: Path, report: Call, path: str, says: str) -> None:
    path = path if "://" in path else str(tmp_path / path).rstrip("/")
    answer = report(path)
    assert (answer.returncode, says.format(path) in answer.stderr) == (1, True)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--max-slowdown", "5%"], "--max-slowdown needs --against OLD"),
        (["--against", "old", "--max-slowdown=-5%"], "--max-slowdown must be at least 0%, got -5%"),
        (["--against", "old", "--format", "html"], "--full and --format html work only for one report"),
    ],
)
def test_wrong_options_are_wrong_usage(report: Call, options: list[str], says: str) -> None:
    answer = report("new", *options)
    assert (answer.returncode, says in answer.stderr) == (2, True)


def test_a_reader_that_goes_away_gets_no_traceback(run_python: Call, tmp_path: Path) -> None:
    ReportFile(tmp_path).save(REPORT)
    code = (
        "import subprocess, sys\n"
        "command = [sys.executable, '-m', 'lightning_gpu_tools', 'report', sys.argv[1], '--format', 'json']\n"
        "job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)\n"
        "job.stdout.close()\n"
        "sys.exit(job.stderr.read().decode())"
    )
    assert run_python("-c", code, str(tmp_path)).stderr.strip() == ""


def test_a_full_report_lists_all_lines(tmp_path: Path, report: Call) -> None:
    seen = SourceLine(phase="worker", file="data.py", line=41, function="decode", samples=620)
    far = replace(seen, phase="data_loading", file="/very/" * 40 + "\x1b[2J[red]data.py")
    ReportFile(tmp_path).save(replace(REPORT, lines=(far, seen, replace(seen, line=57, samples=380))))
    shown = report(tmp_path, "--full").stdout
    assert "\x1b" not in shown
    assert "\nloading in a worker: 62% at data.py:41 in decode (620 samples)\n" in shown
