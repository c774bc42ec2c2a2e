"""The one place that asks the NVIDIA driver, through NVML (``nvidia-ml-py``).

Everything that NVML gives becomes a plain reading here: bytes, percent, seconds, watts; ``None`` where the driver does
not report it. GPUs are found by UUID, never by an index that ``CUDA_VISIBLE_DEVICES`` could have shifted: NVML always
sees every GPU of the machine.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import psutil
import pynvml

from lightning_gpu_tools.errors import NvmlUnavailableError
from lightning_gpu_tools.readings import ComputeMode, GpuLink, GpuProcess, GpuReading, UtilizationSample
from lightning_gpu_tools.utilization import mean_percent

# NVML's way to say "this hardware, this driver or this user never gets to know": the answer is None, not an error.
_NEVER = (pynvml.NVMLError_NotSupported, pynvml.NVMLError_FunctionNotFound, pynvml.NVMLError_NoPermission)

# nvmlComputeMode_t, in its order
_COMPUTE_MODES: tuple[ComputeMode, ...] = ("default", "exclusive_thread", "prohibited", "exclusive_process")

# The driver keeps the samples of the last seconds (about 20 s). On some products (GB10) it adds none while the GPU is
# idle, so that what it has may be minutes old: https://github.com/polarsignals/gpu-metrics-agent/pull/37
_STALE_AFTER_S = 30.0

# Products whose GPU has no memory of its own. The driver's names: "NVIDIA GB10" (DGX Spark), "NVIDIA Thor",
# "Orin (nvgpu)": https://github.com/XuehaiPan/nvitop/pull/208, https://github.com/AlexsJones/llmfit/pull/792
_INTEGRATED_NAMES = ("GB10", "Thor", "(nvgpu)")


@dataclass(frozen=True, slots=True)
class _Identity:
    """What does not change about a GPU while the driver is open."""

    handle: Any
    uuid: str
    name: str | None
    pci: tuple[int, int, int]
    pci_bus_id: str


class _Session(threading.local):
    """The session that this thread is in: GPUs already looked up, by NVML index, and the process they are valid in."""

    pid = 0
    identities: dict[int, _Identity]


_session = _Session()


@contextlib.contextmanager
def session() -> Iterator[None]:
    """Keep the driver open. Sessions nest and are cheap inside one another.

    Every function of this module opens one for itself. Open one around repeated reads: without persistence mode the
    first one has to wake the GPUs up, and what never changes (UUID, name, PCI address) is then asked only once.

    Raises:
        NvmlUnavailableError: There is no usable NVIDIA driver; the message says why and what to do.
    """
    pid = os.getpid()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise NvmlUnavailableError(_why_unavailable(error)) from error
    outer = _session.pid, getattr(_session, "identities", {})
    if outer[0] != pid:  # the outermost one, or in a forked child: handles of the parent are not valid here
        _session.pid, _session.identities = pid, {}
    try:
        yield
    finally:
        _session.pid, _session.identities = outer
        if os.getpid() == pid:  # a child that was forked inside has nothing to close
            with contextlib.suppress(pynvml.NVMLError):  # the driver went away by itself
                pynvml.nvmlShutdown()


def read_gpus() -> tuple[GpuReading, ...]:
    """Read every GPU of this machine, in PCI order, whatever ``CUDA_VISIBLE_DEVICES`` says.

    For a GPU without MIG that is 4 calls of NVML the first time in a session (handle, UUID, name, PCI address) and 6
    each time: memory, utilization samples, compute and graphics processes, compute mode, MIG mode. ``numa_node`` is
    left to ``read_numa_nodes``.

    A GPU that cannot be read is listed with the reason in ``error``, and the others are not affected.

    Raises:
        NvmlUnavailableError: There is no usable NVIDIA driver.
    """
    with session():
        try:
            count = pynvml.nvmlDeviceGetCount()
        except pynvml.NVMLError as error:
            raise NvmlUnavailableError(_why_unavailable(error)) from error
        found = [_read_gpu(nvml_index) for nvml_index in range(count)]
    # NVML promises no order. A GPU that does not even tell its address keeps the place that NVML gave it.
    in_pci_order = iter(sorted((gpu for gpu in found if gpu[0]), key=lambda gpu: gpu[0] or ()))
    ordered = [next(in_pci_order) if gpu[0] else gpu for gpu in found]
    return tuple(
        replace(
            reading,
            index=index,
            mig_instances=tuple(replace(instance, index=index) for instance in reading.mig_instances),
        )
        for index, (_, reading) in enumerate(ordered)
    )


def _read_gpu(nvml_index: int) -> tuple[tuple[int, int, int] | None, GpuReading]:
    """Return the PCI address, ``None`` if not even that can be read, and the reading."""
    try:
        gpu = _identify(nvml_index)
    except pynvml.NVMLError as error:
        return None, GpuReading(index=nvml_index, error=_why_unreadable(error))
    reading = GpuReading(index=nvml_index, uuid=gpu.uuid, name=gpu.name, pci_bus_id=gpu.pci_bus_id)
    try:
        integrated, total_bytes, free_bytes = _memory(gpu.handle, gpu.name)
        mig_mode = _ask(pynvml.nvmlDeviceGetMigMode, gpu.handle)
        compute_mode = _ask(pynvml.nvmlDeviceGetComputeMode, gpu.handle)
        reading = replace(
            reading,
            integrated=integrated,
            memory_total_bytes=total_bytes,
            memory_free_bytes=free_bytes,
            utilization_percent=_utilization_percent(gpu.handle),
            processes=_processes(gpu.handle),
            compute_mode=None if compute_mode is None else _COMPUTE_MODES[compute_mode],
            mig_mode=None if mig_mode is None else mig_mode[0] == pynvml.NVML_DEVICE_MIG_ENABLE,
        )
    except pynvml.NVMLError as error:
        return gpu.pci, replace(reading, error=_why_unreadable(error))
    if reading.mig_mode:
        reading = replace(reading, mig_instances=_read_mig_instances(gpu.handle, reading))
    return gpu.pci, reading


def _identify(nvml_index: int) -> _Identity:
    known = _session.identities.get(nvml_index)
    if known is None:
        handle = pynvml.nvmlDeviceGetHandleByIndex(nvml_index)
        pci = pynvml.nvmlDeviceGetPciInfo(handle)
        known = _session.identities[nvml_index] = _Identity(
            handle=handle,
            uuid=pynvml.nvmlDeviceGetUUID(handle),
            name=_ask(pynvml.nvmlDeviceGetName, handle),
            pci=(pci.domain, pci.bus, pci.device),
            pci_bus_id=f"{pci.domain:08X}:{pci.bus:02X}:{pci.device:02X}.0",  # as nvidia-smi writes it
        )
    return known


def _read_mig_instances(gpu_handle: Any, gpu: GpuReading) -> tuple[GpuReading, ...]:
    instances = []
    for slot in range(_ask(pynvml.nvmlDeviceGetMaxMigDeviceCount, gpu_handle) or 0):
        reading = GpuReading(
            index=gpu.index, pci_bus_id=gpu.pci_bus_id, compute_mode=gpu.compute_mode, mig_mode=False, integrated=False
        )
        try:
            handle = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu_handle, slot)
            reading = replace(
                reading, uuid=pynvml.nvmlDeviceGetUUID(handle), name=_ask(pynvml.nvmlDeviceGetName, handle)
            )
            _, total_bytes, free_bytes = _memory(handle, reading.name)
            reading = replace(
                reading,
                mig_gpu_instance_id=_ask(pynvml.nvmlDeviceGetGpuInstanceId, handle),
                mig_compute_instance_id=_ask(pynvml.nvmlDeviceGetComputeInstanceId, handle),
                memory_total_bytes=total_bytes,
                memory_free_bytes=free_bytes,
                processes=_processes(handle),
            )
        except pynvml.NVMLError_NotFound:
            continue  # slots may be empty in between
        except pynvml.NVMLError as error:
            reading = replace(reading, error=_why_unreadable(error))
        instances.append(reading)
    return tuple(instances)


def _ask(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call NVML; ``None`` for what this hardware, driver or user never gets to know."""
    try:
        return function(*arguments)
    except _NEVER:
        return None


