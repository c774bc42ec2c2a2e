"""The GPU's idle time by its own events, in trainings that are built to leave it idle for so long."""

import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader
from toys import occupy
from trainings import Model, Samples, Spending, Watch, loader, quiet_trainer

from lightning_gpu_tools.training.phases import BACKWARD, FORWARD, OPTIMIZER
from lightning_gpu_tools.training.run_measurements import IdleTimes
from lightning_gpu_tools.training.step_clock import StepClock

STEPS = 100


class Busy(Model):
    """A step that keeps the GPU busy for about so many seconds in each part, and may end forward with a sync."""

    def __init__(
        self, forward_s: float, backward_s: float = 0.0, optimizer_s: float = 0.0, *, item: bool = False
    ) -> None:
        super().__init__()
        self.forward_s, self.backward_s, self.optimizer_s, self.item = forward_s, backward_s, optimizer_s, item

    def occupy_forward(self) -> None:
        occupy(self.forward_s)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.occupy_forward()
        loss = super().training_step(batch.flatten()[:4], batch_idx)
        if self.backward_s:
            loss.register_hook(lambda gradient: occupy(self.backward_s))
        if self.item:
            loss.item()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = super().configure_optimizers()
        if self.optimizer_s:
            optimizer.register_step_post_hook(lambda *_: occupy(self.optimizer_s))
        return optimizer


def train(
    folder: Path, model: Model, *others: Callback, data: DataLoader[torch.Tensor] | None = None
) -> tuple[StepClock, IdleTimes]:
    """Train and return the host's times and the GPU's idle times."""
    watch = Watch()
    trainer = quiet_trainer(folder, accelerator="gpu", callbacks=[watch, *others])
    trainer.fit(model, data or loader(Samples(STEPS)))
    return watch.clock, watch.clock.gpu_idle()


def slow_data(seconds: float) -> DataLoader[torch.Tensor]:
    return loader(Samples(STEPS, time.sleep, seconds))


def idle_share(idle: IdleTimes, phase: str) -> float:
    """Return the idle share of the host's time for a phase; on a busy host both are longer."""
    return idle.idle_s.get(phase, 0.0) / idle.host_s[phase]


def test_a_wait_behind_gpu_work_is_none(tmp_path: Path) -> None:
    _, idle = train(tmp_path, Busy(0.060), data=slow_data(0.005))
    assert idle_share(idle, "data_loading") < 0.1


@pytest.mark.parametrize(
    ("slow", "item"), [("on_train_batch_start", False), ("on_train_batch_end", True), ("data_loading", True)]
)
def test_a_wait_of_the_gpu_is_named_idle_time(tmp_path: Path, slow: str, item: bool) -> None:
    """A sync has the host wait for the GPU in forward, so that the GPU feels all that comes behind it."""
    model = Busy(0.010 if item else 0.001, item=item)
    if slow == "data_loading":
        _, idle = train(tmp_path, model, data=slow_data(0.020))
    else:
        _, idle = train(tmp_path, model, Spending(time.sleep, slow, 0.020))
    phase = slow if slow == "data_loading" else "callback/Spending"
    assert 0.75 < idle_share(idle, phase) <= 1.02
    assert max(idle.idle_s, key=idle.idle_s.__getitem__) == phase


@pytest.mark.parametrize("pinned", [False, True])
def test_of_a_copy_the_gpu_feels_its_own_part(tmp_path: Path, pinned: bool) -> None:
    """A copy from pageable memory waits for the step before, too; the GPU is not idle then."""
    data = DataLoader([torch.zeros(16_000_000, pin_memory=pinned)] * (STEPS // 2), batch_size=None)  # of 64 MB
    clock, idle = train(tmp_path, Busy(0.060), data=data)
    assert max(idle.idle_s, key=idle.idle_s.__getitem__) == "host_to_device_copy"
    assert idle.idle_s["host_to_device_copy"] / idle.samples > 0.001  # which is 64 GB/s
    if not pinned:
        assert clock.seconds["host_to_device_copy"] / clock.wall_s > 0.7
        assert idle_share(idle, "host_to_device_copy") < 0.5


def as_built(seconds: float) -> Any:
    return pytest.approx(seconds, rel=0.1, abs=0.0003)


def test_the_gpus_work_on_the_parts_of_a_step_is_measured(tmp_path: Path) -> None:
    class Starved(Busy):
        def on_train_batch_start(self, batch: torch.Tensor, batch_idx: int) -> None:
            torch.cuda.synchronize()  # so that no work of the step before hides what comes

        def occupy_forward(self) -> None:
            occupy(self.forward_s / 2)
            time.sleep(0.020)
            occupy(self.forward_s / 2)

    _, idle = train(tmp_path, Starved(0.006, 0.012, 0.003))
    assert {part: idle.work_s[part] for part in (FORWARD, BACKWARD, OPTIMIZER)} == {
        FORWARD: as_built(0.006),
        BACKWARD: as_built(0.012),
        OPTIMIZER: as_built(0.003),
    }
    assert sum(step[FORWARD] for step in idle.steps_s) / idle.samples > 0.020  # between its events


def test_one_step_in_eight_is_sampled_by_its_own_generator(tmp_path: Path) -> None:
    random.seed(3)
    expected = random.Random(3).random()
    _, idle = train(tmp_path, Model())
    assert random.random() == expected
    assert STEPS / 16 < idle.samples < STEPS / 4


def test_a_cuda_error_ends_the_sampling_and_not_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Break(Callback):
        def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
            if trainer.global_step == STEPS // 2:

                def fail(*args: object) -> None:
                    raise RuntimeError("CUDA error: device-side assert triggered")

                monkeypatch.setattr(torch.cuda.Event, "record", fail)

    clock, idle = train(tmp_path, Model(), Break())
    assert clock.steps == STEPS
    assert 0 < idle.samples < STEPS / 8


class RefusesToWait(Callback):
    """Makes every wait of the host an error while steps are measured; moving the model to the GPU waits, too."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        torch.cuda.set_sync_debug_mode("error")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        torch.cuda.set_sync_debug_mode("default")


def test_looking_makes_the_host_wait_for_nothing(tmp_path: Path) -> None:
    try:
        train(tmp_path, Model(), RefusesToWait())
    finally:
        torch.cuda.set_sync_debug_mode("default")
