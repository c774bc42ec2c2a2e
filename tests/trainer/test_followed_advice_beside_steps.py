"""Advice on what a Trainer does beside its steps: it is taken out of a report, followed, and not repeated."""

import ast
import dataclasses
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cause_examples import TIME_EXAMPLES
from lightning.pytorch import Callback, callbacks
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from torch.utils.data import DataLoader
from trainings import HandClock, Model, Samples, SpendingLogger, loader, quiet_trainer

from lightning_gpu_tools import (
    GPUUtilizationAdvisor,
    GPUUtilizationMonitor,
    PortableCheckpointIO,
    load_report,
)
from lightning_gpu_tools.advice.diagnosis import diagnose
from lightning_gpu_tools.advice.verdict import early_warnings
from lightning_gpu_tools.memory.readings import MemoryGrowth
from lightning_gpu_tools.types import Report

pytestmark = pytest.mark.filterwarnings("ignore::lightning_gpu_tools.errors.LowGPUUtilizationWarning")
STEP_S = 0.01


class SlowlyStarting(DataLoader[torch.Tensor]):
    """A loader whose workers take a second each to start."""

    def __init__(self, clock: HandClock, samples: int, **options: Any) -> None:
        super().__init__(Samples(samples), batch_size=1, **options)
        self.clock = clock

    def _get_iterator(self) -> Any:
        self.clock.spend(float(self.num_workers))
        return super()._get_iterator()


class Course:
    """A training that is repeated with other options, on a clock of its own or on the real one."""

    def __init__(self, folder: Path, clock: HandClock | None = None, **options: Any) -> None:
        self.folder, self.options = folder, options
        self.spend = time.sleep if clock is None else clock.spend

    def report(self, *loaders: Any, callbacks: tuple[Callback, ...] = (), **options: Any) -> Report:
        watching = [GPUUtilizationMonitor(), GPUUtilizationAdvisor(min_steps=20, min_seconds=0)]
        trainer = quiet_trainer(self.folder, callbacks=[*watching, *callbacks], **{**self.options, **options})
        trainer.fit(Model(self.spend, STEP_S, STEP_S), *loaders)
        return load_report(trainer.log_dir if trainer.loggers else self.folder / "gpu_report")


def advice_on(report: Report, cause: str) -> str:
    """Return the advice on a cause; empty if it was not found."""
    return next((one.advice for one in report.diagnosis.findings if one.cause == cause), "")


def options_in(pattern: str, text: str) -> dict[str, Any]:
    """Return the options in the call that a pattern finds in a text."""
    (code,) = re.findall(pattern, text)
    call: Any = ast.parse(f"dict({code})", mode="eval").body
    return {one.arg: ast.literal_eval(one.value) for one in call.keywords}


@pytest.mark.follows(
    "Validate less: Trainer({}).", "val_check_interval={}", "limit_val_batches={}", "check_val_every_n_epoch={}"
)
@pytest.mark.parametrize(
    ("samples", "options", "option", "usual"),
    [
        (400, {"val_check_interval": 10}, "val_check_interval", 0.11),
        (10, {"max_epochs": 20}, "check_val_every_n_epoch", 0.25),
    ],
)
def test_as_little_validation_as_advised_is_as_short_as_usual(
    tmp_path: Path, hand_clock: HandClock, samples: int, options: dict[str, int], option: str, usual: float
) -> None:
    course = Course(tmp_path, hand_clock, **options)
    loaders = loader(Samples(samples)), loader(Samples(20))
    changes = re.findall(r"Trainer\((\w+=[\d.]+)\)", advice_on(course.report(*loaders), "validation"))
    assert [change.partition("=")[0] for change in changes] == [option, "limit_val_batches"]
    for change in changes:
        followed = course.report(*loaders, **options_in("(.*=.*)", change))
        assert followed.phase_s["validation"] / followed.wall_s <= usual
        assert not advice_on(followed, "validation")


@pytest.mark.follows(
    "Each validation spends {}% of its time starting {}",
    "`persistent_workers=True` for the validation loader",
)
def test_workers_of_validation_are_kept(tmp_path: Path, hand_clock: HandClock) -> None:
    course = Course(tmp_path, hand_clock, val_check_interval=40)
    train, now = loader(Samples(160)), {"num_workers": 2}
    advice = advice_on(course.report(train, SlowlyStarting(hand_clock, 4, **now)), "validation")
    assert "Keep those of the validation loader: DataLoader(" in advice
    kept = options_in(r"DataLoader\(\.\.\., (.*?)\)", advice)
    assert kept == {**now, "persistent_workers": True}
    assert not advice_on(course.report(train, SlowlyStarting(hand_clock, 4, **kept)), "validation")


