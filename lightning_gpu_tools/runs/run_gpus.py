"""The GPUs of a run: names and UUIDs, what the driver reports of them, and the sampler of this node's."""

import contextlib
import functools
import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Literal

import torch

from lightning_gpu_tools.errors import NvmlUnavailableError
from lightning_gpu_tools.gpus import limits
from lightning_gpu_tools.gpus.readings import GpuReading
from lightning_gpu_tools.gpus.watch import GpuWatch
from lightning_gpu_tools.memory.readings import OutOfMemory, largest_first
from lightning_gpu_tools.processes import INIT, process_stat
from lightning_gpu_tools.runs.ranks import Ranks
from lightning_gpu_tools.runs.run import Run
from lightning_gpu_tools.selection.cuda import shown_uuid, whole_or_instances


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


def with_gpus(found: OutOfMemory, run: Run, ranks: Ranks | None, watch: GpuWatch | None) -> OutOfMemory:
    """Return an error with what the driver reports of the GPUs now. ``ranks`` is ``None`` before training."""
    assert run.gpu is not None
    (own,) = gpu_readings([run.gpu])
    gpus = whole_or_instances(read_driver())
    found = replace(found, uuid=own.uuid, gpus=gpus)
    gpu = next((gpu for gpu in gpus if gpu.uuid is not None and gpu.uuid == own.uuid), None)
    if gpu is None:
        return found
    from lightning_gpu_tools.gpus import nvml  # imports pynvml

    listed = gpu.processes or ()
    foreign = {one.pid for one in listed if one.is_foreign}
    found = replace(
        found,
        total_bytes=found.total_bytes or gpu.memory_total_bytes,
        free_bytes=gpu.memory_free_bytes if found.free_bytes is None else found.free_bytes,
        others=tuple(one._replace(is_foreign=one.pid in foreign) for one in found.others),
    )
    job_pids = None if ranks is None else ranks.pids_on_node()
    if ranks is None or job_pids is None or not listed or not nvml.pids_are_ours() or foreign:
        return found
    own_bytes = sum(one.memory_used_bytes or 0 for one in listed if one.pid == os.getpid())
    others = largest_first(one for one in listed if one.pid != os.getpid())
    found = replace(
        found, own_bytes=found.own_bytes or own_bytes or None, others=others, strays=ranks.ranks_elsewhere(own.uuid)
    )
    if watch is None:
        return found
    windows = watch.trained_on()
    busy = {one.pid for window in windows for one in window.processes or () if one.utilization_percent}
    stats = {one.pid: process_stat(one.pid) for one in listed if one.pid not in job_pids | busy}
    orphans = tuple(pid for pid, stat in stats.items() if stat is not None and stat.parent == INIT)
    return replace(found, orphans=orphans)


def open_gpus(
    run: Run, job_pids: Callable[[], frozenset[int] | None], *, devices: Literal["trainer", "all"], interval_s: float
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