def _memory(handle: Any, name: str | None) -> tuple[bool | None, int | None, int | None]:
    """Return whether the GPU is integrated, and its total and free bytes."""
    # The older call is enough: total and free mean the same in both. The newer one fails on WSL, see
    # https://github.com/XuehaiPan/nvitop/pull/30.
    memory = _ask(pynvml.nvmlDeviceGetMemoryInfo, handle)
    integrated = name is not None and any(product in name for product in _INTEGRATED_NAMES)
    if not integrated and memory is not None:
        return False, memory.total, memory.free
    if not integrated and _ask(pynvml.nvmlDeviceGetAddressingMode, handle) != pynvml.NVML_DEVICE_ADDRESSING_MODE_ATS:
        return None, None, None
    # Memory is not supported, and it addresses that of the host: what the host has available is what it can get. On
    # the named products NVML's answer, where there is one, leaves out what the page cache would give back.
    host = psutil.virtual_memory()
    return True, host.total, host.available


def _utilization_percent(handle: Any) -> float | None:
    oldest_s = time.time() - _STALE_AFTER_S
    samples = [sample for sample in _utilization_samples(handle, 0)[0] if sample.time_s >= oldest_s]
    if samples:
        return mean_percent(samples)
    rates = _ask(pynvml.nvmlDeviceGetUtilizationRates, handle)
    return None if rates is None else float(rates.gpu)


