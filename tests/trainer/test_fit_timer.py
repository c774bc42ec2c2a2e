"""The phases of the time of real trainings, by a clock that moves only when the test's code spends time."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import TorchCheckpointIO
from lightning.pytorch.profilers import AdvancedProfiler, Profiler, SimpleProfiler
from trainings import (
    HandClock,
    Model,
    Samples,
    Spending,
    SpendingLogger,
    Watch,
    loader,
    quiet_trainer,
)


def watched_fit(
    time: HandClock, folder: Path, model: LightningModule, *data: Any, callbacks: Sequence[Any] = (), **options: Any
) -> Watch:
    watch = Watch(time)
    quiet_trainer(folder, callbacks=[watch, *callbacks], **options).fit(model, *data)
    return watch


@pytest.mark.parametrize("profiler", [None, SimpleProfiler, AdvancedProfiler])
def test_every_second_is_booked_where_it_was_spent(
    time: HandClock, tmp_path: Path, profiler: type[Profiler] | None
) -> None:
    watch = watched_fit(
        time,
        tmp_path,
        Model(time.spend, step_s=2.0, validation_s=4.0),
        loader(Samples(10, time.spend, 3.0)),
        loader(Samples(2, time.spend, 1.0)),
        logger=SpendingLogger(tmp_path, time.spend, 0.5),
        log_every_n_steps=1,
        callbacks=[Spending(time.spend, "on_train_batch_start", 0.25), Slow(time)],
        profiler=profiler and profiler(),
    )
    clock = watch.clock
    assert watch.timer.unseen == []
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


def test_the_users_profiler_sees_all_that_it_would_have_seen(time: HandClock, tmp_path: Path) -> None:
    class Profiled(Model):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            with self.trainer.profiler.profile("mine") as name:  # type: ignore[attr-defined]
                assert name == "mine"
                return super().training_step(batch, batch_idx)

    def actions(*callbacks: Callback) -> dict[str, int]:
        profiler = SimpleProfiler()
        trainer = quiet_trainer(tmp_path, callbacks=[*callbacks, Slow(time)], profiler=profiler)
        trainer.fit(Profiled(time.spend), loader(Samples(6)), loader(Samples(4)))
        return {name: len(durations) for name, durations in profiler.recorded_durations.items() if "Watch" not in name}

    timed, alone = actions(Watch(time)), actions()
    assert timed == alone
    assert timed["mine"] == 6


class Slow(Callback):
    def __init__(self, time: HandClock) -> None:
        self.time = time

    def on_train_batch_end(self, *args: Any) -> None:
        self.time.spend(0.125)


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


def test_hooks_of_the_users_classes_are_booked_by_their_names(time: HandClock, tmp_path: Path) -> None:
    class Hooked(Model):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            time.spend(0.25)

        def on_after_backward(self) -> None:
            time.spend(0.125)

        def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
            time.spend(2.0)
            return batch

    class Augmenting(LightningDataModule):
        def train_dataloader(self) -> Any:
            return loader(Samples(6))

        def val_dataloader(self) -> Any:
            return loader(Samples(4))

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            time.spend(0.5)
            return batch

    model = Hooked(time.spend, step_s=1.0, validation_s=1.0)
    watch = watched_fit(time, tmp_path, model, Augmenting(), num_sanity_val_steps=0)
    assert watch.clock.seconds == {
        "training_step/forward": 6 * 1.0,
        "host_to_device_copy": 6 * 2.0,
        "callback/Hooked.on_train_batch_start": 6 * 0.25,
        "callback/Hooked.on_after_backward": 6 * 0.125,
        "callback/Augmenting.on_after_batch_transfer": 6 * 0.5,
        "validation": 4 * (1.0 + 2.0 + 0.5),  # with all that is done to its batches
    }
    assert not {"on_train_batch_start", "on_after_backward"} & vars(model).keys()
