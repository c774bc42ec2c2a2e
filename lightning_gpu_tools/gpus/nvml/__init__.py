"""All access to the NVIDIA driver, through NVML (``nvidia-ml-py``); ``None`` = not reported.

Here are sessions, single calls, readings of all GPUs, and the connections between GPUs. NVML sees every GPU of the
machine, regardless of ``CUDA_VISIBLE_DEVICES``, so GPUs are identified by UUID. Picking GPUs does not need
``nvml.probe``.
"""

import contextlib
import functools
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import pynvml

from lightning_gpu_tools.errors import NvmlUnavailableError
from lightning_gpu_tools.gpus import limits
from lightning_gpu_tools.gpus.readings import (
    ComputeMode,
    GpuProcess,
    GpuReading,
    UtilizationSample,
    weighted_mean,
    weights_s,
)
from lightning_gpu_tools.processes import pid_namespace, process_stat
from lightning_gpu_tools.units import printable, user_name

_T = TypeVar("_T")

if not hasattr(pynvml, "nvmlGpmMigSampleGet"):  # the newest function that is used here
    raise NvmlUnavailableError(
        f"nvidia-ml-py is too old, or the old package pynvml hides it, whose module has its name ({pynvml.__file__}). "
        "Run `pip uninstall pynvml && pip install --force-reinstall nvidia-ml-py`."
    )

# Permanent errors of this hardware, driver, or user.
REFUSED = (pynvml.NVMLError_NotSupported, pynvml.NVMLError_FunctionNotFound, pynvml.NVMLError_NoPermission)

# After one of these errors, nothing about the GPU can be read.
GPU_LOST = (pynvml.NVMLError_GpuIsLost, pynvml.NVMLError_ResetRequired, pynvml.NVMLError_Uninitialized)


