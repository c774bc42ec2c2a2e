"""A training with a slow loader, for the demo. No GPU is needed."""

from __future__ import annotations

import logging
import time
import warnings

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, Dataset

from lightning_gpu_tools.advice.findings import Diagnosis
from lightning_gpu_tools.trainer.gpu_utilization_advisor import GPUUtilizationAdvisor
from lightning_gpu_tools.trainer.gpu_utilization_monitor import GPUUtilizationMonitor

# Chosen so that two trainings together take well under a minute, and each long enough to be judged.
STEPS = 250
_BATCH_SIZE = 16
_LOAD_S = 0.0015
_MIN_SECONDS = 1.0


class SlowImages(Dataset[tuple[torch.Tensor, int]]):
    """Images that come from a storage that takes 1.5 ms for each, as over a network."""

    def __len__(self) -> int:
        return STEPS * _BATCH_SIZE

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(_LOAD_S)
        return torch.full((3, 32, 32), index % 10 / 10), index % 10


class SmallNetwork(LightningModule):
    """A network of two convolutions."""

    def __init__(self) -> None:
        super().__init__()
        convolutions = [torch.nn.Conv2d(3, 16, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(16, 32, 3, stride=2)]
        self.layers = torch.nn.Sequential(*convolutions, torch.nn.Flatten(), torch.nn.Linear(32 * 15 * 15, 10))

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Return the loss."""
        images, labels = batch
        return torch.nn.functional.cross_entropy(self.layers(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


def train(folder: str, num_workers: int) -> Diagnosis:
    """Train, print the report and write it into the folder, and return the diagnosis."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    # It has more workers than cores on purpose: they wait for the storage.
    warnings.filterwarnings("ignore", message=".*(num_workers|worker processes).*")
    warnings.filterwarnings("ignore", category=FutureWarning)
    torch.set_num_threads(1)  # several threads wait for each other on a busy machine
    advisor = GPUUtilizationAdvisor(min_seconds=_MIN_SECONDS)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[GPUUtilizationMonitor(), advisor],
    )
    loader = DataLoader(
        SlowImages(), batch_size=_BATCH_SIZE, num_workers=num_workers, persistent_workers=num_workers > 0
    )
    trainer.fit(SmallNetwork(), loader)
    assert advisor.diagnosis is not None
    return advisor.diagnosis
