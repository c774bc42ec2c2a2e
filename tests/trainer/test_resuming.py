"""Resuming as Lightning does, but weights alone are refused before the model changes."""

import copy
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping
from plugin_trainings import trainer
from torch import nn, optim
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader

import lightning_gpu_tools
from lightning_gpu_tools.errors import CheckpointMismatchError


class Lit(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 3)

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss = self.net(batch).square().mean()
        self.log("loss", loss)
        return loss  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        optimizer = optim.Adam(self.parameters())
        return {"optimizer": optimizer, "lr_scheduler": self.scheduler(optimizer)}

    def scheduler(self, optimizer: optim.Optimizer) -> Any:
        return lr_scheduler.StepLR(optimizer, 1)


class Manual(Lit):
    """Two optimizers and no scheduler, as a GAN has them."""

    def __init__(self, optimizers: int = 2) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.number = optimizers

    def training_step(self, batch: torch.Tensor, index: int) -> None:  # type: ignore[override]
        self.manual_backward(super().training_step(batch, index))
        for optimizer in self.optimizers() if self.number > 1 else [self.optimizers()] * self.number:  # type: ignore[union-attr]
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [optim.Adam([parameter]) for parameter in [*self.net.parameters()][: self.number]]


def fit(model: LightningModule, folder: Path, path: Any = None, plugin: Any = None, **options: Any) -> Trainer:
    stopping = [EarlyStopping("loss", patience=9, check_on_train_epoch_end=True)]
    run = trainer(folder, plugin, **{"epochs": 3, "callbacks": stopping, **options})
    run.fit(model, DataLoader(torch.ones(2, 2), 2), ckpt_path=path)  # type: ignore[arg-type]
    return run


@functools.cache
def checkpoint(folder: Path, model: Callable[..., LightningModule] = Lit, *choice: Any) -> dict[str, Any]:
    """Return the content that a Trainer saves after one step; do not change it."""
    fit(model(*choice), folder, epochs=1).save_checkpoint(folder / "saved.ckpt")
    return torch.load(folder / "saved.ckpt")  # type: ignore[no-any-return]


def resume(content: Any, model: LightningModule, folder: Path, **options: Any) -> Trainer:
    torch.save(content, folder / "odd.ckpt")
    return fit(model, folder, folder / "odd.ckpt", **options)


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp()


@pytest.mark.parametrize("number", [0, 2])
def test_several_optimizers_or_none_are_resumed(number: int, folder: Path) -> None:
    content = checkpoint(folder, Manual, number)
    assert resume(content, Manual(number), folder, callbacks=[]).current_epoch == 3


@pytest.mark.follows("To start a new run from its weights, call ")
def test_fit_refuses_weights_alone_and_load_weights_takes_them(folder: Path) -> None:
    content = checkpoint(folder)
    for stored in (
        {name: content[name] for name in ("pytorch-lightning_version", "state_dict")},
        content["state_dict"],
    ):
        model = Lit()
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(CheckpointMismatchError, match=r'no "optimizer_states" .*save_weights_only=True') as refusal:
            resume(stored, model, folder)
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    advice = re.search(r"call lightning_gpu_tools\.(\w+), and fit without ckpt_path", str(refusal.value))
    assert advice is not None
    getattr(lightning_gpu_tools, advice[1])(model, folder / "odd.ckpt")
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in content["state_dict"].items())
    assert fit(model, folder).global_step == 3
