"""A training with a slow loader, its diagnosis, and the same training with the advice applied. No GPU is needed."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, Dataset

from lightning_gpu_tools.advice.findings import Diagnosis
from lightning_gpu_tools.trainer.gpu_utilization_advisor import GPUUtilizationAdvisor
from lightning_gpu_tools.trainer.gpu_utilization_monitor import GPUUtilizationMonitor

# Chosen so that both trainings together take well under a minute, and each long enough to be judged.
STEPS = 250
_BATCH_SIZE = 16
_LOAD_S = 0.0015
_MIN_SECONDS = 1.0


class SlowImages(Dataset[tuple[torch.Tensor, int]]):
    """Random images that come from a storage that takes 1.5 ms for each, as over a network."""

    def __len__(self) -> int:
        return STEPS * _BATCH_SIZE

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(_LOAD_S)
        return torch.full((3, 32, 32), index % 10 / 10), index % 10


class SmallNetwork(LightningModule):
    """A network of two convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Conv2d(3, 16, 3, padding=1),
            torch.nn.ReLU(),
            torch.nn.Conv2d(16, 32, 3, stride=2),
            torch.nn.ReLU(),
            torch.nn.Flatten(),
            torch.nn.LazyLinear(10),
        )

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Return the loss."""
        images, labels = batch
        return torch.nn.functional.cross_entropy(self.layers(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return plain SGD."""
        self.layers(torch.zeros(1, 3, 32, 32))  # gives the last layer its size
        return torch.optim.SGD(self.parameters(), lr=0.01)


def run_demo(folder: str, say: Callable[[str], None]) -> tuple[Diagnosis, Diagnosis]:
    """Train, diagnose, apply the advice, and train again.

    Args:
        folder: For the reports.
        say: Is given each line to show; the reports are printed.

    Returns:
        Both diagnoses.
    """
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    # It has more workers than cores on purpose: they wait for the storage.
    warnings.filterwarnings("ignore", message=".*(num_workers|worker processes).*")
    warnings.filterwarnings("ignore", category=FutureWarning)
    say(
        f"1. {STEPS} training steps on the CPU. Each of the 16 images in a batch takes 1.5 ms to load, without workers."
    )
    before = _train(folder, num_workers=0)
    workers = max((int(one.evidence.get("advised_num_workers", 0)) for one in before.findings), default=0)
    if not workers:
        say("More workers would not help: this machine is busy with something else.")
        return before, before
    say(f"\n2. The same training with num_workers={workers}, as advised.")
    after = _train(folder, num_workers=workers)
    say("\nIn your own script: Trainer(callbacks=[GPUUtilizationMonitor(), GPUUtilizationAdvisor()]).")
    return before, after


def _train(folder: str, num_workers: int) -> Diagnosis:
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
