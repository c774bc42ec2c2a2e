"""Reports that are written while a run goes on: what is kept, and what is said of a run that never ended."""

import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_report import REPORT

from lightning_gpu_tools.processes import ProcessId, process_id
from lightning_gpu_tools.reports.comparison import earlier_report
from lightning_gpu_tools.reports.report import Report, ReportFile, load_report
from lightning_gpu_tools.reports.text import render_text

OWN = process_id(os.getpid())
GONE = {**OWN, "started_ticks": 1}  # of our number, but before us
ELSEWHERE = {**OWN, "kernel": "0" * 12}


def running(process: ProcessId | None, steps: int = 812) -> Report:
    return replace(REPORT, outcome="running", steps=steps, process=process)


@pytest.mark.parametrize(
    ("process", "age_s", "outcome"),
    [
        (OWN, 3600, "running: step 812 so far"),
        (GONE, 0, "cut off after step 812"),
        (ELSEWHERE, 0, "running: step 812 so far"),
        (ELSEWHERE, 3600, "cut off after step 812"),  # nobody has written for an hour
    ],
)
def test_it_is_known_whether_the_run_goes_on(
    tmp_path: Path, process: ProcessId | None, age_s: float, outcome: str
) -> None:
    file = ReportFile(tmp_path).save(running(process))
    os.utime(file, (time.time() - age_s,) * 2)
    report = load_report(tmp_path)
    assert report.outcome == outcome
    assert not report.is_finished
    assert f"({outcome})\n" in render_text(report)


runs = st.lists(st.tuples(st.integers(0, 2), st.booleans()), min_size=1, max_size=6)


@settings(max_examples=25, deadline=None)  # each write is flushed to the disk
@given(runs)
def test_the_last_run_and_the_last_finished_one_are_kept(runs: list[tuple[int, bool]]) -> None:
    """A run has the number of reports that it wrote meanwhile, and whether it came to an end."""
    with tempfile.TemporaryDirectory() as folder:
        last = last_finished = None
        for number, (writes, ends) in enumerate(runs, 1):
            earlier, file = earlier_report(folder), ReportFile(folder)
            assert (earlier.steps if earlier else None) == last_finished
            for _ in range(writes):
                file.save(running(GONE, number))
                assert earlier_report(folder) == earlier  # whatever has been written meanwhile
            if ends:
                file.save(replace(REPORT, steps=number))
                last_finished = number
            if ends or writes:
                last = number
        kept = {load_report(file).steps for file in Path(folder).iterdir()}
        assert kept >= {number for number in (last, last_finished) if number}
        assert len(kept) == min(2, len([1 for writes, ends in runs if writes or ends]))


def test_a_run_that_goes_on_is_no_earlier_run(tmp_path: Path) -> None:
    for version, report in enumerate((REPORT, running(GONE), running(OWN))):
        file = ReportFile(tmp_path / f"version_{version}").save(report)
        os.utime(file, (time.time() + version,) * 2)
    assert earlier_report(tmp_path / "version_3") == REPORT
