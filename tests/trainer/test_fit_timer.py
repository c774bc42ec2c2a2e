"""The phases of the time of real trainings, by a clock that moves only when the test's code spends time."""

from collections.abc import Callable, Sequence
from pathlib import Path
from time import thread_time
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision, TorchCheckpointIO
from lightning.pytorch.profilers import SimpleProfiler
from trainings import HandClock, Model, Samples, Spending, SpendingLogger, Watch, loader, quiet_trainer

from lightning_gpu_tools.training.step_clock import WARM_UP_STEPS


def watched_fit(
    time: Callable[[], float],
    folder: Path,
    model: LightningModule,
    *data: Any,
    callbacks: Sequence[Any] = (),
    **options: Any,
) -> Watch:
    watch = Watch(time)
    quiet_trainer(folder, callbacks=[watch, *callbacks], **options).fit(model, *data)
    return watch


class Slow(Spending):
    """A callback of another name."""


def test_every_second_is_booked_where_it_was_spent(time: HandClock, tmp_path: Path) -> None:
    watch = watched_fit(
        time,
        tmp_path,
        Model(time.spend, step_s=2.0, validation_s=4.0),
        loader(Samples(10, time.spend, 3.0)),
        loader(Samples(2, time.spend, 1.0)),
        logger=SpendingLogger(tmp_path, time.spend, 0.5),
        log_every_n_steps=1,
        callbacks=[
            Spending(time.spend, "on_train_batch_start", 0.25),
            Slow(time.spend, "on_train_batch_end", 0.125),
        ],
    )
    clock = watch.clock
    assert watch.timer.patches.missing == []
    assert clock.steps == 10
    assert clock.seconds == {
        "epoch_start": 3.0,  # the first batch of an epoch: the workers come up
        "data_loading": 9 * 3.0,
        "training_step/forward": 10 * 2.0,
        "callback/Slow": 10 * 0.125,
        "callback/Spending": 10 * 0.25,
        "validation": 2 * (4.0 + 1.0),
        "logging/SpendingLogger": 10 * 0.5 + 0.5,  # and once for the validation's metrics
    }
    assert clock.wall_s == sum(clock.seconds.values())


def test_nearly_all_of_lightnings_own_time_has_a_phase(tmp_path: Path) -> None:
    # By what this thread computes: other processes take none of it, however busy the machine is.
    data = loader(Samples(40)), loader(Samples(4))
    clock = watched_fit(thread_time, tmp_path, Model(), *data, val_check_interval=10).clock
    assert clock.wall_s == pytest.approx(sum(clock.seconds.values()))
    assert clock.seconds.get("unexplained", 0.0) / clock.wall_s <= 0.05


def test_the_users_profiler_sees_all_that_it_would_have_seen(time: HandClock, tmp_path: Path) -> None:
    class Profiled(Model):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            with self.trainer.profiler.profile("mine") as name:  # type: ignore[attr-defined]
                assert name == "mine"
                return super().training_step(batch, batch_idx)

    def actions(*callbacks: Callback) -> dict[str, int]:
        profiler = SimpleProfiler()
        slow = Slow(time.spend, "on_train_batch_end", 0.125)
        trainer = quiet_trainer(tmp_path, callbacks=[*callbacks, slow], profiler=profiler)
        trainer.fit(Profiled(time.spend, step_s=2.0), loader(Samples(6)), loader(Samples(4)))
        return {name: len(durations) for name, durations in profiler.recorded_durations.items() if "Watch" not in name}

    watch = Watch(time)
    timed, alone = actions(watch), actions()
    assert timed == alone
    assert timed["mine"] == 6
    assert watch.clock.seconds == {"training_step/forward": 6 * 2.0, "callback/Slow": 6 * 0.125}


def test_all_that_a_checkpoint_callback_does_is_checkpointing(time: HandClock, tmp_path: Path) -> None:
    class SlowDisk(TorchCheckpointIO):
        def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            time.spend(1.0)
            super().save_checkpoint(*args, **kwargs)

        def remove_checkpoint(self, path: Any) -> None:
            time.spend(3.0)
            super().remove_checkpoint(path)

    class SlowNames(ModelCheckpoint):
        def on_train_batch_end(self, *args: Any) -> None:
            time.spend(0.5)
            super().on_train_batch_end(*args)

    class Cleaner(Callback):
        def on_train_end(self, trainer: Trainer, *args: Any) -> None:
            trainer.strategy.remove_checkpoint(trainer.checkpoint_callback.best_model_path)

    callbacks = [Cleaner(), SlowNames(tmp_path, every_n_train_steps=1)]
    saving = {"callbacks": callbacks, "plugins": [SlowDisk()], "enable_checkpointing": True}
    watch = watched_fit(time, tmp_path, Model(), loader(Samples(6)), **saving)
    assert watch.clock.seconds == {"checkpoint": 6 * (0.5 + 1.0) + 5 * 3.0, "callback/Cleaner": 3.0}


# Parts of a step

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


@pytest.mark.parametrize(
    ("make", "times"),
    [
        pytest.param(SlowParts, (1, 1, 1), id="automatic"),
        pytest.param(lambda spend: SlowParts(spend, closures=3), (3, 3, 1), id="closures"),
        pytest.param(TwoOptimizers, (2, 2, 2), id="two optimizers"),
    ],
)
def test_forward_backward_and_optimizer_are_told_apart(
    time: HandClock, tmp_path: Path, make: Callable[[Any], LightningModule], times: tuple[int, int, int]
) -> None:
    clock = watched_fit(time, tmp_path, make(time.spend), loader(Samples(STEPS)), loader(Samples(2))).clock
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
    """Overrides hooks in which a model can do something to a batch, to its gradients and to its optimizer."""

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        self.spend(2.0)
        return batch

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.spend(0.064)

    def on_after_backward(self) -> None:
        self.spend(0.016)

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


class Augmenting(LightningDataModule):
    spend: Callable[[float], None]

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.spend(0.5)
        return batch


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


def test_hooks_of_the_users_classes_are_lines_and_lightnings_are_not(time: HandClock, tmp_path: Path) -> None:
    model, data = SlowHooks(time.spend), Augmenting.from_datasets(Samples(STEPS), val_dataset=Samples(4))
    data.spend = time.spend
    before = Spending(time.spend, "on_before_backward", 0.032)
    options: Any = {"callbacks": [before], "plugins": [SlowPrecision(time.spend)], "num_sanity_val_steps": 0}
    seconds = watched_fit(time, tmp_path, model, data, **options).clock.seconds
    assert seconds.pop("validation") == pytest.approx(4 * (2.0 + 0.5))  # with all that is done to its batches
    assert {phase: pytest.approx(spent_s / STEPS) for phase, spent_s in seconds.items()} == {
        "training_step/forward": FORWARD_S,
        "training_step/SlowHooks.backward": BACKWARD_S + 0.001,
        "training_step/optimizer": OPTIMIZER_S,
        "training_step/gradient_clipping": 0.25,
        "training_step/gradient_scaler": 0.125,
        "host_to_device_copy": 2.0,
        "callback/SlowHooks.on_train_batch_start": 0.064,
        "callback/SlowHooks.on_after_backward": 0.016,
        "callback/SlowHooks.optimizer_zero_grad": 0.002,
        "callback/SlowHooks.configure_gradient_clipping": 0.004,
        "callback/SlowHooks.optimizer_step": 0.008,
        "callback/Augmenting.on_after_batch_transfer": 0.5,
        "callback/Spending": 0.032,
    }
    assert not {"on_train_batch_start", "on_after_backward"} & vars(model).keys()
