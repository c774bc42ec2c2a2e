"""The report as JSON, as text and as files."""

import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_report import REPORT, with_finding
from synthetic import STEP, gpu_run

from lightning_gpu_tools.advice.stalls import Stall
from lightning_gpu_tools.advice.verdict import early_warnings
from lightning_gpu_tools.memory.readings import MemoryGrowth
from lightning_gpu_tools.processes import ProcessId, process_id
from lightning_gpu_tools.reports.comparison import earlier_report
from lightning_gpu_tools.reports.report import Report, ReportFile, from_json, load_report, to_json
from lightning_gpu_tools.reports.text import render_text
from lightning_gpu_tools.training.run_measurements import LoaderResult, LoaderSettings


def test_an_infinite_ceiling_survives_a_format_that_has_none() -> None:
    endless = with_finding(ceiling=math.inf)
    text = to_json(endless)
    assert json.loads(text, parse_constant=pytest.fail)["diagnosis"]["findings"][0]["ceiling"] is None
    assert from_json(text) == endless


def test_stalls_are_shown_longest_first() -> None:
    stall = Stall(
        began_at="2026-11-23T04:00:00+00:00",
        lasted_s=250.0,
        is_over=True,
        step=80,
        phase="data_loading",
        cause="blocked_worker",
        why="worker 1 (PID 7) of 2 sleeps\x1b in load.",
        next_step="Look at that line.",
        stack=("train.py:7 in load",),
        ranks=("rank 0: step 80",),
    )
    stalls = (*[replace(stall, lasted_s=60.0, is_over=False)] * 4, stall)
    report = replace(REPORT, stalls=stalls, failure="Worker 1 crashed. Look at it.")
    assert from_json(to_json(report)) == report
    lines = render_text(report).splitlines()
    why = "worker 1 (PID 7) of 2 sleeps\\x1b in load."
    assert f"No progress for 4 min 10 s at step 80, then training continued: {why}" in " ".join(" ".join(lines).split())
    assert sum(line.startswith("No progress for 60 s at step 80: ") for line in lines) == 2
    assert "gpu_report.json has 2 shorter stalls." in lines


def test_the_text_has_verdict_why_next_and_a_tree() -> None:
    lines = render_text(replace(REPORT, confirmation="FASTER: 2.1x")).splitlines()
    assert lines[:6] == [
        "Verdict: LOW: the GPU is often idle (stopped by KeyError at step 812)",
        "Why:     Waiting for data takes 61% of the wall time (31 ms of 51 ms per steady step).",
        "Next:    Set DataLoader(..., num_workers=6) (now 0). Speedup: about 2.3x (2.1x to 2.5x).",
        "Result:  FASTER: 2.1x",
        "Run:     LitModel; 812 steps in 41.4 s (median 50 ms, p95 62 ms, longest 510 ms, 2510 samples/s); 2",
        "         ranks on NVIDIA H200; 32-true; torch 2.15.0, lightning 2.6.6",  # samples of both ranks
    ]
    assert lines[7:10] == ["GPU  busy  peak   of", "        %   GiB  GiB", "  3    34  60.0  140"]
    assert "Where the 41.4 s went (100% explained), and the mean per step" in lines
    (cause,) = [line for line in lines if line.endswith("◀ cause")]
    assert cause.startswith("├─ waiting for data")
    assert "60.9%" in cause
    assert lines[-1] == "└─ 1 other, below 1%                            200 ms   0.5%    246 µs/step"
    assert render_text(REPORT, full=True).splitlines()[-11:] == [
        "└─ unexplained                                  200 ms   0.5%    246 µs/step",
        "Memory of GPU 3: 60.0 GiB used, 80.0 GiB free (98% explained)",
        "├─ tensors at their peak                      34.0 GiB  56.7%",
        "│  ├─ activations and temporaries             30.0 GiB  50.0%",
        "│  └─ parameters                              4.00 GiB   6.7%",
        "├─ allocator cache                            5.00 GiB   8.3%",
        "│  └─ reusable                                5.00 GiB   8.3%",
        "├─ other processes                            20.0 GiB  33.3%",
        "│  └─ ada: python (PID 4711)                  20.0 GiB  33.3%",
        "└─ unexplained                                1.00 GiB   1.7%",
        "Finding 1: data loading, 61% of the time. Set DataLoader(..., num_workers=6) (now 0).",
    ]


