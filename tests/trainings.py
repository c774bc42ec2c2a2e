"""Small real trainings whose parts cost what a test says, by a clock that the test holds."""

import builtins
import csv
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import pytest
import torch
from harness import quiet_options
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_gpu_tools.runs.ending import Ending
from lightning_gpu_tools.trainer.facts import TrainerRun
from lightning_gpu_tools.trainer.fit_timer import FitTimer
from lightning_gpu_tools.training.step_clock import StepClock


class HandClock:
    """A clock that only moves when something is done: call it for the time, ``spend`` to let time pass."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s

    def spend(self, seconds: float) -> None:
        self.now_s += seconds


def nothing(seconds: float) -> None:
    """Spend no time."""


def burn(seconds: float) -> None:
    """Compute for some seconds of this thread's own CPU time, however busy the machine is."""
    end_s = time.thread_time() + seconds
    while time.thread_time() < end_s:
        pass


class Samples(Dataset[torch.Tensor]):
    def __init__(self, count: int, spend: Callable[[float], None] = nothing, seconds: float = 0.0) -> None:
        self.count, self.spend, self.seconds = count, spend, seconds

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        self.spend(self.seconds)
        return torch.full((4,), float(index))


class ActingSamples(Samples):
    """Samples of which one does something before it is loaded."""

    def __init__(self, count: int, at: int, act: Callable[[], Any]) -> None:
        super().__init__(count)
        self.at, self.act = at, act

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.at:
            self.act()
        return super().__getitem__(index)


class Stream(IterableDataset[torch.Tensor]):
    """Samples without a length."""

    def __init__(self, samples: Samples) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (self.samples[i] for i in range(len(self.samples)))


class Model(LightningModule):
    def __init__(
        self, spend: Callable[[float], None] = nothing, step_s: float = 0.0, validation_s: float = 0.0
    ) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.spend, self.step_s, self.validation_s = spend, step_s, validation_s

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.spend(self.step_s)
        loss = self.layer(batch).square().mean() / 1e4
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.spend(self.validation_s)
        self.log("val_loss", self.layer(batch).square().mean())

    def test_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    def predict_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.spend(self.step_s)
        return self.layer(batch)  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-6)


class Spending(Callback):
    """Spends time in one hook."""

    def __init__(self, spend: Callable[[float], None], hook: str, seconds: float) -> None:
        self.spend, self.seconds = spend, seconds
        setattr(self, hook, self._act)

    def _act(self, *args: Any, **kwargs: Any) -> None:
        self.spend(self.seconds)


class Watch(Callback):
    """Holds a step clock, which may run on the test's time."""

    def __init__(self, time: Callable[[], float] = time.perf_counter) -> None:
        self.clock = StepClock(time)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.timer = FitTimer(trainer, self.clock, Ending(TrainerRun(trainer), self.clock))


class SpendingLogger(CSVLogger):
    """A CSV logger whose every write costs time."""

    def __init__(self, folder: Path, spend: Callable[[float], None], seconds: float) -> None:
        super().__init__(folder)
        self.spend, self.seconds = spend, seconds

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self.spend(self.seconds)
        super().log_metrics(metrics, step)


def loader(dataset: Dataset[torch.Tensor], **options: Any) -> DataLoader[torch.Tensor]:
    return DataLoader(dataset, **{"batch_size": 1, **options})


def quiet_trainer(folder: Path, **options: Any) -> Trainer:
    return Trainer(**{**quiet_options(folder), **options})


class Boom(Exception):
    """Raised by tests in the middle of a training."""


class Raise(Callback):
    def __init__(self, at_step: int) -> None:
        self.at_step = at_step

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == self.at_step:
            raise Boom(f"at step {self.at_step}")


def logged(folder: Path) -> dict[str, dict[int, float]]:
    """Return what the CSV logger wrote: metric -> step -> value."""
    metrics: dict[str, dict[int, float]] = {}
    with (folder / "metrics.csv").open() as file:
        for row in csv.DictReader(file):
            for name, text in row.items():
                if text and name not in ("step", "epoch"):
                    metrics.setdefault(name, {})[int(row["step"])] = float(text)
    return metrics


def background_threads() -> list[threading.Thread]:
    """Return this package's threads."""
    return [thread for thread in threading.enumerate() if "lightning-gpu-tools" in thread.name]


def hide(monkeypatch: pytest.MonkeyPatch, module: ModuleType, gone: str) -> None:
    """Hide a name from one of our modules alone: Lightning and torch themselves still need it."""

    def blind(owner: object, name: str, *default: object) -> Any:
        return builtins.getattr(owner, f"no {name}" if name == gone else name, *default)

    monkeypatch.setattr(module, "getattr", blind, raising=False)
    monkeypatch.setattr(module, "hasattr", lambda *args: blind(*args, None) is not None, raising=False)


@contextmanager
def fault_in(function: Callable[..., Any], fault: Callable[[], Exception]) -> Iterator[list[str]]:
    """Raise where a function begins, each time that it is called; gives a list that has an entry for each."""
    raised: list[str] = []

    def trace(frame: FrameType, event: str, argument: Any) -> None:
        if frame.f_code is function.__code__:
            raised.append(frame.f_code.co_name)
            sys.settrace(None)
            sys.settrace(trace)
            raise fault()

    sys.settrace(trace)
    try:
        yield raised
    finally:
        sys.settrace(None)
