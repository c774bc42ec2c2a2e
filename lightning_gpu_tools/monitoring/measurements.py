"""What the diagnosis needs to know, collected from a Trainer, its step clock and the host."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from lightning_gpu_tools.advice.run_measurements import RunMeasurements
from lightning_gpu_tools.errors import NvmlUnavailableError
from lightning_gpu_tools.gpu_readings import GpuReading
from lightning_gpu_tools.host import children_cpu_s, cores_in_reach, idle_cpu_s, read_host_budget
from lightning_gpu_tools.monitoring import sampler
from lightning_gpu_tools.monitoring.gpu_timeline import trains_on_gpu
from lightning_gpu_tools.monitoring.step_clock import StepClock
from lightning_gpu_tools.readings import LoaderSettings


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


class RunRecorder:
    """Keeps, from the start of a fit on, what is needed to describe the fit at any later moment.

    Make it in ``on_train_start``, where the loader is known, and close it at the end.

    Attributes:
        batch_bytes: Size of one batch; ``None`` until somebody sets it.
    """

    def __init__(self, trainer: Trainer, clock: StepClock) -> None:
        self.batch_bytes: int | None = None
        self._clock = clock
        self._began_s = time.perf_counter()
        self._own_cpu_s, self._children_cpu_s, self._idle_cpu_s = time.process_time(), children_cpu_s(), idle_cpu_s()
        self._local_ranks = local_ranks(trainer)
        self._on_gpu = trains_on_gpu(trainer)
        self._loader = train_loader_settings(trainer)
        self._gpus: sampler.Reader | None = None
        gpu_uuids = [gpu.uuid for gpu in trainer_gpus(trainer) if gpu.uuid is not None]
        if gpu_uuids and trainer.local_rank == 0:  # one process of a node is enough to look at its GPUs
            # Without a usable driver utilization is unknown; whoever shows the GPUs tells the user why.
            with contextlib.suppress(NvmlUnavailableError):
                self._gpus = sampler.subscribe(gpu_uuids)
        self._busy_s = self._observed_s = 0.0

    def close(self) -> None:
        """Let go of the sampler; nothing happens the second time."""
        if self._gpus is not None:
            self._take()
            self._gpus.close()
            self._gpus = None

    def _take(self) -> None:
        if self._gpus is None:
            return
        for window in self._gpus.take().values():
            if window.utilization_mean_percent is not None:
                self._busy_s += window.utilization_mean_percent / 100 * window.utilization_observed_s
                self._observed_s += window.utilization_observed_s

    def measurements(self) -> RunMeasurements:
        """Return everything measured so far."""
        clock = self._clock
        self._take()
        children_s = children_cpu_s() - self._children_cpu_s
        used_s = time.process_time() - self._own_cpu_s + children_s
        elapsed_s = time.perf_counter() - self._began_s
        host = read_host_budget(local_ranks=self._local_ranks)
        used_or_idle = (self._local_ranks * used_s + idle_cpu_s() - self._idle_cpu_s) / elapsed_s
        workers = self._loader is not None and self._loader.num_workers > 0
        return RunMeasurements(
            wall_s=clock.wall_s,
            steps=max(1, clock.steps),
            phase_s=dict(clock.seconds),
            blocks=tuple(clock.blocks),
            host=replace(host, cores_in_reach=cores_in_reach(host.cores, used_or_idle)),
            on_gpu=self._on_gpu,
            utilization_percent=100 * self._busy_s / self._observed_s if self._observed_s > 0 else None,
            loader=self._loader,
            worker_cpu_s_per_batch=children_s / max(1, clock.steps) if workers else None,
            batch_bytes=self.batch_bytes,
        )
