"""Runs that are killed, as real processes: the report that they leave, and what the next run makes of it."""

import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer
from rank_processes import processes, run_ranks
from trainings import Model, Samples, loader, quiet_trainer

from lightning_gpu_tools import GPUUtilizationMonitor, load_report
from lightning_gpu_tools.reports.report import FILE_NAME, FOLDER_NAME, PREVIOUS_NAME, Report
from lightning_gpu_tools.runs import run_report

MIN_STEPS = 80


class Die(Callback):
    """Ends the process, or blocks it, as soon as its report has so many steps."""

    def __init__(self, how: Callable[[], Any]) -> None:
        self.how = how

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        file = Path(trainer.default_root_dir) / FOLDER_NAME / FILE_NAME
        if trainer.global_step > MIN_STEPS and file.exists() and load_report(file).steps >= MIN_STEPS:
            self.how()


kill = partial(signal.raise_signal, signal.SIGKILL)
hang = partial(time.sleep, 1000)


def train(folder: Path, rank: int = 0, how: Callable[[], Any] | None = None, ranks: int = 1) -> None:
    """Train without end, or a hundred steps with nothing to die of."""
    run_report.FIRST_WRITE_S = 0.05
    options: dict[str, Any] = {"devices": ranks, "strategy": "ddp"} if ranks > 1 else {}
    deadly = [Die(how)] if how is not None and rank == 0 else []
    trainer = quiet_trainer(folder, callbacks=[GPUUtilizationMonitor(), *deadly], **options)
    steps = 100 if how is None else 100_000
    trainer.fit(Model(time.sleep, step_s=0.002), loader(Samples(ranks * steps)))


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., multiprocessing.Process]]:
    started: list[Any] = []

    def start(how: Callable[[], Any] | None) -> Any:
        started.append(processes.Process(target=train, args=(tmp_path,), kwargs={"how": how}))
        started[-1].start()
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.join()


def ended(process: Any) -> int:
    process.join(100)
    assert process.exitcode is not None, "it hangs"
    return int(process.exitcode)


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


def test_a_killed_run_never_hides_a_finished_one(start: Any, tmp_path: Path) -> None:
    assert ended(start(None)) == 0
    finished = load_report(tmp_path)
    assert finished.outcome == "completed"
    assert not (tmp_path / FOLDER_NAME / PREVIOUS_NAME).exists()  # what it wrote while it ran was its own
    for _ in range(2):
        hanging = start(hang)
        while (report := load_report(tmp_path)).steps < MIN_STEPS or report.process["pid"] != hanging.pid:
            assert hanging.is_alive()
            time.sleep(0.02)
        assert report.outcome == f"running: step {report.steps} so far"
        hanging.kill()
        ended(hanging)
        check_cut_off(load_report(tmp_path))
        assert load_report(tmp_path / FOLDER_NAME / PREVIOUS_NAME) == finished
    assert ended(start(None)) == 0
    assert load_report(tmp_path).outcome == "completed"
    assert load_report(tmp_path / FOLDER_NAME / PREVIOUS_NAME) == finished
