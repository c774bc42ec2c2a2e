"""``lightning-gpu-tools report`` as a program."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from sample_report import REPORT

from lightning_gpu_tools.cli import main
from lightning_gpu_tools.reports.report import ReportFile, load_report
from lightning_gpu_tools.reports.text import render_text
from lightning_gpu_tools.training.run_measurements import SourceLine

RunCli = Callable[..., "CompletedProcess[str]"]


def test_it_prints_the_report_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = replace(REPORT, confirmation="num_workers 0 -> 6: 2.1x, confirmed.")
    ReportFile(tmp_path).save(report)
    assert main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out == render_text(report) + "\n"
    assert main(["report", str(tmp_path / "gpu_report.json"), "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads((tmp_path / "gpu_report.json").read_text())
    assert main(["report", str(tmp_path), "--format", "markdown"]) == 0
    assert capsys.readouterr().out == f"```text\n{render_text(report)}\n```\n"
    assert main(["report", str(tmp_path), "--format", "html"]) == 0
    assert capsys.readouterr().out.startswith("<!DOCTYPE html>")


def test_two_runs_are_compared_by_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = tuple(0.05 + 0.0001 * (i % 7) for i in range(40))
    old = replace(REPORT, step_s_blocks=blocks)
    ReportFile(tmp_path / "old").save(old)
    ReportFile(tmp_path / "slow").save(replace(old, step_s_blocks=tuple(1.1 * block for block in blocks)))
    ReportFile(tmp_path / "other").save(replace(old, settings={**old.settings, "batch_size": 32}))
    faster = replace(old, step_s_blocks=tuple(block / 1.5 for block in blocks))
    ReportFile(tmp_path / "advised").save(replace(faster, settings={**old.settings, "num_workers": 4}))

    def against_old(name: str, *options: str) -> tuple[int, str]:
        code = main(["report", str(tmp_path / name), "--against", str(tmp_path / "old"), *options])
        return code, capsys.readouterr().out

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


def test_a_folder_of_runs_gives_the_newest_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder, age in {"lightning_logs/version_9": 20, "lightning_logs/version_10": 10, "gpu_report": 30}.items():
        save(tmp_path / folder, age)
    (tmp_path / "lightning_logs" / "version_11").mkdir()
    monkeypatch.chdir(tmp_path)

    def reported(*arguments: str) -> tuple[str, str]:
        assert main(["report", *arguments]) == 0
        shown = capsys.readouterr()
        return shown.out.split("steps in")[0].split("; ")[-1].strip(), shown.err

    newest = "Newest report in {}: lightning_logs/version_10/gpu_report.json\n"
    assert reported("lightning_logs") == ("10", newest.format("lightning_logs"))
    assert reported(".") == reported() == ("10", newest.format("."))
    assert reported("gpu_report") == reported("gpu_report/gpu_report.json") == ("30", "")
    assert load_report(tmp_path).steps == 10
    save(tmp_path, 40)
    assert reported(".") == ("40", "")  # its own, and none below


def test_without_a_newer_run_there_is_nothing_to_compare(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "lightning_logs" / "version_0", 5)
    monkeypatch.chdir(tmp_path)
    assert main(["report", "--against", "lightning_logs/version_0"]) == 3
    assert "cannot compare: the newest report in . is OLD itself. Train again" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("", "There is no gpu_report.json in {} or below it. Pass the file itself."),
        ("nowhere", "Cannot read a report from '{}': No such file or directory."),
        ("nosuch://nowhere", "Cannot read a report from '{}': Protocol not known: nosuch. Check the URL"),
    ],
)
def test_where_there_is_no_report_the_path_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], path: str, says: str
) -> None:
    path = path if "://" in path else str(tmp_path / path).rstrip("/")
    assert main(["report", path]) == 1
    assert says.format(path) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--max-slowdown", "5%"], "--max-slowdown needs --against OLD"),
        (["--against", "old", "--max-slowdown=-5%"], "--max-slowdown must be at least 0%, got -5%"),
        (["--against", "old", "--format", "html"], "--full and --format html work only for one report"),
    ],
)
def test_wrong_options_are_wrong_usage(capfd: pytest.CaptureFixture[str], options: list[str], says: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["report", "new", *options])
    assert says in capfd.readouterr().err


def test_a_reader_that_goes_away_gets_no_traceback(run_python: RunCli, tmp_path: Path) -> None:
    ReportFile(tmp_path).save(REPORT)
    code = (
        "import subprocess, sys\n"
        "command = [sys.executable, '-m', 'lightning_gpu_tools', 'report', sys.argv[1], '--format', 'json']\n"
        "job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)\n"
        "job.stdout.close()\n"
        "sys.exit(job.stderr.read().decode())"
    )
    assert run_python("-c", code, str(tmp_path)).stderr.strip() == ""


def test_a_full_report_lists_all_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen = SourceLine(phase="worker", file="data.py", line=41, function="decode", samples=620)
    far = replace(seen, phase="data_loading", file="/very/" * 40 + "\x1b[2J[red]data.py")
    ReportFile(tmp_path).save(replace(REPORT, lines=(far, seen, replace(seen, line=57, samples=380))))
    assert main(["report", str(tmp_path), "--full"]) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "\nloading in a worker: 62% at data.py:41 in decode (620 samples)\n" in shown
