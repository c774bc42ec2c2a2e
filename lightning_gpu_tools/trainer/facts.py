"""What is known of a training by its Trainer; and what a Fabric says in the same words."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from lightning_gpu_tools.runs.run import Run
from lightning_gpu_tools.trainer import compat
from lightning_gpu_tools.trainer.families import Trainer, base_of, version_of
from lightning_gpu_tools.training.rank_exchange import Place


def trains_on_gpu(trainer: Any) -> bool:
    """Return whether a Trainer or a Fabric trains on NVIDIA GPUs."""
    return base_of(trainer.accelerator, "CUDAAccelerator") is not None


def place_of(trainer: Any) -> Place:
    """Return which rank of a Trainer or a Fabric this is."""
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
    """Return the GPUs that a Trainer or a Fabric uses on this node."""
    strategy = trainer.strategy
    return (getattr(strategy, "parallel_devices", None) or [strategy.root_device]) if trains_on_gpu(trainer) else ()


def settings_of(trainer: Any) -> Mapping[str, Any]:
    """Return the name of the accelerator of a Trainer or a Fabric, and the version of its package."""
    package, version = version_of(trainer)
    return {"accelerator": type(trainer.accelerator).__name__, package: version}


def is_plain_ddp(trainer: Trainer) -> bool:
    """Return whether the model is a DistributedDataParallel; with FSDP or DeepSpeed every layer waits for all ranks."""
    return isinstance(trainer.strategy.model, DistributedDataParallel)


class TrainerRun(Run):
    """A Trainer's fit."""

    has_trainer = True

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    @property
    def place(self) -> Place:
        """Which rank this is."""
        return place_of(self._trainer)

    @property
    def device(self) -> torch.device:
        """The device of the strategy."""
        return self._trainer.strategy.root_device

    @property
    def gpu(self) -> torch.device | None:
        """The one among ``gpus`` that is this rank's."""
        gpus = self.gpus
        return gpus[self.place.local_rank % len(gpus)] if gpus else None

    @property
    def gpus(self) -> Sequence[torch.device]:
        """The GPUs that the Trainer uses on this node."""
        return gpus_of(self._trainer)

    @property
    def loader(self) -> DataLoader[Any] | None:
        """The training DataLoader; of several loaders the first one that is a ``torch.utils.data.DataLoader``."""
        return next((one for one in _flat(self._trainer.train_dataloader) if isinstance(one, DataLoader)), None)

    @property
    def iterator(self) -> object | None:
        """The iterator of the first training loader."""
        return compat.train_iterator(self._trainer)

    @property
    def module(self) -> torch.nn.Module | None:
        """The LightningModule."""
        return self._trainer.lightning_module

    @property
    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """Those that the model has configured."""
        return self._trainer.optimizers

    @property
    def optimizer_steps(self) -> int:
        """The Trainer's global step."""
        return self._trainer.global_step

    @cached_property  # at the end of a fit Lightning unwraps the model before it says so
    def is_plain_ddp(self) -> bool:
        """Whether the model is a DistributedDataParallel."""
        return is_plain_ddp(self._trainer)

    @property
    def loggers(self) -> Sequence[Any]:
        """The Trainer's."""
        return self._trainer.loggers

    @property
    def log_every_n_steps(self) -> int:
        """The Trainer's."""
        return self._trainer.log_every_n_steps  # type: ignore[attr-defined, no-any-return]

    @property
    def logged_step(self) -> int:
        """The step of the metrics of ``self.log``."""
        return compat.logged_step(self._trainer)

    @property
    def precision(self) -> str:
        """The Trainer's."""
        return str(self._trainer.precision)

    @property
    def accumulate_grad_batches(self) -> int:
        """The Trainer's."""
        return self._trainer.accumulate_grad_batches

    @property
    def epoch_steps(self) -> int | None:
        """Batches of an epoch, with the Trainer's limits."""
        steps = self._trainer.num_training_batches
        return None if math.isinf(steps) else int(steps)

    @property
    def checkpoint_folder(self) -> str | None:
        """That of the first checkpoint callback, which knows it when training starts."""
        folder = getattr(self._trainer.checkpoint_callback, "dirpath", None)
        return None if folder is None else str(folder)

    @property
    def settings(self) -> Mapping[str, Any]:
        """Also the name of the model."""
        return {"model": type(self._trainer.lightning_module).__qualname__, **settings_of(self._trainer)}


def _flat(loaders: Any) -> Iterable[Any]:
    if isinstance(loaders, dict):
        loaders = list(loaders.values())
    if isinstance(loaders, (list, tuple)):
        for loader in loaders:
            yield from _flat(loader)
    else:
        yield loaders