def _utilization_samples(handle: Any, last_us: int) -> tuple[list[UtilizationSample], int]:
    """Return the driver's samples after ``last_us``, oldest first, and the driver's time of the newest one."""
    try:
        answer = _ask(pynvml.nvmlDeviceGetSamples, handle, pynvml.NVML_GPU_UTILIZATION_SAMPLES, last_us)
    except pynvml.NVMLError_NotFound:  # nothing newer
        return [], last_us
    if answer is None:
        return [], last_us
    # The order is not documented, and values far above 100 have been seen: https://github.com/Syllo/nvtop/issues/110
    pairs = sorted(
        (sample.timeStamp, sample.sampleValue.uiVal)
        for sample in answer[1]
        if sample.timeStamp > last_us and sample.sampleValue.uiVal <= 100
    )
    samples = [UtilizationSample(time_s=stamp_us / 1e6, percent=float(percent)) for stamp_us, percent in pairs]
    return samples, pairs[-1][0] if pairs else last_us


def _processes(handle: Any) -> tuple[GpuProcess, ...] | None:
    """Return the processes with a compute or a graphics context, by pid."""
    compute = _ask_newest("nvmlDeviceGetComputeRunningProcesses", handle)
    if compute is None:
        return None
    graphics = _ask_newest("nvmlDeviceGetGraphicsRunningProcesses", handle) or []
    # A process may have both kinds of context.
    by_pid = {process.pid: process for process in [*graphics, *compute]}
    compute_pids = {process.pid for process in compute}
    return tuple(
        _describe(pid, by_pid[pid].usedGpuMemory, graphics_only=pid not in compute_pids) for pid in sorted(by_pid)
    )


def _ask_newest(function: str, handle: Any) -> Any:
    """Call the newest version of a function that the driver has; drivers before R510 have no ``_v3`` of these."""
    try:
        return getattr(pynvml, f"{function}_v3")(handle)
    except pynvml.NVMLError_FunctionNotFound:
        return _ask(getattr(pynvml, f"{function}_v2"), handle)
    except _NEVER:
        return None


def _describe(pid: int, memory_used_bytes: int | None, graphics_only: bool) -> GpuProcess:
    user = name = None
    if _pids_are_ours():
        with contextlib.suppress(psutil.Error):  # ended in the meantime, or hidden from this user
            process = psutil.Process(pid)
            user, name = process.username(), process.name()
    return GpuProcess(pid=pid, memory_used_bytes=memory_used_bytes, user=user, name=name, graphics_only=graphics_only)


def _pids_are_ours() -> bool:
    """Tell whether the driver's process numbers are this process's: it gives those of the host, also in a container.

    https://github.com/NVIDIA/nvidia-docker/issues/1483. Inside another PID namespace the same number is someone else.
    """
    try:
        # PROC_PID_INIT_INO of the Linux kernel (include/linux/proc_ns.h), the namespace of the host
        return os.readlink("/proc/self/ns/pid") == f"pid:[{0xEFFFFFFC}]"
    except OSError:  # no Linux, so no PID namespaces
        return not sys.platform.startswith("linux")


def read_links(uuids: Sequence[str]) -> tuple[GpuLink, ...]:
    """Return how each pair of these GPUs is joined. A GPU that cannot be read has links of which nothing is known.

    Raises:
        NvmlUnavailableError: There is no usable NVIDIA driver.
    """
    with session():
        handles = {uuid: _handle(uuid) for uuid in sorted(set(uuids))}
        return tuple(
            GpuLink(
                uuids=(a, b),
                nvlink=_nvlink(handles[a], handles[b]),
                topology_level=_tolerate(pynvml.nvmlDeviceGetTopologyCommonAncestor, handles[a], handles[b]),
            )
            for a in handles
            for b in handles
            if a < b
        )


