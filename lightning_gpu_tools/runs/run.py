"""The interface of a training that is measured: of a Trainer, of Fabric, or of the user's own loop."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader

from lightning_gpu_tools.gpus.readings import GpuReading
from lightning_gpu_tools.training.memory_holdings import Training
from lightning_gpu_tools.training.rank_exchange import RankPlace


class Run(Training, Protocol):
    """A training, as far as the code that drives it knows; ``None`` = unknown, or none."""

    has_trainer: bool  # whether a Trainer drives it, with options that can be advised

    @property
    def place(self) -> RankPlace:
        """The place of this rank in the job."""

    @property
    def gpus(self) -> Sequence[torch.device]:
        """The NVIDIA GPUs on which the ranks of this node train."""

    @property
    def loader(self) -> DataLoader[Any] | None:
        """The training loader if it is a ``torch.utils.data.DataLoader``."""

    @property
    def iterator(self) -> object | None:
        """The iterator of the loader."""

    @property
    def loggers(self) -> Sequence[Any]:
        """Lightning's loggers."""

    @property
    def log_every_n_steps(self) -> int:
        """The number of steps between their metrics; 0 = never."""

    @property
    def logged_step(self) -> int:
        """The step number that they get with metrics."""

    @property
    def accumulate_grad_batches(self) -> int:
        """Batches per step of the optimizer."""

    @property
    def epoch_steps(self) -> int | None:
        """Steps of a whole epoch."""

    @property
    def checkpoint_folder(self) -> str | None:
        """The folder of checkpoints: a path or a URL."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """More settings for the report: at least ``model``, the name of the model."""


def gpu_readings(devices: Sequence[torch.device]) -> tuple[GpuReading, ...]:
    """Return the UUID and the name of each GPU, and torch's index, which counts within this process."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if devices and visible.startswith("MIG-"):
        # A process sees one instance; torch returns the UUID of its GPU.
        return (GpuReading(index=0, uuid=visible.split(",")[0], name=torch.cuda.get_device_name(0)),)
    found = []
    for device in devices:
        properties = torch.cuda.get_device_properties(device)
        found.append(GpuReading(index=device.index or 0, uuid=f"GPU-{properties.uuid}", name=properties.name))
    return tuple(found)