def ask(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call NVML; return ``None`` if it raises one of ``REFUSED``."""
    try:
        return function(*arguments)
    except REFUSED:
        return None


def call_or_none(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call NVML; return ``None`` on any NVML error, or if an argument is ``None``."""
    if None in arguments:
        return None
    try:
        return function(*arguments)
    except pynvml.NVMLError:
        return None


def utilization_samples(handle: Any, last_us: int) -> tuple[list[UtilizationSample], int]:
    """Return the driver's samples after ``last_us``, oldest first, and the driver's timestamp of the newest one."""
    try:
        _, answer = pynvml.nvmlDeviceGetSamples(handle, pynvml.NVML_GPU_UTILIZATION_SAMPLES, last_us)
    except pynvml.NVMLError_NotFound:  # nothing newer
        return [], last_us
    # The order is not documented, and some values are far above 100: https://github.com/Syllo/nvtop/issues/110
    pairs = sorted(
        (stamp_us, percent)
        for sample in answer
        if (stamp_us := sample.timeStamp) > last_us and (percent := sample.sampleValue.uiVal) <= 100
    )
    samples = [UtilizationSample(time_s=stamp_us / 1e6, percent=float(percent)) for stamp_us, percent in pairs]
    return samples, pairs[-1][0] if pairs else last_us


def process_utilization(handle: Any, last_us: int) -> tuple[dict[int, float], int]:
    """Return the GPU utilization of each process since ``last_us`` in percent, and the driver's newest timestamp."""
    try:
        samples = pynvml.nvmlDeviceGetProcessUtilization(handle, last_us)
    except pynvml.NVMLError_NotFound:  # nobody used it
        return {}, last_us
    # One sample per process, with the same invalid values.
    percents = {
        sample.pid: float(sample.smUtil) for sample in samples if sample.timeStamp > last_us and sample.smUtil <= 100
    }
    return percents, max((sample.timeStamp for sample in samples), default=last_us)


_WHY_UNREADABLE = {
    pynvml.NVML_ERROR_GPU_IS_LOST: "it has fallen off the bus (GPU is lost): check `dmesg` for its Xid error, then "
    "reset the GPU or reboot",
    pynvml.NVML_ERROR_RESET_REQUIRED: "it needs a reset: run `nvidia-smi --gpu-reset` as root, or reboot",
    pynvml.NVML_ERROR_NO_PERMISSION: "no permission to read it: check access to /dev/nvidia*, and the GPUs of this "
    "container or job",
}
_WHY_UNAVAILABLE = {
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: "libnvidia-ml.so.1, a part of the NVIDIA driver, was not found. Is the driver "
    "installed, and does `nvidia-smi` work? Containers need `--gpus all` and `utility` in NVIDIA_DRIVER_CAPABILITIES.",
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: "The NVIDIA driver is installed but not loaded. Is there an NVIDIA GPU in "
    "this machine? Try `sudo modprobe nvidia`, and check `dmesg`.",
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "The loaded NVIDIA driver and its library libnvidia-ml have different "
    "versions, because the driver was updated. Reboot, or restart the container.",
    pynvml.NVML_ERROR_NO_PERMISSION: "No permission to use the NVIDIA driver. Check that this user can open "
    "/dev/nvidiactl and /dev/nvidia0, and that this container has them.",
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND: "The NVIDIA driver is too old: it lacks a function that nvidia-ml-py needs. "
    "Update the driver.",
}


def why_unreadable(error: Exception) -> str:
    """Explain why one GPU cannot be read, and what to do."""
    if not isinstance(error, pynvml.NVMLError):
        return f"an answer of the driver cannot be used ({printable(repr(error))}): update the driver"
    return _WHY_UNREADABLE.get(error.value, f"the driver answered {str(error)!r}: check `nvidia-smi` and `dmesg`")


@contextlib.contextmanager
def session(limit_s: float = limits.OPENING_LIMIT_S) -> Iterator[None]:
    """Keep the driver open; raise ``NvmlUnavailableError`` if that fails or takes longer than ``limit_s``.

    Every function of this package opens its own session. Open one around repeated reads, because that may wake up GPUs.
    """
    _required(pynvml.nvmlInit, limit_s)
    pid = os.getpid()
    try:
        yield
    finally:
        # A child forked in between has nothing to close, closing may wait for a hanging call, and Python starts no
        # threads while it finalizes.
        if os.getpid() == pid and not limits.hangs() and not sys.is_finalizing():
            with contextlib.suppress(pynvml.NVMLError):  # the driver was unloaded
                limits.answers({"nvmlShutdown": pynvml.nvmlShutdown}, limits.LIMIT_S)


def _required(function: Callable[[], _T], limit_s: float) -> _T:
    """Call NVML; raise ``NvmlUnavailableError`` on any NVML error, or after ``limit_s``."""
    name = function.__name__
    try:
        found = limits.answers({name: function}, limit_s)
    except pynvml.NVMLError as error:
        otherwise = f"The NVIDIA driver cannot be used: NVML says {str(error)!r}. Does `nvidia-smi` work?"
        raise NvmlUnavailableError(_WHY_UNAVAILABLE.get(error.value, otherwise)) from None  # the cause adds nothing
    if name not in found:
        raise NvmlUnavailableError(f"The NVIDIA driver has not answered {name} within {limit_s:.0f} s. Check `dmesg`.")
    return found[name]


_COMPUTE_MODES: dict[int, ComputeMode] = {
    pynvml.NVML_COMPUTEMODE_DEFAULT: "default",
    pynvml.NVML_COMPUTEMODE_PROHIBITED: "prohibited",
    pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS: "exclusive_process",
}

# The driver keeps samples for about 20 s, but on some products (GB10) adds none while the GPU is idle:
# https://github.com/polarsignals/gpu-metrics-agent/pull/37
_STALE_AFTER_S = 30.0

_facts: dict[int, dict[str, Any]] = {}  # by NVML's index: facts from the last read, even if it hangs


def read_gpus(*, with_loads: bool = False, limit_s: float = limits.OPENING_LIMIT_S) -> tuple[GpuReading, ...]:
    """Read every GPU of this machine, in PCI order; ``with_loads`` adds the utilization of each process.

    If a GPU cannot be read or does not answer in time, ``error`` is the reason. Raise ``NvmlUnavailableError`` if the
    driver is not usable, or if opening it takes longer than ``limit_s``.
    """
    with session(limit_s):
        indices = range(_required(pynvml.nvmlDeviceGetCount, limits.LIMIT_S))
        _facts.update({index: {"index": index} for index in indices if not limits.is_late(index)})
        read = {index: functools.partial(_read_gpu, index, _facts[index], with_loads) for index in indices}
        readings = limits.answers(read, limits.LIMIT_S)
    why_late = f"the driver has not answered within {limits.LIMIT_S:.0f} s: check `dmesg`, then reset the GPU or reboot"
    found = [readings[index] if index in readings else GpuReading(**_facts[index], error=why_late) for index in indices]
    # NVML guarantees no order. A GPU without an address keeps its place.
    in_pci_order = iter(sorted((gpu for gpu in found if gpu.pci_bus_id), key=lambda gpu: str(gpu.pci_bus_id)))
    ordered = [next(in_pci_order) if gpu.pci_bus_id else gpu for gpu in found]
    return tuple(
        gpu._replace(index=index, mig_instances=tuple(instance._replace(index=index) for instance in gpu.mig_instances))
        for index, gpu in enumerate(ordered)
    )


def _read_gpu(nvml_index: int, facts: dict[str, Any], with_loads: bool) -> GpuReading:
    """Read a GPU, and record its facts as soon as they are known."""
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(nvml_index)
        facts |= _identity(handle)
        pci = pynvml.nvmlDeviceGetPciInfo(handle)
        facts["pci_bus_id"] = f"{pci.domain:08X}:{pci.bus:02X}:{pci.device:02X}.0"
        capability = call_or_none(pynvml.nvmlDeviceGetCudaComputeCapability, handle)
        facts["compute_capability"] = capability and tuple(capability)
        mig_mode = ask(pynvml.nvmlDeviceGetMigMode, handle)
        facts |= {
            **_usage(handle),
            "utilization_percent": _utilization_percent(handle),
            "compute_mode": _COMPUTE_MODES.get(ask(pynvml.nvmlDeviceGetComputeMode, handle)),
            "mig_mode": None if mig_mode is None else mig_mode[0] == pynvml.NVML_DEVICE_MIG_ENABLE,
        }
    except Exception as error:  # noqa: BLE001 - the other GPUs can still be read
        return GpuReading(**facts, error=why_unreadable(error))
    reading = GpuReading(**facts)
    loads = call_or_none(process_utilization, handle, 0) if with_loads and reading.processes else None
    if loads is not None:
        processes = (
            process._replace(utilization_percent=loads[0].get(process.pid, 0.0)) for process in reading.processes or ()
        )
        reading = reading._replace(processes=tuple(processes))
    if reading.mig_mode is not False:  # a container may see the instances, but not the mode
        instances = _read_mig_instances(handle, reading)
        reading = reading._replace(mig_mode=True if instances else reading.mig_mode, mig_instances=instances)
    return reading


def _read_mig_instances(gpu_handle: Any, gpu: GpuReading) -> tuple[GpuReading, ...]:
    instances = []
    shared = {name: getattr(gpu, name) for name in ("index", "pci_bus_id", "compute_mode", "compute_capability")}
    for slot in range(call_or_none(pynvml.nvmlDeviceGetMaxMigDeviceCount, gpu_handle) or 0):
        facts: dict[str, Any] = {**shared, "mig_mode": False, "mig_index": slot}
        try:
            try:
                handle = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu_handle, slot)
            except (*REFUSED, pynvml.NVMLError_NotFound, pynvml.NVMLError_InvalidArgument):
                continue  # an empty slot, which may be between others, or a slot of another container
            facts |= _identity(handle)
            facts |= _usage(handle)
        except pynvml.NVMLError as error:
            facts["error"] = why_unreadable(error)
        instances.append(GpuReading(**facts))
    return tuple(instances)


