"""The source lines of a report as a table on the terminal."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from sample_report import REPORT

from lightning_gpu_tools.cli import main
from lightning_gpu_tools.reports.report_file import ReportFile
from lightning_gpu_tools.reports.text import line_rows
from lightning_gpu_tools.training.run_measurements import SourceLine


def line(phase: str, number: int, samples: int, file: str = "data.py") -> SourceLine:
    return SourceLine(phase=phase, file=file, line=number, function="decode", samples=samples)


SEEN = replace(
    REPORT,
    lines=(
        line("worker", 41, 620),
        line("callback/EarlyStopping", 7, 30),
        line("worker", 57, 370),
        line("data_loading", 9, 50),
        line("worker", 3, 10),
    ),
)


def test_lines_come_by_phase_and_share_and_rare_ones_only_in_full() -> None:
    rows = [
        ("loading in a worker", "62 %", "data.py:41 in decode", "620"),
        ("loading in a worker", "37 %", "data.py:57 in decode", "370"),
        ("waiting for data", "100 %", "data.py:9 in decode", "50"),
        ("callbacks and hooks: EarlyStopping", "100 %", "data.py:7 in decode", "30"),
    ]
    assert line_rows(SEEN) == rows
    assert line_rows(SEEN, full=True) == [
        *rows[:2],
        ("loading in a worker", "1 %", "data.py:3 in decode", "10"),
        *rows[2:],
    ]


def test_the_command_prints_a_table_that_fits(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    far = line("data_loading", 1, 10**6, file="/very/" * 40 + "\x1b[2J[red]data.py")
    ReportFile(tmp_path).save(replace(SEEN, lines=(far, *SEEN.lines)))
    assert main(["report", str(tmp_path), "--lines"]) == 0
    shown = capfd.readouterr().out
    assert max(map(len, shown.splitlines())) <= 100
    assert "\x1b" not in shown
    assert "[red]data.py" in shown.replace("\n", "").replace(" ", "")
    assert [text.split()[-1] for text in shown.splitlines() if "data.py:41" in text] == ["620"]
