"""Trainings that really keep more and more, on a clock that moves by hand as this is gone through."""

import ctypes
import gc
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from advised import code_in, finding_on
from lightning.pytorch import Callback, LightningModule, Trainer
from trainings import HandClock, Model, Samples, loader, quiet_trainer

from lightning_gpu_tools import GPUUtilizationAdvisor
from lightning_gpu_tools.runs import run_recorder

pytestmark = pytest.mark.filterwarnings("ignore::lightning_gpu_tools.errors.LowGPUUtilizationWarning")
STEPS, STEP_S = 300, 0.005
Spend = Callable[[float], None]
READ_EVERY = 15  # steps
TIMEOUT_S = 30.0
KEPT = 250_000  # numbers per step, of 1 MB


@pytest.fixture
def spend(hand_clock: HandClock, monkeypatch: pytest.MonkeyPatch) -> Spend:
    """Let the time pass that sessions see."""
    monkeypatch.setattr(run_recorder, "_READ_EVERY_S", 0.001)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # else what earlier tests have left over is kept first, and nothing grows
    return hand_clock.spend


class Reading(Callback):
    """Waits until the background thread has read what changes, as often as it would in a run that takes minutes."""

    def __init__(self, advisor: GPUUtilizationAdvisor) -> None:
        self.advisor = advisor

    def on_train_batch_end(self, trainer: Trainer, model: LightningModule, out: Any, batch: Any, index: int) -> None:
        own = self.advisor._session
        if index % READ_EVERY == 0 and index > own.clock.warm_up_steps:
            before, end_s = self.read(own.recorder), time.monotonic() + TIMEOUT_S
            while self.read(own.recorder) == before and time.monotonic() < end_s:
                time.sleep(0.001)

    @staticmethod
    def read(recorder: run_recorder.RunRecorder) -> float:
        return sum(sum(one._weights) for one in recorder._readings.values())


class Steady(Model):
    """Takes 5 ms for each row of a batch, of which there is one."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.spend(STEP_S * batch.numel() / 4)
        loss: torch.Tensor = self.layer(batch).mean() / 1e9
        return loss


def fit(folder: Path, model: Model, *callbacks: Callback, samples: Any = None, **options: bool) -> Any:
    """Train, and return the finding."""
    advisor = GPUUtilizationAdvisor(min_seconds=0.001)
    trainer = quiet_trainer(folder, callbacks=[*callbacks, advisor, Reading(advisor)])
    trainer.fit(model, loader(samples or Samples(STEPS), **options))
    return finding_on(advisor, "slowing_down")


class Median(Callback):
    """Goes through the outputs of all steps, or of the latest ones, for 50 µs each."""

    def __init__(self, spend: Spend, latest: int | None = None) -> None:
        self.spend = spend
        self.outputs: deque[torch.Tensor] = deque(maxlen=latest)

    def on_train_batch_end(self, *args: Any) -> None:
        self.outputs.append(torch.ones(KEPT))
        self.spend(5e-5 * len(self.outputs))


class Summed(Steady):
    """Trains on the sum of its losses, with their graphs or without. Each loss takes backward 50 µs."""

    total_loss: Any = 0.0

    def __init__(self, spend: Spend, *, keeps_graph: bool) -> None:
        super().__init__(spend)
        self.keeps_graph = keeps_graph

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.total_loss + super().training_step(batch, batch_idx)
        self.total_loss = loss if self.keeps_graph else loss.detach()
        kept = torch.ones(KEPT)  # as long as the graph
        loss.register_hook(lambda gradient: self.spend(5e-5 * kept[0].item()))
        return loss

    def backward(self, loss: torch.Tensor) -> None:  # type: ignore[override]
        loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]


@pytest.mark.follows("only the latest values: collections.deque(maxlen=1000)")
def test_what_a_callback_keeps_is_named_and_the_latest_are_healthy(tmp_path: Path, spend: Spend) -> None:
    found = fit(tmp_path, Steady(spend), Median(spend))
    assert (found.evidence["kind"], found.evidence["phase"]) == ("kept_memory", "callback/Median")
    assert float(found.evidence["times"]) == pytest.approx(18 / 9, rel=0.1)  # ms, in the middle of the thirds
    latest = int(code_in(found.advice, r"deque\(maxlen=(\d+)\)")) // 50  # the run is as much shorter
    assert fit(tmp_path, Steady(spend), Median(spend, latest)) is None


@pytest.mark.follows("Keep loss.detach() or loss.item() instead of a loss with its graph")
def test_a_kept_graph_is_named_and_a_detached_sum_is_healthy(tmp_path: Path, spend: Spend) -> None:
    found = fit(tmp_path, Summed(spend, keeps_graph=True))
    assert (found.evidence["kind"], found.evidence["phase"]) == ("kept_memory", "training_step/Summed.backward")
    assert fit(tmp_path, Summed(spend, keeps_graph=False)) is None


@pytest.mark.follows("shuffle the samples, or limit the elements per batch")
def test_growing_batches_are_named_and_shuffled_ones_are_healthy(tmp_path: Path, spend: Spend) -> None:
    longer = [torch.ones(1 + index // 30, 4) for index in range(STEPS)]
    assert fit(tmp_path, Steady(spend), samples=longer).evidence["kind"] == "larger_batches"
    assert fit(tmp_path, Steady(spend), samples=longer, shuffle=True) is None