def _nvlink(a: Any, b: Any) -> bool | None:
    # Asking for the status of peer access finds NVSwitch as well as bridges, where the far end of a link is no GPU.
    status = _tolerate(pynvml.nvmlDeviceGetP2PStatus, a, b, pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
    return None if status is None else status == pynvml.NVML_P2P_STATUS_OK


def read_numa_nodes(uuids: Sequence[str]) -> dict[str, int | None]:
    """Return the NUMA node of the host that each GPU hangs on; ``None`` where unknown (always outside Linux).

    Raises:
        NvmlUnavailableError: There is no usable NVIDIA driver.
    """
    with session():
        # Not nvmlDeviceGetNumaNodeId: that is the node which the GPU's own memory forms on Grace Hopper.
        nodes = {
            uuid: _members(_tolerate(pynvml.nvmlDeviceGetMemoryAffinity, _handle(uuid), 16, _SCOPE_NODE))
            for uuid in uuids
        }
    return {uuid: next(iter(found)) if len(found) == 1 else None for uuid, found in nodes.items()}


def read_cpu_affinity(uuid: str) -> frozenset[int] | None:
    """Return the CPUs that are near a GPU, ``None`` where unknown (always outside Linux).

    They are CPUs of the machine; intersect them with those that this process may use.

    Raises:
        NvmlUnavailableError: There is no usable NVIDIA driver.
    """
    with session():
        # 64 words: Linux kernels are built for at most 8192 CPUs, and no machine with NVIDIA GPUs has over 4096.
        cpus = _members(_tolerate(pynvml.nvmlDeviceGetCpuAffinityWithinScope, _handle(uuid), 64, _SCOPE_NODE))
    return cpus or None


_SCOPE_NODE = pynvml.NVML_AFFINITY_SCOPE_NODE


def _members(mask: Sequence[int] | None) -> frozenset[int]:
    """Return the numbers of the bits that are set in a bit mask of 64-bit words."""
    return frozenset(64 * word + bit for word, bits in enumerate(mask or ()) for bit in range(64) if bits >> bit & 1)


def _handle(uuid: str) -> Any:
    return _tolerate(pynvml.nvmlDeviceGetHandleByUUID, uuid)


def _tolerate(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call NVML for what may just as well be unknown: ``None`` on every failure, and if an argument is ``None``."""
    if None in arguments:
        return None
    try:
        return function(*arguments)
    except pynvml.NVMLError:
        return None


def _why_unreadable(error: pynvml.NVMLError) -> str:
    """Say why one GPU cannot be read, and what to do."""
    if isinstance(error, pynvml.NVMLError_GpuIsLost):
        return "it has fallen off the bus (GPU is lost): see `dmesg` for its Xid error, then reset the GPU or reboot"
    if isinstance(error, pynvml.NVMLError_ResetRequired):
        return "it needs a reset: run `nvidia-smi --gpu-reset` as root, or reboot"
    if isinstance(error, pynvml.NVMLError_NoPermission):
        return "no permission to read it: is /dev/nvidia* accessible, and was this GPU given to this container or job?"
    if isinstance(error, pynvml.NVMLError_Timeout):
        return "the driver did not answer in time: try again; if it stays so, see `dmesg` and reset the GPU"
    return f"the driver answered {str(error)!r}: see `nvidia-smi` and `dmesg`"


def _why_unavailable(error: pynvml.NVMLError) -> str:
    """Say why no GPU at all can be asked about, and what to do."""
    if isinstance(error, pynvml.NVMLError_LibraryNotFound):
        if sys.platform == "darwin":
            return "There is no NVIDIA driver for macOS, so there are no GPUs that this package can read."
        if sys.platform == "win32":
            return "nvml.dll, a part of the NVIDIA driver, was not found. Is the driver installed?"
        return (
            "libnvidia-ml.so.1, a part of the NVIDIA driver, was not found. Is the driver installed, and does "
            "`nvidia-smi` work? A container must be started with `--gpus all` and NVIDIA_DRIVER_CAPABILITIES that "
            "include `utility`."
        )
    if isinstance(error, pynvml.NVMLError_DriverNotLoaded):
        return (
            "The NVIDIA driver is installed but not loaded. Is there an NVIDIA GPU in this machine? Try "
            "`sudo modprobe nvidia`, and see `dmesg` for why it was not loaded."
        )
    if isinstance(error, pynvml.NVMLError_LibRmVersionMismatch):
        return (
            "The loaded NVIDIA driver and its library libnvidia-ml have different versions: the driver was updated "
            "since the last start. Reboot, or restart the container after an update of the host."
        )
    if isinstance(error, pynvml.NVMLError_NoPermission):
        return (
            "No permission to talk to the NVIDIA driver. May this user open /dev/nvidiactl and /dev/nvidia0, and were "
            "the devices given to this container?"
        )
    if isinstance(error, pynvml.NVMLError_FunctionNotFound):
        return "The NVIDIA driver is too old: it lacks a function that nvidia-ml-py needs. Update the driver."
    return f"The NVIDIA driver cannot be used: NVML says {str(error)!r}. Does `nvidia-smi` work?"