@pytest.mark.follows("Validation spends {}% of its time waiting for its loader. {} DataLoader(")
def test_validation_with_the_advised_workers_is_shorter(tmp_path: Path) -> None:
    course = Course(tmp_path, val_check_interval=20)
    train, data = loader(Samples(60)), Samples(40, time.sleep, 0.02)
    before = course.report(train, loader(data))
    changed = options_in(r"DataLoader\(\.\.\., (.*?)\)", advice_on(before, "validation"))
    after = course.report(train, loader(data, **changed))
    assert after.phase_s["validation"] < before.phase_s["validation"]


@pytest.mark.follows(
    "or keep the loader's workers between epochs (persistent_workers=True)", "longer epochs; `persistent_workers=True`"
)
def test_workers_that_are_kept_start_no_epoch_anew(tmp_path: Path, hand_clock: HandClock) -> None:
    course = Course(tmp_path, hand_clock, max_epochs=6)
    advice = advice_on(course.report(SlowlyStarting(hand_clock, 30, num_workers=1)), "epoch_start")
    kept = SlowlyStarting(hand_clock, 30, num_workers=1, **options_in(r"\((persistent_workers=True)\)", advice))
    assert not advice_on(course.report(kept), "epoch_start")


@pytest.mark.follows("Log less often: Trainer(log_every_n_steps={}).")
def test_a_logger_that_writes_as_rarely_as_advised_is_no_cause(tmp_path: Path, hand_clock: HandClock) -> None:
    course = Course(tmp_path, hand_clock, log_every_n_steps=1)

    def report(**options: Any) -> Report:
        return course.report(loader(Samples(120)), logger=SpendingLogger(tmp_path, hand_clock.spend, 0.01), **options)

    advice = advice_on(report(), "logging")
    assert not advice_on(report(**options_in(r"Trainer\((log_every_n_steps=\d+)\)", advice)), "logging")


def slow_to_read(clock: HandClock, value: torch.Tensor) -> torch.Tensor:
    """Return a value whose number takes its time, as on a GPU that is behind."""

    class SlowToRead(torch.Tensor):
        def item(self) -> Any:
            clock.spend(0.01)
            return super().item()

    return value.detach().as_subclass(SlowToRead)


class Logging(Model):
    """A model that logs a metric in each training step and each test step."""

    def __init__(self, clock: HandClock, **options: Any) -> None:
        super().__init__(clock.spend, STEP_S)
        self.clock, self.options = clock, options

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("slow", slow_to_read(self.clock, loss), **self.options)
        return loss

    def test_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.clock.spend(STEP_S)
        self.log("error", self.layer(batch).square().mean(), **self.options)


@pytest.mark.follows("Pass fewer metrics to self.log, with on_step=False and without prog_bar=True")
@pytest.mark.parametrize("stage", ["fit", "test"])
def test_metrics_logged_as_advised_cause_no_wait(tmp_path: Path, hand_clock: HandClock, stage: str) -> None:
    """In training, the progress bar reads the metric in each step; in testing, the logger writes it."""

    def advice(**options: Any) -> str:
        watching = [GPUUtilizationMonitor(), GPUUtilizationAdvisor(min_steps=20, min_seconds=0)]
        logger = SpendingLogger(tmp_path, hand_clock.spend, 0.01) if stage == "test" else False
        trainer = quiet_trainer(tmp_path, callbacks=watching, logger=logger)
        getattr(trainer, stage)(Logging(hand_clock, **options), loader(Samples(100)))
        return advice_on(load_report(Path(logger.log_dir) / "test" if logger else tmp_path), "logging")

    if stage == "fit":
        assert options_in(r"without (prog_bar=True)", advice(prog_bar=True)) == {"prog_bar": True}
        assert not advice()
    else:
        assert not advice(**options_in(r"(on_step=False)", advice(on_step=True)))


