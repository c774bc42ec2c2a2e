"""Runs that are killed, as real processes: the report that they leave, and what the next run makes of it."""

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rank_processes import OnceReported, run_ranks, start_ranks
from trainings import Model, Samples, loader, quiet_trainer

from lightning_gpu_tools import GPUUtilizationMonitor, load_report
from lightning_gpu_tools.reports.report import FOLDER_NAME, PREVIOUS_NAME, Report
from lightning_gpu_tools.runs import run_report

MIN_STEPS = 80


def is_long(report: Report) -> bool:
    """Return whether this process has written so many steps."""
    return report.steps >= MIN_STEPS and report.process is not None and report.process["pid"] == os.getpid()


kill = partial(signal.raise_signal, signal.SIGKILL)
hang = partial(time.sleep, 1000)


def train(folder: Path, rank: int, how: Callable[[], Any] | None = None, ranks: int = 1) -> None:
    """Train without end, or a hundred steps with nothing to die of."""
    run_report.FIRST_WRITE_S = 0.05
    options: dict[str, Any] = {"devices": ranks, "strategy": "ddp"} if ranks > 1 else {}
    deadly = [OnceReported(folder, is_long, how)] if how is not None and rank == 0 else []
    trainer = quiet_trainer(folder, callbacks=[GPUUtilizationMonitor(), *deadly], **options)
    steps = 100 if how is None else 100_000
    trainer.fit(Model(time.sleep, step_s=0.002), loader(Samples(ranks * steps)))


def check_cut_off(report: Report) -> None:
    assert report.outcome == f"cut off after step {report.steps}"
    assert report.steps >= MIN_STEPS
    assert sum(report.phase_s.values()) == pytest.approx(report.wall_s)
    # It was judged by what was measured; where other programs have the cores, that is enough for a verdict.
    assert report.diagnosis.verdict != "too_short" or "steady steps" in report.diagnosis.why


def test_a_rank_that_is_killed_leaves_the_jobs_report(tmp_path: Path) -> None:
    (first, _) = run_ranks(tmp_path, train, options={"how": kill, "ranks": 2})
    assert first.returncode == -signal.SIGKILL
    report = load_report(tmp_path)
    check_cut_off(report)
    assert report.settings["world_size"] == 2


def test_a_killed_run_never_hides_a_finished_one(tmp_path: Path) -> None:
    def complete() -> Report:
        (ended,) = run_ranks(tmp_path, train, ranks=1)
        assert ended.returncode == 0, ended.stderr
        assert load_report(tmp_path).outcome == "completed"
        return load_report(tmp_path)

    finished = complete()
    assert not (tmp_path / FOLDER_NAME / PREVIOUS_NAME).exists()  # what it wrote while it ran was its own
    for _ in range(2):
        (hanging,) = start_ranks(tmp_path, train, ranks=1, options={"how": hang})
        try:
            while (report := load_report(tmp_path)).steps < MIN_STEPS or report.process["pid"] != hanging.pid:
                assert hanging.is_alive()
                time.sleep(0.02)
            assert report.outcome == f"running: step {report.steps} so far"
        finally:
            hanging.kill()
            hanging.join()
        check_cut_off(load_report(tmp_path))
        assert load_report(tmp_path / FOLDER_NAME / PREVIOUS_NAME) == finished
    complete()
    assert load_report(tmp_path / FOLDER_NAME / PREVIOUS_NAME) == finished
