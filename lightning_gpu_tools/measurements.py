"""What the diagnosis needs to know, collected from a Trainer, its step clock and the host."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import CUDAAccelerator
from torch.utils.data import DataLoader

from lightning_gpu_tools.diagnosis import RunMeasurements
from lightning_gpu_tools.host import children_cpu_s, read_host_budget
from lightning_gpu_tools.readings import LoaderSettings
from lightning_gpu_tools.step_clock import StepClock


def trains_on_gpu(trainer: Trainer) -> bool:
    """Return whether the Trainer trains on NVIDIA GPUs."""
    return isinstance(trainer.accelerator, CUDAAccelerator)


def local_ranks(trainer: Trainer) -> int:
    """Return how many training processes run on this machine."""
    return max(1, trainer.world_size // max(1, trainer.num_nodes))


def train_loader_settings(trainer: Trainer) -> LoaderSettings | None:
    """Return the settings of the training DataLoader, ``None`` if there is none or it is another kind of loader.

    Of several loaders it is the first one that is a ``torch.utils.data.DataLoader``.
    """
    for loader in _flat(trainer.train_dataloader):
        if isinstance(loader, DataLoader):
            return LoaderSettings(
                num_workers=loader.num_workers,
                prefetch_factor=loader.prefetch_factor,
                persistent_workers=loader.persistent_workers,
                pin_memory=loader.pin_memory,
                batch_size=loader.batch_size,
            )
    return None


def _flat(loaders: Any) -> Iterable[Any]:
    if isinstance(loaders, dict):
        loaders = list(loaders.values())
    if isinstance(loaders, (list, tuple)):
        for loader in loaders:
            yield from _flat(loader)
    else:
        yield loaders


def batch_bytes(batch: Any) -> int:
    """Return the size of all tensors in a batch of nested lists, tuples and dictionaries, in bytes."""
    if isinstance(batch, torch.Tensor):
        return batch.element_size() * batch.numel()
    if isinstance(batch, dict):
        batch = batch.values()
    elif not isinstance(batch, (list, tuple)):
        return 0
    return sum(batch_bytes(part) for part in batch)


class RunRecorder:
    """Keeps what is needed from the beginning of a fit to describe it later; make it in ``on_train_start``."""

    def __init__(self, trainer: Trainer, clock: StepClock) -> None:
        self._clock = clock
        self._children_cpu_s = children_cpu_s()
        self._local_ranks = local_ranks(trainer)
        self._on_gpu = trains_on_gpu(trainer)
        self._loader = train_loader_settings(trainer)
        self.batch_bytes: int | None = None

    def measurements(self) -> RunMeasurements:
        """Return everything measured so far."""
        clock = self._clock
        workers = self._loader is not None and self._loader.num_workers > 0
        worker_cpu_s = (children_cpu_s() - self._children_cpu_s) / max(1, clock.steps) if workers else None
        return RunMeasurements(
            wall_s=clock.wall_s,
            steps=max(1, clock.steps),
            phase_s=dict(clock.seconds),
            blocks=tuple(clock.blocks),
            host=read_host_budget(local_ranks=self._local_ranks),
            on_gpu=self._on_gpu,
            utilization_percent=None,
            loader=self._loader,
            worker_cpu_s_per_batch=worker_cpu_s,
            batch_bytes=self.batch_bytes,
        )
