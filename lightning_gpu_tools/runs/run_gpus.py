"""The GPUs of a run: names and UUIDs, what the driver reports of them, and the sampler of this node's."""

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import torch

from lightning_gpu_tools.errors import NvmlUnavailableError
from lightning_gpu_tools.gpus import limits
from lightning_gpu_tools.gpus.metrics import GpuWindow
from lightning_gpu_tools.gpus.readings import GpuReading, weighted_mean
from lightning_gpu_tools.gpus.watch import GpuWatch
from lightning_gpu_tools.runs.run import Run
from lightning_gpu_tools.selection.cuda import shown_uuid


def gpu_readings(devices: Iterable[torch.device]) -> tuple[GpuReading, ...]:
    """Return UUID, name, and torch's index in this process, of each GPU or MIG instance."""
    found = []
    for device in devices:
        properties = torch.cuda.get_device_properties(device)
        uuid = f"GPU-{properties.uuid}"
        if " MIG " in properties.name:  # as CUDA names an instance: "NVIDIA A100-SXM4-40GB MIG 1g.5gb"
            uuid = _instance_uuid(str(properties.uuid))
        found.append(GpuReading(index=device.index or 0, uuid=uuid, name=properties.name))
    return tuple(found)


@functools.cache  # a process sees the same instance until it exits
def _instance_uuid(cuda_uuid: str) -> str:
    return shown_uuid(read_driver(), os.environ.get("CUDA_VISIBLE_DEVICES"), cuda_uuid)


def read_driver() -> tuple[GpuReading, ...]:
    """Return what the driver reports of each GPU of this machine now; nothing if it cannot be used."""
    from lightning_gpu_tools.gpus import nvml  # imports pynvml

    with contextlib.suppress(NvmlUnavailableError):
        return nvml.read_gpus(limit_s=limits.LIMIT_S)
    return ()


def open_gpus(
    run: Run,
    job_pids: Callable[[], frozenset[int] | None],
    *,
    devices: Literal["trainer", "all"],
    interval_s: float,
) -> tuple[GpuWatch | None, str | None]:
    """Start to sample the GPUs of this node, and return the sampler and a note on GPUs that are not measured."""
    gpus = trained_on = gpu_readings(run.gpus)
    note = None
    try:
        if devices == "all":
            from lightning_gpu_tools.gpus import nvml  # imports pynvml

            readings = nvml.read_gpus(limit_s=limits.LIMIT_S)
            gpus = tuple(gpu for gpu in readings if not gpu.error)
            broken = [f"GPU {gpu.index} is not measured: {gpu.error}." for gpu in readings if gpu.error]
            note = " ".join(broken) or (None if readings else "No GPU: the driver lists none.")
        if not gpus and not trained_on:
            return None, note
        node = run.place.node
        return GpuWatch(gpus, job_pids, trained_on=trained_on, interval_s=interval_s, node=node), note
    except NvmlUnavailableError as error:
        return None, f"No GPU was measured. {error}"


def mean_utilization(windows: Sequence[GpuWindow]) -> float | None:
    """Return the mean utilization in percent, weighted by the observed times; ``None`` if nothing was observed."""
    observed = [window for window in windows if window.utilization_percent_mean is not None]
    percents = [window.utilization_percent_mean or 0.0 for window in observed]
    return weighted_mean(percents, [window.utilization_observed_s for window in observed])
