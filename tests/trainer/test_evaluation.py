"""Trainings' other stages, validate, test and predict: where their time goes, and their reports."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from advised import advice_on
from lightning.pytorch import LightningModule, Trainer
from rank_processes import run_ranks
from trainings import (
    Boom,
    HandClock,
    Model,
    Samples,
    Spending,
    SpendingLogger,
    background_threads,
    loader,
    quiet_trainer,
)

from lightning_gpu_tools import GPUUtilizationAdvisor, GPUUtilizationMonitor, load_report
from lightning_gpu_tools.reports.report import Report
from lightning_gpu_tools.trainer.gpu_utilization import STEP_HOOKS
from lightning_gpu_tools.training.run_measurements import ACTIVITIES

STAGES = ("validate", "test", "predict")


def run(trainer: Trainer, stage: str, model: LightningModule, *loaders: Any) -> Any:
    options = {} if stage == "predict" else {"verbose": False}
    return getattr(trainer, stage)(model, list(loaders), **options)


def report_of(folder: Path, stage: str) -> Report:
    return load_report(folder / "gpu_report" / stage / "gpu_report.json")


@pytest.mark.parametrize("stage", STAGES)
def test_every_second_of_a_stage_is_booked_where_it_was_spent(
    tmp_path: Path, hand_clock: HandClock, stage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Model(hand_clock.spend, step_s=2.0, validation_s=2.0)
    hook = f"on_{'validation' if stage == 'validate' else stage}_batch_end"
    callbacks = [GPUUtilizationMonitor(), Spending(hand_clock.spend, hook, 0.125)]
    logger = SpendingLogger(tmp_path, hand_clock.spend, 0.5)
    trainer = quiet_trainer(tmp_path, callbacks=callbacks, logger=logger)
    run(trainer, stage, model, loader(Samples(10, hand_clock.spend, 3.0), batch_size=2))
    report = load_report(Path(logger.log_dir) / stage)
    logged = {} if stage == "predict" else {"logging/SpendingLogger": 0.5}
    assert report.phase_s == {
        "epoch_start": 2 * 3.0,
        "data_loading": 8 * 3.0,
        "training_step/forward": 5 * 2.0,
        "callback/Spending": 5 * 0.125,
        **logged,
    }
    assert (report.steps, report.outcome, report.unseen) == (5, "completed", ())
    assert (report.settings["stage"], report.settings["batch_size"]) == (stage, 2)
    assert f"─ {ACTIVITIES[stage]} step " in capsys.readouterr().out


def test_each_stage_of_a_trainer_has_its_own_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = quiet_trainer(tmp_path, callbacks=[GPUUtilizationMonitor(), GPUUtilizationAdvisor()])
    model = Model()
    trainer.fit(model, loader(Samples(6)), loader(Samples(2)))
    for stage, count in zip(STAGES, (3, 4, 5), strict=True):
        run(trainer, stage, model, loader(Samples(count)))
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, loader(Samples(7)))
    reports = {stage: report_of(tmp_path, stage) for stage in STAGES}
    assert {stage: report.steps for stage, report in reports.items()} == {"validate": 3, "test": 4, "predict": 5}
    fits = [load_report(tmp_path / "gpu_report" / f"gpu_report{name}.json") for name in ("", ".previous")]
    assert [fit.steps for fit in fits] == [7, 6]
    assert all("stage" not in fit.settings for fit in fits)
    printed = capsys.readouterr().out
    assert printed.count("Verdict: TOO SHORT") == 5
    assert printed.count("Run more steps, or lower min_steps") == 5
    assert background_threads() == []
    assert "profile" not in vars(trainer.profiler)  # type: ignore[attr-defined]
    assert not {"run", "_predict_step"} & vars(trainer.predict_loop).keys()
    assert all(callable(getattr(one, hook)) for one in trainer.callbacks for hook in STEP_HOOKS)  # type: ignore[attr-defined]


def test_a_stage_that_fails_is_reported_up_to_there(tmp_path: Path) -> None:
    class Failing(Samples):
        def __getitem__(self, index: int) -> torch.Tensor:
            if index == 7:
                raise Boom("no such sample")
            return super().__getitem__(index)

    trainer = quiet_trainer(tmp_path, callbacks=[GPUUtilizationMonitor()])
    with pytest.raises(Boom):
        run(trainer, "predict", Model(), loader(Failing(20)))
    report = report_of(tmp_path, "predict")
    assert report.outcome == "stopped by Boom at step 7: the dataset failed at index 7"
    assert background_threads() == []


class Uneven(Model):
    """Two ranks take turns at being late, and exchange a metric, in each step or not."""

    def __init__(self, rank: int, *, on_step: bool) -> None:
        super().__init__()
        self.rank, self.on_step = rank, on_step

    def test_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        time.sleep(0.01 * ((batch_idx + self.rank) % 2))
        self.log("error", self.layer(batch).square().mean(), sync_dist=True, on_step=self.on_step)


def log_in_each_step(folder: Path, rank: int) -> None:
    """Test on two ranks, and then again as advised."""
    for name, on_step in {"before": True, "after": False}.items():
        callbacks = [GPUUtilizationMonitor(), GPUUtilizationAdvisor(min_steps=20, min_seconds=0)]
        place = {"devices": 1, "num_nodes": 2, "strategy": "ddp", "use_distributed_sampler": False}
        trainer = quiet_trainer(folder / name, callbacks=callbacks, **place)
        run(trainer, "test", Uneven(rank, on_step=on_step), loader(Samples(100)))


@pytest.mark.follows("Pass on_step=False to self.log")
def test_ranks_that_log_as_advised_do_not_wait_for_each_other(tmp_path: Path) -> None:
    results = run_ranks(tmp_path, log_in_each_step, nodes=2)
    assert [result.returncode for result in results] == [0, 0], "".join(result.stderr for result in results)
    before, after = (advice_on(report_of(tmp_path / name, "test"), "communication") for name in ("before", "after"))
    assert "Pass on_step=False to self.log, so that" in before
    assert not after