def test_a_field_of_a_later_version_is_ignored() -> None:
    data = json.loads(to_json(REPORT))
    data["news"] = data["gpus"][0]["news"] = data["diagnosis"]["news"] = [-1, "x" * 20_001]
    assert from_json(json.dumps(data)) == REPORT


def test_growing_memory_errors_others_and_overhead_are_reported() -> None:
    gpu = replace(
        REPORT.gpus[0],
        node=1,
        errors=("Xid 31 (memory page fault)",),
        others_memory_bytes_max=5 * 2**30,
        power_watts_mean=300.0,
        throttled_percent=12.0,
    )
    growing = MemoryGrowth(whose="process", bytes_per_s=2**20, grown_bytes=1e9, left_s=7200)
    (growth,) = early_warnings(gpu_run(STEP, growth=[growing]))
    diagnosis = replace(REPORT.diagnosis, findings=(*REPORT.diagnosis.findings, growth))
    text = " ".join(render_text(replace(REPORT, gpus=(gpu,), diagnosis=diagnosis, monitor_us_per_step=14.2)).split())
    for words in (
        "node GPU busy peak of others power throttled % GiB GiB GiB W % 1 3 34 60.0 140 5.0 300 12 error",
        "ERROR on node 1 GPU 3: Xid 31 (memory page fault)",
        "process grows steadily, by 60.0 MiB per minute; at this rate it is full in 2 h",
        "Overhead of measuring: at least 14 µs per step.",
    ):
        assert words in text


def test_a_search_for_loader_settings_is_reported_with_its_reason() -> None:
    original = LoaderSettings(num_workers=0, prefetch_factor=None, persistent_workers=False, pin_memory=False)
    best = replace(original, num_workers=4, prefetch_factor=2)
    found = LoaderResult(original=original, settings=best, reason="It is faster.", applied=True, seconds=3.0)
    for result, words in (
        (found, " applied num_workers=4 after 3 s of trials. It is faster."),
        (replace(found, applied=False), " proposes num_workers=4 after 3 s of trials. It is faster."),
        (replace(found, settings=original), " kept num_workers=0 after 3 s of trials. It is faster."),
        (LoaderResult(original=None, settings=None, reason="It is a Stream."), ": It is a Stream."),
    ):
        assert f"NumWorkersFinder{words}\n" in render_text(replace(REPORT, loader=result))


def test_a_phase_is_a_line_from_one_percent_on() -> None:
    parts = {"forward": 12.0, "backward": 25.0, "optimizer": 3.0, "zero_grad": 0.3}
    phase_s = {"training_step": 0.5, **{f"training_step/{name}": seconds for name, seconds in parts.items()}}
    ms = {phase: seconds / 1e3 for phase, seconds in phase_s.items()}
    report = with_finding(cause="straggler", evidence={"rank": 0, "phase": "backward"})
    text = render_text(replace(report, phase_s=phase_s, wall_s=41.2, gpu_step_s=ms))
    rows = re.findall(r"─ (\S.*\S)  +\S+ m?s +([0-9.]+)%", text)
    assert rows == [("training step", "99.0"), ("backward", "60.7"), ("forward", "29.1"), ("optimizer", "7.3")]
    assert re.findall(r"─ (\w+) .* ◀ cause$", text, re.MULTILINE) == ["backward"]
    assert "GPU time of a step: backward 25 ms, forward 12 ms, optimizer 3 ms." in text


def test_a_failed_write_leaves_only_the_old_report(tmp_path: Path) -> None:
    ReportFile(tmp_path).save(REPORT)
    code = (
        "import resource, sys\n"
        "from lightning_gpu_tools.reports.report import ReportFile, load_report\n"
        "report = load_report(sys.argv[1])\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n"  # as on a full disk: the file ends after 100 bytes
        "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "ReportFile(sys.argv[1]).save(report)\n"
    )
    result = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert "OSError" in result.stderr
    assert os.listdir(tmp_path) == ["gpu_report.json"]
    assert load_report(tmp_path) == REPORT


# Reports that are written while a run goes on


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
