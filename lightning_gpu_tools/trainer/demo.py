"""The demo's training, which has a slow loader and needs no GPU."""

import logging
import time
import warnings

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from lightning_gpu_tools.advice.findings import Diagnosis
from lightning_gpu_tools.trainer.gpu_utilization import GPUUtilizationAdvisor, GPUUtilizationMonitor

# Two training runs take well under a minute, and each is long enough for a verdict.
STEPS = 250
_BATCH_SIZE = 16


class SlowImages(Dataset[tuple[torch.Tensor, int]]):
    """Images from storage that takes 1.5 ms per image, as over a network."""

    def __len__(self) -> int:
        return STEPS * _BATCH_SIZE

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(0.0015)
        return torch.full((3, 32, 32), index % 10 / 10), index % 10


class SmallNetwork(LightningModule):
    """A network with two convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Conv2d(3, 16, 3, padding=1),
            torch.nn.ReLU(),
            torch.nn.Conv2d(16, 32, 3, stride=2),
            torch.nn.Flatten(),
            torch.nn.Linear(32 * 15 * 15, 10),
        )

    @override
    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        images, labels = batch
        return torch.nn.functional.cross_entropy(self.layers(images), labels)

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def train(folder: str, num_workers: int) -> Diagnosis:
    """Train with a report in the folder, and return the diagnosis."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    # More workers than cores: they wait for the storage.
    warnings.filterwarnings("ignore", message=".*(num_workers|worker processes).*")
    warnings.filterwarnings("ignore", category=FutureWarning)
    torch.set_num_threads(1)  # several threads wait for each other on a busy machine
    advisor = GPUUtilizationAdvisor(min_seconds=1.0)
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
