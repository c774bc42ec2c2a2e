"""The parts of the time of a training step, by a clock that moves only when the test's code spends time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.plugins import MixedPrecision
from trainings import HandClock, Model, Samples, Spending, Watch, loader, quiet_trainer

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


def timed_fit(time: HandClock, folder: Path, model: LightningModule, *callbacks: Callback, **options: Any) -> StepClock:
    watch = Watch(time)
    trainer = quiet_trainer(folder, callbacks=[watch, *callbacks], num_sanity_val_steps=0, **options)
    trainer.fit(model, loader(Samples(STEPS)), loader(Samples(2)))
    return watch.clock


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
    assert first.phase_s == {phase: first.steps * seconds / STEPS for phase, seconds in clock.seconds.items()}
    assert first.wall_s == sum(first.phase_s.values())


class SlowHooks(SlowParts):
    """Overrides every hook in which a model can do something to its gradients and its optimizer."""

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        self.spend(0.001)
        super().backward(loss, *args, **kwargs)

    def optimizer_zero_grad(self, *args: Any) -> None:
        self.spend(0.002)
        super().optimizer_zero_grad(*args)

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.spend(0.004)
        self.clip_gradients(optimizer, gradient_clip_val=1.0)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.spend(0.008)
        super().optimizer_step(*args, **kwargs)

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        self.spend(0.016)


def per_step(clock: StepClock) -> dict[str, float]:
    return {phase: pytest.approx(seconds / STEPS) for phase, seconds in clock.seconds.items()}


PARTS = {
    "training_step/forward": FORWARD_S,
    "training_step/backward": BACKWARD_S,
    "training_step/optimizer": OPTIMIZER_S,
}


def test_the_models_own_hooks_are_lines_and_lightnings_are_not(time: HandClock, tmp_path: Path) -> None:
    before = Spending(time.spend, "on_before_backward", 0.032)
    clock = timed_fit(time, tmp_path, SlowHooks(time.spend), before, plugins=[SlowPrecision(time.spend)])
    backward = PARTS["training_step/backward"]
    assert per_step(clock) == {
        "training_step/forward": FORWARD_S,
        "training_step/SlowHooks.backward": backward + 0.001,
        "training_step/optimizer": OPTIMIZER_S,
        "training_step/gradient_clipping": 0.25,
        "training_step/gradient_scaler": 0.125,
        "callback/SlowHooks.optimizer_zero_grad": 0.002,
        "callback/SlowHooks.configure_gradient_clipping": 0.004,
        "callback/SlowHooks.optimizer_step": 0.008,
        "callback/Spending": 0.032,
    }


class SlowPrecision(MixedPrecision):
    """Spends time in clipping and in its scaler."""

    def __init__(self, spend: Callable[[float], None]) -> None:
        self.spend = spend

        class SlowScaler(torch.amp.GradScaler):
            def update(self, *args: Any) -> None:
                spend(0.125)
                super().update(*args)

        super().__init__("16-mixed", "cpu", SlowScaler("cpu", init_scale=1.0))

    def clip_grad_by_norm(self, *args: Any) -> None:
        self.spend(0.25)
