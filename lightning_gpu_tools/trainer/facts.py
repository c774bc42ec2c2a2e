"""What a Trainer, and in part a Fabric, tells of its training."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_gpu_tools.runs.run import Run
from lightning_gpu_tools.trainer import compat
from lightning_gpu_tools.trainer.families import Trainer, base_of, version_of
from lightning_gpu_tools.training.rank_exchange import Place


def trains_on_gpu(trainer: Any) -> bool:
    """Return whether a Trainer or a Fabric trains on NVIDIA GPUs."""
    return base_of(trainer.accelerator, "CUDAAccelerator") is not None


def place_of(trainer: Any) -> Place:
    """Return which rank this is."""
    nodes = max(1, getattr(trainer.strategy, "num_nodes", 1))
    return Place(
        rank=trainer.global_rank,
        world_size=trainer.world_size,
        local_rank=trainer.local_rank,
        node=trainer.node_rank,
        nodes=nodes,
        local_ranks=max(1, trainer.world_size // nodes),
    )


def gpus_of(trainer: Any) -> Sequence[torch.device]:
    """Return the GPUs that are used on this node."""
    strategy = trainer.strategy
    return (getattr(strategy, "parallel_devices", None) or [strategy.root_device]) if trains_on_gpu(trainer) else ()


def settings_of(trainer: Any) -> Mapping[str, Any]:
    """Return the accelerator, and the version of the package."""
    package, version = version_of(trainer)
    return {"accelerator": type(trainer.accelerator).__name__, package: version}


class TrainerRun(Run):
    """A Trainer's fit."""

    has_trainer = True

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    @property
    @override
    def place(self) -> Place:
        return place_of(self._trainer)

    @property
    @override
    def device(self) -> torch.device:
        return self._trainer.strategy.root_device

    @property
    @override
    def gpu(self) -> torch.device | None:
        gpus = self.gpus
        return gpus[self.place.local_rank % len(gpus)] if gpus else None

    @property
    @override
    def gpus(self) -> Sequence[torch.device]:
        return gpus_of(self._trainer)

    @property
    @override
    def loader(self) -> DataLoader[Any] | None:
        return next((one for one in _flat(self._trainer.train_dataloader) if isinstance(one, DataLoader)), None)

    @property
    @override
    def iterator(self) -> object | None:
        return compat.train_iterator(self._trainer)

    @property
    @override
    def module(self) -> torch.nn.Module | None:
        return self._trainer.lightning_module

    @property
    @override
    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        return self._trainer.optimizers

    @property
    @override
    def optimizer_steps(self) -> int:
        return self._trainer.global_step

    @cached_property  # at its end Lightning unwraps the model
    @override
    def is_plain_ddp(self) -> bool:
        return isinstance(self._trainer.strategy.model, DistributedDataParallel)

    @property
    @override
    def loggers(self) -> Sequence[Any]:
        return self._trainer.loggers

    @property
    @override
    def log_every_n_steps(self) -> int:
        return self._trainer.log_every_n_steps  # type: ignore[attr-defined, no-any-return]

    @property
    @override
    def logged_step(self) -> int:
        return compat.logged_step(self._trainer)

    @property
    @override
    def precision(self) -> str:
        return str(self._trainer.precision)

    @property
    @override
    def accumulate_grad_batches(self) -> int:
        return self._trainer.accumulate_grad_batches

    @property
    @override
    def epoch_steps(self) -> int | None:
        steps = self._trainer.num_training_batches
        return None if math.isinf(steps) else int(steps)

    @property
    @override
    def checkpoint_folder(self) -> str | None:
        # The first checkpoint callback knows it when training starts.
        folder = getattr(self._trainer.checkpoint_callback, "dirpath", None)
        return None if folder is None else str(folder)

    @property
    @override
    def settings(self) -> Mapping[str, Any]:
        return {"model": type(self._trainer.lightning_module).__qualname__, **settings_of(self._trainer)}


def _flat(loaders: Any) -> Iterable[Any]:
    if isinstance(loaders, dict):
        loaders = list(loaders.values())
    if isinstance(loaders, (list, tuple)):
        for loader in loaders:
            yield from _flat(loader)
    else:
        yield loaders