def _identity(handle: Any) -> dict[str, Any]:
    uuid, name = pynvml.nvmlDeviceGetUUID(handle), None
    with contextlib.suppress(UnicodeDecodeError):  # the driver does not report the name in UTF-8
        name = ask(pynvml.nvmlDeviceGetName, handle)
    return {"uuid": uuid, "name": None if name is None else printable(name)}


def _usage(handle: Any) -> dict[str, Any]:
    # The newer call returns the same, but fails on WSL: https://github.com/XuehaiPan/nvitop/pull/30
    memory = ask(pynvml.nvmlDeviceGetMemoryInfo, handle)
    return {
        "memory_total_bytes": memory and memory.total,
        "memory_free_bytes": memory and memory.free,
        "processes": _processes(handle),
    }


def _utilization_percent(handle: Any) -> float | None:
    oldest_s = time.time() - _STALE_AFTER_S
    buffered, _ = ask(utilization_samples, handle, 0) or ([], 0)
    samples = [sample for sample in buffered if sample.time_s >= oldest_s]
    if samples:
        return weighted_mean([sample.percent for sample in samples], weights_s(samples))
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
    return identified(found)


def identified(processes: Sequence[GpuProcess]) -> tuple[GpuProcess, ...]:
    """Add the users and names of processes that are visible from here, or that they are of another container."""
    # Kernel threads use no GPU. If the list has the PID of one, its PIDs are not those of this container.
    stats = (process_stat(process.pid) for process in processes)
    if not pids_are_ours() or any(stat is not None and stat.is_kernel_thread for stat in stats):
        return tuple(process._replace(is_foreign=True) for process in processes)
    found = []
    for process in processes:
        # Without psutil, whose import takes as long as half a pick.
        with contextlib.suppress(OSError):  # ended, hidden from this user, or not on Linux
            with open(f"/proc/{process.pid}/comm", errors="surrogateescape") as file:
                name = printable(file.read().rstrip("\n"))
            process = process._replace(user=user_name(os.stat(f"/proc/{process.pid}").st_uid), name=name)
        found.append(process)
    return tuple(found)


