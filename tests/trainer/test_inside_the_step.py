"""Where the time of a training step goes, by a clock that moves only when the test's code spends time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from trainings import HandClock, Model, Samples, loader, quiet_trainer

from lightning_gpu_tools.trainer.fit_timer import FitTimer
from lightning_gpu_tools.training.step_clock import WARM_UP_STEPS, StepClock

FORWARD_S, BACKWARD_S, OPTIMIZER_S = 1.0, 0.5, 0.25
STEPS = WARM_UP_STEPS + 22


class SlowSGD(torch.optim.SGD):
    """Calls its closure several times, as LBFGS does, and then spends time."""

    def __init__(self, model: torch.nn.Module, spend: Callable[[float], None], closures: int = 1) -> None:
        super().__init__(model.parameters(), lr=1e-6)
        self.spend, self.closures = spend, closures

    def step(self, closure: Any = None) -> Any:
        for _ in range(self.closures if closure else 0):
            loss = closure()
        self.spend(OPTIMIZER_S)
        super().step()
        return loss if closure else None


class SlowParts(Model):
    """Spends time in forward, in backward, and in its optimizer's step."""

    def __init__(self, spend: Callable[[float], None], closures: int = 1) -> None:
        super().__init__(spend, step_s=FORWARD_S)
        self.closures = closures

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        loss.register_hook(lambda gradient: self.spend(BACKWARD_S))
        return loss

    def configure_optimizers(self) -> Any:
        return SlowSGD(self, self.spend, self.closures)


class TwoOptimizers(SlowParts):
    automatic_optimization = False

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [SlowSGD(self, self.spend), SlowSGD(self, self.spend)]


@pytest.fixture
def time() -> HandClock:
    return HandClock()


def timed_fit(time: HandClock, folder: Path, model: LightningModule, *callbacks: Callback, **options: Any) -> StepClock:
    clock = StepClock(time)

    class Watch(Callback):
        def setup(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
            FitTimer(trainer, clock)

    quiet_trainer(folder, callbacks=[Watch(), *callbacks], **options).fit(model, loader(Samples(STEPS)))
    return clock


@pytest.mark.parametrize(
    ("make", "options", "times"),
    [
        pytest.param(SlowParts, {}, (1, 1, 1), id="automatic"),
        pytest.param(SlowParts, {"accumulate_grad_batches": 2}, (1, 1, 0.5), id="accumulated"),
        pytest.param(lambda spend: SlowParts(spend, closures=3), {}, (3, 3, 1), id="closures"),
        pytest.param(TwoOptimizers, {}, (2, 2, 2), id="two optimizers"),
    ],
)
def test_forward_backward_and_optimizer_are_told_apart(
    time: HandClock,
    tmp_path: Path,
    make: Callable[[Any], LightningModule],
    options: dict[str, Any],
    times: tuple[float, float, float],
) -> None:
    clock = timed_fit(time, tmp_path, make(time.spend), **options)
    forward, backward, optimizer = times
    assert clock.seconds == {
        "training_step/forward": STEPS * forward * FORWARD_S,
        "training_step/backward": STEPS * backward * BACKWARD_S,
        "training_step/optimizer": STEPS * optimizer * OPTIMIZER_S,
    }
    (first, *_) = clock.blocks
    per_step = first.forward_s / first.steps, first.backward_s / first.steps, first.optimizer_s / first.steps
    assert per_step == (forward * FORWARD_S, backward * BACKWARD_S, optimizer * OPTIMIZER_S)
    assert first.training_step_s == first.wall_s == first.steps * sum(per_step)
