"""Advice on what a Trainer does beside its steps: it is taken out of a report, followed, and not repeated."""

import dataclasses
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from advised import advice_on, code_in, options_in, settings_in
from cause_examples import TIME_EXAMPLES
from lightning.pytorch import Callback, callbacks
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from torch.utils.data import DataLoader
from trainings import HandClock, Model, Samples, SpendingLogger, loader, quiet_trainer

from lightning_gpu_tools import GPUUtilizationAdvisor, GPUUtilizationMonitor, PortableCheckpointIO, load_report
from lightning_gpu_tools.advice.diagnosis import diagnose
from lightning_gpu_tools.advice.verdict import early_warnings
from lightning_gpu_tools.memory.readings import MemoryGrowth
from lightning_gpu_tools.types import Report

pytestmark = pytest.mark.filterwarnings("ignore::lightning_gpu_tools.errors.LowGPUUtilizationWarning")
STEP_S = 0.01
Spend = Callable[[float], None]


class SlowlyStarting(DataLoader[torch.Tensor]):
    """A loader whose workers take a second each to start."""

    def __init__(self, spend: Spend, samples: int, **options: Any) -> None:
        super().__init__(Samples(samples), batch_size=1, **options)
        self.spend = spend

    def _get_iterator(self) -> Any:
        self.spend(float(self.num_workers))
        return super()._get_iterator()


class SlowDisk(TorchCheckpointIO):
    def __init__(self, spend: Spend, seconds: float = 0.05) -> None:
        self.spend, self.seconds = spend, seconds

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self.spend(self.seconds)
        super().save_checkpoint(*args, **kwargs)


class Course(NamedTuple):
    """A training that is repeated with other options, and lets time pass on a clock of its own or on the real one."""

    folder: Path
    spend: Spend

    def report(self, *loaders: Any, saves: dict[str, int] | None = None, **options: Any) -> Report:
        """Train, with checkpoints as often as ``saves`` says, and return the report."""
        watching = [GPUUtilizationMonitor(), GPUUtilizationAdvisor(min_steps=20, min_seconds=0)]
        saving = [ModelCheckpoint(self.folder / "saved", **saves)] if saves else []
        usual = {"enable_checkpointing": bool(saves), "plugins": [SlowDisk(self.spend)]}
        trainer = quiet_trainer(self.folder, callbacks=[*watching, *saving], **{**usual, **options})
        trainer.fit(Model(self.spend, STEP_S, STEP_S), *loaders)
        return load_report(trainer.log_dir if trainer.loggers else self.folder / "gpu_report")


def validates_often(course: Course, **changed: Any) -> Report:
    return course.report(loader(Samples(400)), loader(Samples(20)), **{"val_check_interval": 10, **changed})


def validates_each_epoch(course: Course, **changed: Any) -> Report:
    return course.report(loader(Samples(10)), loader(Samples(20)), max_epochs=20, **changed)


def starts_workers_of_validation(course: Course, **changed: Any) -> Report:
    validation = SlowlyStarting(course.spend, 4, **{"num_workers": 2, **changed})
    return course.report(loader(Samples(160)), validation, val_check_interval=40)


def starts_workers_each_epoch(course: Course, **changed: Any) -> Report:
    return course.report(SlowlyStarting(course.spend, 30, num_workers=1, **changed), max_epochs=6)


def logs_each_step(course: Course, **changed: Any) -> Report:
    logger = SpendingLogger(course.folder, course.spend, 0.01)
    return course.report(loader(Samples(120)), logger=logger, **{"log_every_n_steps": 1, **changed})


def saves_every_other_step(course: Course, **changed: Any) -> Report:
    return course.report(loader(Samples(160)), saves={"every_n_train_steps": 2, **changed})


def saves_each_epoch(course: Course, **changed: Any) -> Report:
    return course.report(loader(Samples(10)), saves={"every_n_epochs": 1, **changed}, max_epochs=30)


FEWER_BATCHES = r"Trainer\((limit_val_batches=[\d.]+)\)"
KEPT = r"Keep those of the validation loader: DataLoader\(\.\.\., (num_workers=2, persistent_workers=True)\)"