@pytest.mark.parametrize("stage", ["fit", "predict"])
@pytest.mark.follows("Profile the {} step: Trainer(profiler='pytorch', fast_dev_run=50).")
def test_some_steps_of_each_stage_are_profiled_as_advised(
    tmp_path: Path, stage: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "lightning.pytorch")
    run = dataclasses.replace(TIME_EXAMPLES["unexplained"].sick, stage=stage)
    options = options_in(r"Trainer\((profiler='pytorch', \w+=50)\)", diagnose(run).next_step)
    (few,) = options.keys() - {"profiler"}
    model, batches = Model(), []
    counting = Callback()
    counting.on_train_batch_end = counting.on_predict_batch_end = lambda *args: batches.append(1)  # type: ignore[method-assign]
    trainer = quiet_trainer(tmp_path, callbacks=[counting], **{**options, few: 5})
    getattr(trainer, stage)(model, loader(Samples(20)))
    assert len(batches) == 5
    assert "Profile stats" in caplog.text


@pytest.mark.follows("Trainer.predict keeps all outputs: pass return_predictions=False, and write them in a")
def test_predictions_are_written_and_not_kept_as_advised(tmp_path: Path) -> None:
    growth = MemoryGrowth(whose="process", bytes_per_s=1e6, grown_bytes=1e9, left_s=60.0)
    run = dataclasses.replace(TIME_EXAMPLES["unexplained"].sick, stage="predict", growth=[growth])
    option, writer = re.findall(r"pass (\w+=False), and write them in a (\w+)\.", early_warnings(run)[0].advice)[0]
    written: list[torch.Tensor] = []

    class Writer(getattr(callbacks, writer)):  # type: ignore[misc]
        def write_on_batch_end(self, trainer: Any, pl_module: Any, prediction: torch.Tensor, *args: Any) -> None:
            written.append(prediction)

    trainer = quiet_trainer(tmp_path, callbacks=[Writer("batch")])
    kept = trainer.predict(Model(), loader(Samples(5)), **options_in("(.+)", option))
    assert (kept, len(written)) == (None, 5)


class SlowDisk(TorchCheckpointIO):
    def __init__(self, spend: Callable[[float], None], seconds: float = 0.05) -> None:
        self.spend, self.seconds = spend, seconds

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self.spend(self.seconds)
        super().save_checkpoint(*args, **kwargs)


@pytest.mark.follows(
    "Save {} times less often", "ModelCheckpoint(every_n_train_steps={})", "ModelCheckpoint(every_n_epochs={})"
)
@pytest.mark.parametrize(
    ("samples", "options", "now"),
    [(160, {}, {"every_n_train_steps": 2}), (10, {"max_epochs": 30}, {"every_n_epochs": 1})],
)
def test_checkpoints_as_rare_as_advised_are_no_cause(
    tmp_path: Path, hand_clock: HandClock, samples: int, options: dict[str, int], now: dict[str, int]
) -> None:
    course = Course(tmp_path, hand_clock, enable_checkpointing=True, plugins=[SlowDisk(hand_clock.spend)], **options)

    def report(**how_often: int) -> Report:
        return course.report(loader(Samples(samples)), callbacks=(ModelCheckpoint(tmp_path / "saved", **how_often),))

    changed = options_in(r"ModelCheckpoint\((every_n_\w+=\d+)\)", advice_on(report(**now), "checkpoint"))
    assert changed.keys() == now.keys()
    assert not advice_on(report(**changed), "checkpoint")


@pytest.mark.follows("Trainer(plugins=[AsyncCheckpointIO(PortableCheckpointIO())])")
def test_training_does_not_wait_for_checkpoints_in_the_background(tmp_path: Path) -> None:
    def report(plugin: Any) -> Report:
        course = Course(tmp_path, enable_checkpointing=True, plugins=[plugin])
        return course.report(
            loader(Samples(60)), callbacks=(ModelCheckpoint(tmp_path / "saved", every_n_train_steps=4),)
        )

    before = report(SlowDisk(time.sleep, 0.1))
    (code,) = re.findall(r"plugins=\[(.*?)\]", advice_on(before, "checkpoint"))
    names = {
        "AsyncCheckpointIO": AsyncCheckpointIO,
        "PortableCheckpointIO": lambda: PortableCheckpointIO(SlowDisk(time.sleep, 0.1)),
    }
    after = report(eval(code, names))
    assert after.phase_s["checkpoint"] < before.phase_s["checkpoint"] / 2
