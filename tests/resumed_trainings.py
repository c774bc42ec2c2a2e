"""Trainings that are killed at some step and resumed with other random numbers, and one that is not."""

import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler
from torchmetrics import MeanMetric
from trainings import quiet_trainer

from lightning_gpu_tools import ExactResume

SAMPLES, BATCH = 26, 2


class Photos(Dataset[torch.Tensor]):
    """Samples with augmentation by each of the three global generators."""

    def __init__(self, count: int = SAMPLES) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = random.random() + np.random.randn() + torch.rand(4)
        return (index + noise).float() / 30


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return (Photos()[index] for index in range(SAMPLES))


class Shuffled(Sampler[int]):
    """A sampler of a user that draws index by index."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(SAMPLES):
            yield np.random.randint(SAMPLES)

    def __len__(self) -> int:
        return SAMPLES


class OwnGenerator(Shuffled):
    def __init__(self, rng: Any) -> None:
        self.rng = rng

    def __iter__(self) -> Iterator[int]:
        for _ in range(SAMPLES):
            yield int(self.rng.random() * SAMPLES)


class Model(LightningModule):
    """Dropout, draws on the host, two schedulers, and metrics that one of them follows."""

    monitor = "loss_epoch"

    def __init__(self, load: Callable[[], Any], validation: Callable[[], Any] | None = None) -> None:
        super().__init__()
        self.layer = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.3), torch.nn.Linear(4, 1))
        self.load, self.validation = load, validation
        self.mean = MeanMetric()
        self.hooks: torch.Tensor
        self.register_buffer("hooks", torch.zeros(3))

    def loss(self, batch: Any) -> torch.Tensor:
        if isinstance(batch, (list, tuple)):
            batch = torch.cat([part for part in batch if part is not None])
        if isinstance(batch, dict):
            batch = torch.cat([part for part in batch.values() if part is not None])
        return self.layer(batch.reshape(-1, 4)).square().mean() * (1 + random.random() + np.random.randn() / 4)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=BATCH)
        self.mean(loss)
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch) + torch.rand(()), batch_size=BATCH)

    def on_train_epoch_start(self) -> None:
        self.hooks[0] += 1

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.hooks[1] += 1

    def on_train_epoch_end(self) -> None:
        self.hooks[2] += 1

    def train_dataloader(self) -> Any:
        return self.load()

    def val_dataloader(self) -> Any:
        return self.validation() if self.validation else []

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.02)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.7, patience=0)
        return [optimizer], [{"scheduler": plateau, "monitor": self.monitor, "interval": "epoch"}]


class Manual(Model):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()

    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        scheduler: Any = self.lr_schedulers()
        scheduler.step(self.trainer.callback_metrics["loss_epoch"])


class Unscheduled(Model):
    """A model whose learning rate stays, so that it is the same on all ranks."""

    lr = 0.02

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=self.lr)


class Kill(Callback):
    """An end of the process, as far as the rest of the training is concerned."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        if trainer.fit_loop.total_batch_idx == self.step:
            raise RuntimeError("killed")


def everything(trainer: Trainer, model: LightningModule) -> dict[str, Any]:
    """Return weights, optimizers, schedulers, counters and the next random numbers."""
    saved = trainer._checkpoint_connector.dump_checkpoint()
    kept = {name: saved[name] for name in ("state_dict", "optimizer_states", "lr_schedulers", "global_step", "epoch")}
    drawn = torch.rand(2).tolist(), random.random(), np.random.rand()
    return {**kept, "drawn": drawn, "metrics": {**trainer.callback_metrics}}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def train(
    folder: Path,
    model: LightningModule,
    seed: int,
    ckpt: Any = None,
    more: Sequence[Callback] = (),
    saves: bool = True,
    plugins: Sequence[Any] = (),
    **options: Any,
) -> Trainer:
    seed_everything(seed)
    saving = ModelCheckpoint(folder, every_n_train_steps=1 if saves else 10**9, save_top_k=-1, filename="{step}")
    options = {"max_epochs": 2, "enable_checkpointing": True, **options}
    own = [] if any(isinstance(callback, ExactResume) for callback in more) else [ExactResume()]
    trainer = quiet_trainer(folder, callbacks=[*more, *own, saving], plugins=[*plugins], **options)
    trainer.fit(model, ckpt_path=ckpt)
    return trainer


def check(
    folder: Path,
    make: Callable[[], LightningModule],
    steps: list[int],
    callbacks: Callable[[], list[Callback]] = list,
    **options: Any,
) -> None:
    """Compare a training with those that are killed after these steps and go on."""
    seed_everything(1)
    model = make()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    expected = everything(train(folder / "whole", model, 7, more=callbacks(), **options), model)
    for step in steps:
        model = make()
        model.load_state_dict(weights)
        with pytest.raises(RuntimeError, match="killed"):
            train(folder / f"{step}", model, 7, more=[*callbacks(), Kill(step)], **options)
        ckpt = max((folder / f"{step}").glob("*.ckpt"), key=lambda path: int(path.stem.split("=")[1]))
        model = make()
        resumed = everything(train(folder / f"{step}", model, 99, ckpt, more=callbacks(), **options), model)
        differ = [name for name in expected if not same(expected[name], resumed[name])]
        assert not differ, (step, differ)


def plain(dataset: Any = Photos, **options: Any) -> DataLoader[Any]:
    return DataLoader(dataset(), **{"batch_size": BATCH, **options})


validated = partial(Model, partial(plain, shuffle=True), plain)