@pytest.mark.follows(
    "Validate less: Trainer({}).",
    "val_check_interval={}",
    "limit_val_batches={}",
    "check_val_every_n_epoch={}",
    "Each validation spends {}% of its time starting {}",
    "`persistent_workers=True` for the validation loader",
    "or keep the loader's workers between epochs (persistent_workers=True)",
    "longer epochs; `persistent_workers=True`",
    "Log less often: Trainer(log_every_n_steps={}).",
    "Save {} times less often",
    "ModelCheckpoint(every_n_train_steps={})",
    "ModelCheckpoint(every_n_epochs={})",
)
@pytest.mark.parametrize(
    ("train", "cause", "changes"),
    [
        (validates_often, "validation", [r"Trainer\((val_check_interval=[\d.]+)\)", FEWER_BATCHES]),
        (validates_each_epoch, "validation", [r"Trainer\((check_val_every_n_epoch=\d+)\)", FEWER_BATCHES]),
        (starts_workers_of_validation, "validation", [KEPT]),
        (starts_workers_each_epoch, "epoch_start", [r"\((persistent_workers=True)\)"]),
        (logs_each_step, "logging", [r"Trainer\((log_every_n_steps=\d+)\)"]),
        (saves_every_other_step, "checkpoint", [r"ModelCheckpoint\((every_n_train_steps=\d+)\)"]),
        (saves_each_epoch, "checkpoint", [r"ModelCheckpoint\((every_n_epochs=\d+)\)"]),
    ],
)
def test_what_is_done_as_advised_is_no_cause(
    tmp_path: Path, hand_clock: HandClock, train: Callable[..., Report], cause: str, changes: list[str]
) -> None:
    course = Course(tmp_path, hand_clock.spend)
    advice = advice_on(train(course), cause)
    for pattern in changes:  # each of which is enough
        followed = train(course, **options_in(advice, pattern))
        assert not advice_on(followed, cause)
        if train is validates_often:
            assert followed.phase_s["validation"] / followed.wall_s <= 0.11  # as is usual


@pytest.mark.follows("Validation spends {}% of its time waiting for its loader. {} DataLoader(")
def test_validation_with_the_advised_workers_is_shorter(tmp_path: Path) -> None:
    course, data = Course(tmp_path, time.sleep), Samples(40, time.sleep, 0.02)
    before = course.report(loader(Samples(60)), loader(data), val_check_interval=20)
    changed = settings_in(advice_on(before, "validation"))
    after = course.report(loader(Samples(60)), loader(data, **changed), val_check_interval=20)
    assert after.phase_s["validation"] < before.phase_s["validation"]


@pytest.mark.follows("Trainer(plugins=[AsyncCheckpointIO(PortableCheckpointIO())])")
def test_training_does_not_wait_for_checkpoints_in_the_background(tmp_path: Path) -> None:
    def report(plugin: Any) -> Report:
        course = Course(tmp_path, time.sleep)
        return course.report(loader(Samples(60)), saves={"every_n_train_steps": 4}, plugins=[plugin])

    before = report(SlowDisk(time.sleep, 0.1))
    names = {
        "AsyncCheckpointIO": AsyncCheckpointIO,
        "PortableCheckpointIO": lambda: PortableCheckpointIO(SlowDisk(time.sleep, 0.1)),
    }
    after = report(eval(code_in(advice_on(before, "checkpoint"), r"plugins=\[(.*?)\]"), names))
    assert after.phase_s["checkpoint"] < before.phase_s["checkpoint"] / 2


def slow_to_read(spend: Spend, value: torch.Tensor) -> torch.Tensor:
    """Return a value whose number takes its time, as on a GPU that is behind."""

    class SlowToRead(torch.Tensor):
        def item(self) -> Any:
            spend(0.01)
            return super().item()

    return value.detach().as_subclass(SlowToRead)


class Logging(Model):
    """A model that logs a metric in each training step and each test step."""

    def __init__(self, spend: Spend, **options: Any) -> None:
        super().__init__(spend, STEP_S)
        self.options = options

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("slow", slow_to_read(self.spend, loss), **self.options)
        return loss

    def test_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.spend(STEP_S)
        self.log("error", self.layer(batch).square().mean(), **self.options)


@pytest.mark.follows("Pass fewer metrics to self.log, with on_step=False and without prog_bar=True")
@pytest.mark.parametrize("stage", ["fit", "test"])
def test_metrics_logged_as_advised_cause_no_wait(tmp_path: Path, hand_clock: HandClock, stage: str) -> None:
    """In training, the progress bar reads the metric in each step; in testing, the logger writes it."""

    def advice(**options: Any) -> str:
        watching = [GPUUtilizationMonitor(), GPUUtilizationAdvisor(min_steps=20, min_seconds=0)]
        logger = SpendingLogger(tmp_path, hand_clock.spend, 0.01) if stage == "test" else False
        trainer = quiet_trainer(tmp_path, callbacks=watching, logger=logger)
        getattr(trainer, stage)(Logging(hand_clock.spend, **options), loader(Samples(100)))
        return advice_on(load_report(Path(logger.log_dir) / "test" if logger else tmp_path), "logging")

    if stage == "fit":
        assert options_in(advice(prog_bar=True), r"without (prog_bar=True)") == {"prog_bar": True}
        assert not advice()
    else:
        assert not advice(**options_in(advice(on_step=True), r"(on_step=False)"))


@pytest.mark.parametrize("stage", ["fit", "predict"])
@pytest.mark.follows("Profile the {} step: Trainer(profiler='pytorch', fast_dev_run=50).")
def test_some_steps_of_each_stage_are_profiled_as_advised(
    tmp_path: Path, stage: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "lightning.pytorch")
    run = dataclasses.replace(TIME_EXAMPLES["unexplained"].sick, stage=stage)
    options = options_in(diagnose(run).next_step, r"Trainer\((profiler='pytorch', \w+=50)\)")
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
    kept = trainer.predict(Model(), loader(Samples(5)), **options_in(option, "(.+)"))
    assert (kept, len(written)) == (None, 5)
