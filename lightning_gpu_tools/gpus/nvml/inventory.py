"""One reading of every GPU of this machine."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from dataclasses import replace
from typing import Any

import pynvml

from lightning_gpu_tools.errors import NvmlUnavailableError
from lightning_gpu_tools.gpus.nvml.calls import (
    ask,
    process_utilization,
    product_name,
    tolerate,
    utilization_samples,
    why_unreadable,
)
from lightning_gpu_tools.gpus.nvml.session import session, why_unavailable
from lightning_gpu_tools.gpus.readings import ComputeMode, GpuProcess, GpuReading
from lightning_gpu_tools.gpus.utilization import mean_percent
from lightning_gpu_tools.units import printable, user_name

_COMPUTE_MODES: dict[int, ComputeMode] = {
    pynvml.NVML_COMPUTEMODE_DEFAULT: "default",
    pynvml.NVML_COMPUTEMODE_PROHIBITED: "prohibited",
    pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS: "exclusive_process",
}

# The driver keeps samples of about 20 s, but on some products (GB10) adds none while the GPU is idle:
# https://github.com/polarsignals/gpu-metrics-agent/pull/37
_STALE_AFTER_S = 30.0

# GPUs without memory of their own: "NVIDIA GB10", "NVIDIA Thor", "Orin (nvgpu)". See
# https://github.com/XuehaiPan/nvitop/pull/208, https://github.com/AlexsJones/llmfit/pull/792
_INTEGRATED_NAME = re.compile(r"\b(GB10|Thor)\b|\(nvgpu\)")


def read_gpus(*, with_loads: bool = False) -> tuple[GpuReading, ...]:
    """Read every GPU of this machine, in PCI order; with loads also how busy each process keeps it.

    A GPU that cannot be read is listed with the reason in ``error``; ``NvmlUnavailableError`` without a usable driver.
    """
    with session():
        try:
            count = pynvml.nvmlDeviceGetCount()
        except pynvml.NVMLError as error:
            raise NvmlUnavailableError(why_unavailable(error)) from error
        found = [_read_gpu(nvml_index, with_loads) for nvml_index in range(count)]
    # NVML promises no order. A GPU without an address keeps its place.
    in_pci_order = iter(sorted((gpu for gpu in found if gpu.pci_bus_id), key=lambda gpu: str(gpu.pci_bus_id)))
    ordered = [next(in_pci_order) if gpu.pci_bus_id else gpu for gpu in found]
    return tuple(
        replace(gpu, index=index, mig_instances=tuple(replace(one, index=index) for one in gpu.mig_instances))
        for index, gpu in enumerate(ordered)
    )


def _read_gpu(nvml_index: int, with_loads: bool) -> GpuReading:
    facts: dict[str, Any] = {"index": nvml_index}
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(nvml_index)
        facts |= _identity(handle)
        pci = pynvml.nvmlDeviceGetPciInfo(handle)
        facts["pci_bus_id"] = f"{pci.domain:08X}:{pci.bus:02X}:{pci.device:02X}.0"
        integrated = _INTEGRATED_NAME.search(facts["name"] or "") is not None
        mig_mode = ask(pynvml.nvmlDeviceGetMigMode, handle)
        facts |= {
            **_usage(handle, integrated),
            "integrated": integrated,
            "utilization_percent": _utilization_percent(handle),
            "compute_mode": _COMPUTE_MODES.get(ask(pynvml.nvmlDeviceGetComputeMode, handle)),
            "mig_mode": None if mig_mode is None else mig_mode[0] == pynvml.NVML_DEVICE_MIG_ENABLE,
        }
    except pynvml.NVMLError as error:
        return GpuReading(**facts, error=why_unreadable(error))
    reading = GpuReading(**facts)
    if with_loads and reading.processes:
        reading = replace(reading, processes=_with_loads(handle, reading.processes))
    if reading.mig_mode:
        reading = replace(reading, mig_instances=_read_mig_instances(handle, reading))
    return reading


def _read_mig_instances(gpu_handle: Any, gpu: GpuReading) -> tuple[GpuReading, ...]:
    instances = []
    shared = {"index": gpu.index, "pci_bus_id": gpu.pci_bus_id, "compute_mode": gpu.compute_mode}
    for slot in range(ask(pynvml.nvmlDeviceGetMaxMigDeviceCount, gpu_handle) or 0):
        facts: dict[str, Any] = {**shared, "mig_mode": False, "mig_index": slot, "integrated": False}
        try:
            handle = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu_handle, slot)
            facts |= _identity(handle)
            facts |= _usage(handle, integrated=False)
        except pynvml.NVMLError_NotFound:
            continue  # slots may be empty in between
        except pynvml.NVMLError as error:
            facts["error"] = why_unreadable(error)
        instances.append(GpuReading(**facts))
    return tuple(instances)


def _identity(handle: Any) -> dict[str, Any]:
    return {"uuid": pynvml.nvmlDeviceGetUUID(handle), "name": product_name(handle)}


def _usage(handle: Any, integrated: bool) -> dict[str, Any]:
    total_bytes, free_bytes = _memory(handle, integrated)
    return {"memory_total_bytes": total_bytes, "memory_free_bytes": free_bytes, "processes": _processes(handle)}


def _memory(handle: Any, integrated: bool) -> tuple[int | None, int | None]:
    """Return the total and the free bytes."""
    if integrated:
        # NVML leaves out what the page cache would give back.
        import psutil

        host = psutil.virtual_memory()
        return host.total, host.available
    # The newer call means the same, and fails on WSL: https://github.com/XuehaiPan/nvitop/pull/30
    memory = ask(pynvml.nvmlDeviceGetMemoryInfo, handle)
    return (None, None) if memory is None else (memory.total, memory.free)


def _utilization_percent(handle: Any) -> float | None:
    oldest_s = time.time() - _STALE_AFTER_S
    buffered, _ = ask(utilization_samples, handle, 0) or ([], 0)
    samples = [sample for sample in buffered if sample.time_s >= oldest_s]
    if samples:
        return mean_percent(samples)
    rates = ask(pynvml.nvmlDeviceGetUtilizationRates, handle)
    return None if rates is None else float(rates.gpu)


def _processes(handle: Any) -> tuple[GpuProcess, ...] | None:
    """Return the processes with a compute or a graphics context, by pid."""
    compute = ask(pynvml.nvmlDeviceGetComputeRunningProcesses_v3, handle)
    if compute is None:
        return None
    graphics = ask(pynvml.nvmlDeviceGetGraphicsRunningProcesses_v3, handle) or []
    by_pid = {process.pid: process for process in [*graphics, *compute]}
    compute_pids = {process.pid for process in compute}
    found = [
        GpuProcess(pid=pid, memory_used_bytes=process.usedGpuMemory, graphics_only=pid not in compute_pids)
        for pid, process in sorted(by_pid.items())
    ]
    return tuple(map(identified, found))


def _with_loads(handle: Any, processes: tuple[GpuProcess, ...]) -> tuple[GpuProcess, ...]:
    answer = tolerate(process_utilization, handle, 0)
    if answer is None:
        return processes
    return tuple(replace(one, utilization_percent=answer[0].get(one.pid, 0.0)) for one in processes)


def identified(process: GpuProcess) -> GpuProcess:
    """Return the process with its user and name, where they can be seen from here."""
    if pids_are_ours():  # without psutil, whose import takes as long as half a pick
        with contextlib.suppress(OSError):  # it has ended, is hidden from this user, or this is no Linux
            with open(f"/proc/{process.pid}/comm", errors="surrogateescape") as file:
                name = printable(file.read().rstrip("\n"))
            user = user_name(os.stat(f"/proc/{process.pid}").st_uid)
            return replace(process, user=user, name=name)
    return process


def pids_are_ours() -> bool:
    """Return whether this process shares the host's PID namespace, whose numbers the driver gives."""
    try:  # https://github.com/NVIDIA/nvidia-docker/issues/1483; PROC_PID_INIT_INO in include/linux/proc_ns.h
        return os.readlink("/proc/self/ns/pid") == f"pid:[{0xEFFFFFFC}]"
    except OSError:  # no Linux, so no PID namespaces
        return not sys.platform.startswith("linux")
