"""Trainings' other stages, validate, test and predict: where their time goes, and their reports."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from rank_processes import run_ranks
from trainings import Boom, HandClock, Model, Samples, SpendingLogger, background_threads, loader, quiet_trainer

from lightning_gpu_tools import GPUUtilizationAdvisor, GPUUtilizationMonitor, NumWorkersFinder, load_report
from lightning_gpu_tools.errors import LowGPUUtilizationWarning
from lightning_gpu_tools.reports.report import Report
from lightning_gpu_tools.trainer.gpu_utilization import STEP_HOOKS
from lightning_gpu_tools.training.run_measurements import ACTIVITIES

STAGES = ("validate", "test", "predict")


def run(trainer: Trainer, stage: str, model: LightningModule, *loaders: Any) -> Any:
    options = {} if stage == "predict" else {"verbose": False}
    return getattr(trainer, stage)(model, list(loaders), **options)


def report_of(folder: Path, stage: str) -> Report:
    return load_report(folder / "gpu_report" / stage / "gpu_report.json")


class Slow(Callback):
    """Spends time in each hook that one of the stages has of its own."""

    def __init__(self, spend: Callable[[float], None]) -> None:
        for stage in ("validation", "test", "predict"):
            setattr(self, f"on_{stage}_batch_end", lambda *args, **kwargs: spend(0.125))


@pytest.mark.parametrize("stage", STAGES)
def test_every_second_of_a_stage_is_booked_where_it_was_spent(
    tmp_path: Path, hand_clock: HandClock, stage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Model(hand_clock.spend, step_s=2.0, validation_s=2.0)
    callbacks = [GPUUtilizationMonitor(), Slow(hand_clock.spend)]
    logger = SpendingLogger(tmp_path, hand_clock.spend, 0.5)
    trainer = quiet_trainer(tmp_path, callbacks=callbacks, logger=logger)
    run(trainer, stage, model, loader(Samples(10, hand_clock.spend, 3.0), batch_size=2))
    report = load_report(Path(logger.log_dir) / stage)
    logged = {} if stage == "predict" else {"logging/SpendingLogger": 0.5}
    assert report.phase_s == {
        "epoch_start": 2 * 3.0,
        "data_loading": 8 * 3.0,
        "training_step/forward": 5 * 2.0,
        "callback/Slow": 5 * 0.125,
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


def test_a_slow_loader_of_a_stage_is_diagnosed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stage = "predict"
    advisor = GPUUtilizationAdvisor(min_seconds=0.1)
    trainer = quiet_trainer(tmp_path, callbacks=[NumWorkersFinder(), advisor])
    with pytest.warns(LowGPUUtilizationWarning, match="Waiting for data takes"):
        run(trainer, stage, Model(), loader(Samples(150, time.sleep, 0.005)))
    finding = advisor.diagnosis.findings[0]
    assert (finding.cause, finding.evidence["kind"]) == ("data_loading", "too_few_workers")
    assert "find_loader_settings" in advisor.diagnosis.next_step
    assert "DataLoader(..., num_workers=" in finding.advice
    assert "NumWorkersFinder" not in finding.advice  # it acts in fit alone
    printed = capsys.readouterr().out
    assert f"Verdict: LOW: {ACTIVITIES[stage]} often waits" in printed
    assert f"Model; {stage}; 150 steps" in printed


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


def log_in_each_step(folder: Path, rank: int) -> None:
    """Test on two ranks that take turns at being late, and that exchange a metric: in each step, and as advised."""

    class Uneven(Model):
        on_step = True

        def test_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            time.sleep(0.01 * ((batch_idx + rank) % 2))
            self.log("error", self.layer(batch).square().mean(), sync_dist=True, on_step=self.on_step)

    model = Uneven()
    for name in ("before", "after"):
        callbacks = [GPUUtilizationMonitor(), GPUUtilizationAdvisor(min_steps=20, min_seconds=0)]
        place = {"devices": 1, "num_nodes": 2, "strategy": "ddp", "use_distributed_sampler": False}
        run(quiet_trainer(folder / name, callbacks=callbacks, **place), "test", model, loader(Samples(100)))
        model.on_step = False


@pytest.mark.follows("Pass on_step=False to self.log")
def test_ranks_that_log_as_advised_do_not_wait_for_each_other(tmp_path: Path) -> None:
    def advice(name: str) -> str:
        findings = {one.cause: one.advice for one in report_of(tmp_path / name, "test").diagnosis.findings}
        return findings.get("communication", "")

    results = run_ranks(tmp_path, log_in_each_step, nodes=2)
    assert [result.returncode for result in results] == [0, 0], "".join(result.stderr for result in results)
    assert "Pass on_step=False to self.log, so that" in advice("before")
    assert not advice("after")
