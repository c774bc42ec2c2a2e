"""Tiny trainings that save and load through the checkpoint plugin."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import wrapped_models
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch import nn
from torch.utils.data import DataLoader
from trainings import quiet_trainer

from lightning_gpu_tools.trainer.checkpoint_plugin import PortableCheckpointIO

WRAPPINGS = {
    name: wrapped_models.WRAPPINGS[name] for name in ("plain", "DataParallel", "compile", "compile(DataParallel)")
}
# Before, it could save nothing once a fit had ended.
saves_after_a_fit = pytest.mark.skipif(
    not hasattr(AsyncCheckpointIO, "_ensure_setup"), reason="this Lightning's AsyncCheckpointIO ends with a fit"
)


def make_net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


class Lit(LightningModule):
    def __init__(self, wrapping: str = "plain", seed: int = 0, batch_size: int = 4, lr: float = 0.01) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.net = WRAPPINGS[wrapping](make_net())
        self.batch_size, self.lr = batch_size, lr

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        return (self.net(batch) - batch[:, :2]).square().mean()

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        return self.loss(batch)

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        self.log("loss", self.loss(batch))

    def predict_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        return self.net(batch)

    test_step = validation_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.lr)

    def train_dataloader(self) -> DataLoader[Any]:
        return loader(self.batch_size)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


def loader(batch_size: int = 4) -> DataLoader[Any]:
    return DataLoader(torch.randn(16, 4, generator=torch.Generator().manual_seed(3)), batch_size=batch_size)  # type: ignore[arg-type]


def trainer(folder: Path, plugin: Any = None, *, epochs: int = 1, **options: Any) -> Trainer:
    keeps = any(isinstance(callback, ModelCheckpoint) for callback in options.get("callbacks", ()))
    plugins = [PortableCheckpointIO() if plugin is None else plugin]
    return quiet_trainer(folder, **{"max_epochs": epochs, "enable_checkpointing": keeps, "plugins": plugins, **options})


def trained(folder: Path, wrapping: str = "plain", plugin: Any = None, **options: Any) -> tuple[Trainer, Lit]:
    """Return a Trainer and its model after a fit, saved as ``a.ckpt``."""
    run, model = trainer(folder, plugin, **options), Lit(wrapping)
    run.fit(model)
    run.save_checkpoint(folder / "a.ckpt")
    return run, model


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(weights(one), weights(other), strict=True))


@pytest.fixture(autouse=True)
def no_tracing() -> Iterator[None]:
    """Run compiled modules as they are: only their names are tested here."""
    with torch.compiler.set_stance("force_eager"):
        yield
