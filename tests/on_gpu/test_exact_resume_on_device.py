"""A training on the GPU that ends at a step and is resumed: its weights, and the GPU's random numbers."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_gpu_tools import ExactResume


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.Dropout(0.3), torch.nn.Linear(64, 1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        noise = torch.rand(4, device=self.device)
        return self.layer(batch[0] + noise).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)

    def train_dataloader(self) -> Any:
        data = torch.utils.data.TensorDataset(torch.arange(80.0).reshape(20, 4) / 80)
        return DataLoader(data, batch_size=2, shuffle=True)


class End(Callback):
    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == 7:
            raise RuntimeError("ended")


def train(folder: Path, seed: int, *more: Callback, ckpt: Any = None, deterministic: bool = True) -> list[torch.Tensor]:
    """Return the weights, and the numbers that the GPU draws next."""
    seed_everything(seed)
    saving = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    options: Any = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    model = Model()
    callbacks = [ExactResume(), saving, *more]
    Trainer(
        accelerator="gpu", devices=1, max_epochs=2, deterministic=deterministic, callbacks=callbacks, **options
    ).fit(model, ckpt_path=ckpt)
    return [*model.state_dict().values(), torch.cuda.get_rng_state()]


@pytest.mark.follows("Trainer(deterministic=True) prevents that.")
def test_a_training_on_the_gpu_goes_on_to_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    with pytest.warns(UserWarning, match="Kernels on the GPU may round differently in each run"):
        train(tmp_path / "other", 7, deterministic=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "ExactResume")
        expected = train(tmp_path / "whole", 7)
    with pytest.raises(RuntimeError, match="ended"):
        train(tmp_path / "ended", 7, End())
    found = train(tmp_path / "ended", 99, ckpt=tmp_path / "ended" / "step=7.ckpt")
    torch.use_deterministic_algorithms(False)
    assert all(map(torch.equal, expected, found))
