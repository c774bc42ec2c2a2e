"""What is known of a Trainer: its loader and its GPUs."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from lightning_gpu_tools.gpus.readings import GpuReading
from lightning_gpu_tools.loaders.settings import settings_of
from lightning_gpu_tools.trainer.families import Trainer, base_of
from lightning_gpu_tools.training.run_measurements import LoaderSettings


def trains_on_gpu(trainer: Trainer) -> bool:
    """Return whether the Trainer trains on NVIDIA GPUs."""
    return base_of(trainer.accelerator, "CUDAAccelerator") is not None


def is_plain_ddp(trainer: Trainer) -> bool:
    """Return whether the model is a DistributedDataParallel; with FSDP or DeepSpeed every layer waits for all ranks."""
    return isinstance(trainer.strategy.model, DistributedDataParallel)


def local_ranks(trainer: Trainer) -> int:
    """Return how many training processes run on this machine."""
    return max(1, trainer.world_size // max(1, trainer.num_nodes))


def train_loader(trainer: Trainer) -> DataLoader[Any] | None:
    """Return the training DataLoader, ``None`` if there is none or it is another kind of loader.

    Of several loaders it is the first one that is a ``torch.utils.data.DataLoader``.
    """
    return next((loader for loader in _flat(trainer.train_dataloader) if isinstance(loader, DataLoader)), None)


def train_loader_settings(trainer: Trainer) -> LoaderSettings | None:
    """Return the settings of :func:`train_loader`."""
    loader = train_loader(trainer)
    return None if loader is None else settings_of(loader)


def _flat(loaders: Any) -> Iterable[Any]:
    if isinstance(loaders, dict):
        loaders = list(loaders.values())
    if isinstance(loaders, (list, tuple)):
        for loader in loaders:
            yield from _flat(loader)
    else:
        yield loaders


def trainer_gpus(trainer: Trainer) -> tuple[GpuReading, ...]:
    """Return UUID and name of each GPU that the Trainer uses on this node; none on other devices.

    ``index`` is torch's: it means nothing outside this process, because ``CUDA_VISIBLE_DEVICES`` renumbers the GPUs.
    """
    if not trains_on_gpu(trainer):
        return ()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if visible.startswith(
        "MIG-"
    ):  # a process sees one MIG instance; torch gives the UUID of the GPU that it is part of
        return (GpuReading(index=0, uuid=visible.split(",")[0], name=torch.cuda.get_device_name(0)),)
    devices = getattr(trainer.strategy, "parallel_devices", None) or [trainer.strategy.root_device]
    found = []
    for device in devices:
        properties = torch.cuda.get_device_properties(device)
        found.append(GpuReading(index=device.index or 0, uuid=f"GPU-{properties.uuid}", name=properties.name))
    return tuple(found)