def pids_are_ours() -> bool:
    """Return whether this process shares the host's PID namespace, which the driver's PIDs refer to."""
    # https://github.com/NVIDIA/nvidia-docker/issues/1483; PROC_PID_INIT_INO in include/linux/proc_ns.h
    return pid_namespace() == f"pid:[{0xEFFFFFFC}]"


def read_connections(uuids: Sequence[str]) -> tuple[frozenset[tuple[str, str]], dict[str, int | None]]:
    """Return the pairs that NVLink or NVSwitch connects, in alphabetical order, and the host NUMA node of each GPU.

    A node is ``None`` if unknown. If the driver takes too long, nothing is known.
    """

    def read() -> tuple[frozenset[tuple[str, str]], dict[str, int | None]]:
        handles = {uuid: call_or_none(pynvml.nvmlDeviceGetHandleByUUID, uuid) for uuid in sorted(uuids)}
        links = []
        for pair in itertools.combinations(handles, 2):
            ends = (handles[uuid] for uuid in pair)
            # This status includes NVSwitch, where the remote end of a link is not a GPU.
            status = call_or_none(pynvml.nvmlDeviceGetP2PStatus, *ends, pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
            if status == pynvml.NVML_P2P_STATUS_OK:
                links.append(pair)
        return frozenset(links), {uuid: _numa_node(handle) for uuid, handle in handles.items()}

    with session(limits.LIMIT_S):
        found = limits.answers({"connections": read}, limits.LIMIT_S)
    return found.get("connections", (frozenset(), {}))


def _numa_node(handle: Any) -> int | None:
    # Not nvmlDeviceGetNumaNodeId: that is the node of the GPU's own memory on Grace Hopper.
    mask = call_or_none(pynvml.nvmlDeviceGetMemoryAffinity, handle, 16, pynvml.NVML_AFFINITY_SCOPE_NODE)
    # 64-bit words with a bit for each node
    nodes = [64 * word + bit for word, bits in enumerate(mask or ()) for bit in range(64) if bits >> bit & 1]
    return nodes[0] if len(nodes) == 1 else None
