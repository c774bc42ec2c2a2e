"""What the measuring asks of a training, whoever drives it: a Trainer, Fabric, or a loop of the user's own."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader

from lightning_gpu_tools.gpus.readings import GpuReading
from lightning_gpu_tools.training.rank_exchange import Place


class Run(Protocol):
    """A training, as far as it is known to whoever drives it.

    Attributes:
        has_trainer: Whether a Trainer drives it, with options that can be advised.
    """

    has_trainer: bool

    @property
    def place(self) -> Place:
        """Which rank this is."""

    @property
    def device(self) -> torch.device:
        """Where this rank trains."""

    @property
    def gpu(self) -> torch.device | None:
        """The same if it is an NVIDIA GPU; else ``None``."""

    @property
    def gpus(self) -> Sequence[torch.device]:
        """The NVIDIA GPUs that the ranks of this node train on; none on other devices."""

    @property
    def loader(self) -> DataLoader[Any] | None:
        """The training DataLoader; ``None`` if there is none or it is another kind of loader."""

    @property
    def iterator(self) -> object | None:
        """Its iterator; ``None`` if it cannot be known."""

    @property
    def module(self) -> torch.nn.Module | None:
        """The model; ``None`` if it cannot be known."""

    @property
    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """The optimizers."""

    @property
    def optimizer_steps(self) -> int:
        """How many steps they have made, also in earlier fits."""

    @property
    def is_plain_ddp(self) -> bool:
        """Whether ranks meet at the end of backward alone; with FSDP or DeepSpeed every layer waits for all ranks."""

    @property
    def loggers(self) -> Sequence[Any]:
        """Loggers of Lightning's."""

    @property
    def log_every_n_steps(self) -> int:
        """How often they get metrics; 0 = never."""

    @property
    def logged_step(self) -> int:
        """The step that they get with metrics."""

    @property
    def precision(self) -> str | None:
        """As ``"32-true"``; ``None`` if it cannot be known."""

    @property
    def accumulate_grad_batches(self) -> int:
        """Batches for each step of the optimizer."""

    @property
    def epoch_steps(self) -> int | None:
        """Steps of a whole epoch; ``None`` if that is unknown."""

    @property
    def checkpoint_folder(self) -> str | None:
        """Where checkpoints go, a path or a URL; ``None`` if that is unknown or there are none."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """What else a report has in its settings: at least ``model``, the name of what is trained."""


def gpu_readings(devices: Sequence[torch.device]) -> tuple[GpuReading, ...]:
    """Return UUID and name of each of these GPUs.

    ``index`` is torch's: it means nothing outside this process, because ``CUDA_VISIBLE_DEVICES`` renumbers the GPUs.
    """
    if not devices:
        return ()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if visible.startswith("MIG-"):
        # A process sees one MIG instance; torch gives the UUID of the GPU that it is part of.
        return (GpuReading(index=0, uuid=visible.split(",")[0], name=torch.cuda.get_device_name(0)),)
    found = []
    for device in devices:
        properties = torch.cuda.get_device_properties(device)
        found.append(GpuReading(index=device.index or 0, uuid=f"GPU-{properties.uuid}", name=properties.name))
    return tuple(found)
