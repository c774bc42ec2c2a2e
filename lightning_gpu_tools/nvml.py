"""The one place that asks the NVIDIA driver, through NVML (``nvidia-ml-py``).

Everything that NVML gives becomes a plain reading here: bytes, percent, seconds, watts; ``None`` where the driver does
not report it. GPUs are found by UUID, never by an index that ``CUDA_VISIBLE_DEVICES`` could have shifted: NVML always
sees every GPU of the machine.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pynvml

from lightning_gpu_tools.errors import NvmlUnavailableError
from lightning_gpu_tools.readings import ComputeMode, GpuLink, GpuProcess, GpuReading, GpuSample, UtilizationSample
from lightning_gpu_tools.utilization import LONGEST_PERIOD_S, mean_percent

# NVML's way to say "this hardware, this driver or this user never gets to know": the answer is None, not an error.
_NEVER = (pynvml.NVMLError_NotSupported, pynvml.NVMLError_FunctionNotFound, pynvml.NVMLError_NoPermission)

# After one of these, no other question about the GPU has an answer.
_GONE = (pynvml.NVMLError_GpuIsLost, pynvml.NVMLError_ResetRequired, pynvml.NVMLError_Uninitialized)

_COMPUTE_MODES: dict[int, ComputeMode] = {
    pynvml.NVML_COMPUTEMODE_DEFAULT: "default",
    pynvml.NVML_COMPUTEMODE_EXCLUSIVE_THREAD: "exclusive_thread",
    pynvml.NVML_COMPUTEMODE_PROHIBITED: "prohibited",
    pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS: "exclusive_process",
}

# The driver keeps the samples of the last seconds (about 20 s). On some products (GB10) it adds none while the GPU is
# idle, so that what it has may be minutes old: https://github.com/polarsignals/gpu-metrics-agent/pull/37
_STALE_AFTER_S = 30.0

# Products whose GPU has no memory of its own. The driver's names: "NVIDIA GB10" (DGX Spark), "NVIDIA Thor",
# "Orin (nvgpu)": https://github.com/XuehaiPan/nvitop/pull/208, https://github.com/AlexsJones/llmfit/pull/792
_INTEGRATED_NAME = re.compile(r"\b(GB10|Thor)\b|\(nvgpu\)")


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
    pid = _open()
    outer = _session.pid, getattr(_session, "identities", {})
    if outer[0] != pid:  # the outermost one, or in a forked child: handles of the parent are not valid here
        _session.pid, _session.identities = pid, {}
    try:
        yield
    finally:
        _session.pid, _session.identities = outer
        _close(pid)


def _open() -> int:
    """Open the driver for this process, once more if it is open already; return the process for ``_close``."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise NvmlUnavailableError(_why_unavailable(error)) from error
    return os.getpid()


def _close(pid: int) -> None:
    if os.getpid() == pid:  # a child that was forked in between has nothing to close
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
            compute_mode=_COMPUTE_MODES.get(compute_mode),
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
    integrated = name is not None and _INTEGRATED_NAME.search(name) is not None
    if not integrated and memory is not None:
        return False, memory.total, memory.free
    if not integrated and not _addresses_host_memory(handle):
        return None, None, None
    # Memory is not supported, and it addresses that of the host: what the host has available is what it can get. On
    # the named products NVML's answer, where there is one, leaves out what the page cache would give back.
    import psutil

    host = psutil.virtual_memory()
    return True, host.total, host.available


def _addresses_host_memory(handle: Any) -> bool:
    addressing_mode = getattr(pynvml, "nvmlDeviceGetAddressingMode", None)  # nvidia-ml-py has it since 13.580
    return addressing_mode is not None and _ask(addressing_mode, handle) == pynvml.NVML_DEVICE_ADDRESSING_MODE_ATS


def _utilization_percent(handle: Any) -> float | None:
    oldest_s = time.time() - _STALE_AFTER_S
    buffered, _ = _ask(_utilization_samples, handle, 0) or ([], 0)
    samples = [sample for sample in buffered if sample.time_s >= oldest_s]
    if samples:
        return mean_percent(samples)
    rates = _ask(pynvml.nvmlDeviceGetUtilizationRates, handle)
    return None if rates is None else float(rates.gpu)


def _utilization_samples(handle: Any, last_us: int) -> tuple[list[UtilizationSample], int]:
    """Return the driver's samples after ``last_us``, oldest first, and the driver's time of the newest one."""
    try:
        _, answer = pynvml.nvmlDeviceGetSamples(handle, pynvml.NVML_GPU_UTILIZATION_SAMPLES, last_us)
    except pynvml.NVMLError_NotFound:  # nothing newer
        return [], last_us
    # The order is not documented, and values far above 100 have been seen: https://github.com/Syllo/nvtop/issues/110
    pairs = sorted(
        (sample.timeStamp, sample.sampleValue.uiVal)
        for sample in answer
        if sample.timeStamp > last_us and sample.sampleValue.uiVal <= 100
    )
    samples = [UtilizationSample(time_s=stamp_us / 1e6, percent=float(percent)) for stamp_us, percent in pairs]
    return samples, pairs[-1][0] if pairs else last_us


def _processes(handle: Any) -> tuple[GpuProcess, ...] | None:
    """Return the processes with a compute or a graphics context, by pid."""
    compute = _ask(_newest, "nvmlDeviceGetComputeRunningProcesses", handle)
    if compute is None:
        return None
    graphics = _ask(_newest, "nvmlDeviceGetGraphicsRunningProcesses", handle) or []
    # A process may have both kinds of context.
    by_pid = {process.pid: process for process in [*graphics, *compute]}
    compute_pids = {process.pid for process in compute}
    return tuple(
        _describe(pid, by_pid[pid].usedGpuMemory, graphics_only=pid not in compute_pids) for pid in sorted(by_pid)
    )


def _newest(function: str, handle: Any) -> Any:
    """Call the newest version of a function that the driver has; drivers before R510 have no ``_v3`` of these."""
    try:
        return getattr(pynvml, f"{function}_v3")(handle)
    except pynvml.NVMLError_FunctionNotFound:
        if not hasattr(pynvml, f"{function}_v2"):  # nvidia-ml-py before 12.550
            raise
        return getattr(pynvml, f"{function}_v2")(handle)


def _describe(pid: int, memory_used_bytes: int | None, graphics_only: bool) -> GpuProcess:
    user = name = None
    if _pids_are_ours():
        import psutil  # only now: it takes as long to import as all the rest of a pick without processes

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


# Field values, by number because older versions of nvidia-ml-py lack the names. Not the finer throttle counters
# (NVML_FI_DEV_CLOCKS_EVENT_REASON_*_SLOWDOWN): their numbers, 251 to 253 in R580 and 269 to 271 in nvidia-ml-py 13.615,
# mean something else on the other side.
_POWER_CAPPED_NS, _THERMAL_NS, _ENERGY_MJ, _PCIE_TX_BYTES, _PCIE_RX_BYTES = _FIELDS = 74, 75, 83, 197, 198

# Members of nvmlValue_t in the order of nvmlValueType_t
_VALUE_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")

# The PCIe counters of a L40S stay below this (https://github.com/NVIDIA/dcgm-exporter/issues/721): at full PCIe 4 speed
# they start again at 0 seven times a second, and then the difference of two of them says nothing. A counter that was
# seen above it is wider.
_32_BITS = 2**32

# nvmlGpmMetricId_t; percent, and MiB/s of PCIe
_GPM_GRAPHICS, _GPM_SM, _GPM_OCCUPANCY, _GPM_TENSOR, _GPM_DRAM = 1, 2, 3, 5, 10
_GPM_PCIE_TX, _GPM_PCIE_RX = 20, 21
_GPM_METRICS = (_GPM_GRAPHICS, _GPM_SM, _GPM_OCCUPANCY, _GPM_TENSOR, _GPM_DRAM, _GPM_PCIE_TX, _GPM_PCIE_RX)

# nvml.h: two GPM samples "should be greater than 100ms" apart, "due to the internal sample refresh rate"
_GPM_INTERVAL_S = 0.1


class GpuProbe:
    """Reads one GPU or MIG instance again and again, cheaply, and never raises while doing so.

    A look costs at most 11 calls of the C library: utilization samples (2), memory, processes (2), power, temperature,
    all counters (1), GPM (2); one more where the driver's sample buffer has run dry. What the hardware, the driver or
    this user's rights never give is asked for once and is ``None`` from then on. What fails otherwise, for example
    because the GPU is lost, is ``None`` as long as it fails, and told once in ``GpuSample.problems``.

    Of a MIG instance only memory, processes and GPM are read: power, heat and counters are those of the whole GPU,
    which others use as well. Its utilization is GPM's, which needs Hopper or later.

    Not for several threads at once, nor for a forked child.

    Args:
        uuid: ``GPU-...`` or ``MIG-...``. It need not be readable yet.
        gpm: Whether to use the GPU performance monitors. They are shared with Nsight and DCGM's profiling metrics.
        clock: Gives the seconds since the epoch.

    Raises:
        NvmlUnavailableError: There is no usable NVIDIA driver.
    """

    def __init__(self, uuid: str, *, gpm: bool = True, clock: Callable[[], float] = time.time) -> None:
        self.uuid = uuid
        self._is_mig = uuid.startswith("MIG-")
        self._clock = clock
        self._handle: Any = None
        # Metrics that this GPU does not have, and those whose failure has been told.
        self._absent: set[object] = set() if gpm else {"GPM"}
        self._failing: set[str] = set()
        self._problems: list[str] = []
        self._last_sample_us: int | None = None
        self._last_sample_s = 0.0
        self._gpm_samples: list[Any] = []
        self._gpm_s: float | None = None  # when the first of them was taken
        self._pcie_bytes = [0.0, 0.0]  # sent and received, as far as GPM counted them
        self._pcie_is_wide = False
        self._pid = _open()

    def __enter__(self) -> GpuProbe:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give everything back to the driver; idempotent."""
        if self._pid != os.getpid():
            return
        for sample in self._gpm_samples:
            _tolerate(pynvml.nvmlGpmSampleFree, sample)
        self._gpm_samples, self._handle = [], None
        _close(self._pid)
        self._pid = 0

    def read(self) -> GpuSample:
        """Return what happened since the last look; the first look only gives the counters their start."""
        now_s = self._clock()
        self._problems = []
        if self._handle is None:
            self._find()
        gpm = self._read_gpm(now_s)
        counters = self._read_counters()
        memory = self._ask("memory", pynvml.nvmlDeviceGetMemoryInfo)
        processes = self._ask("processes", lambda handle: _newest("nvmlDeviceGetComputeRunningProcesses", handle))
        milliwatts = celsius = None
        if not self._is_mig:
            milliwatts = self._ask("power", pynvml.nvmlDeviceGetPowerUsage)
            celsius = self._ask("temperature", pynvml.nvmlDeviceGetTemperature, pynvml.NVML_TEMPERATURE_GPU)
        power_capped_s = _scaled(counters.get(_POWER_CAPPED_NS), 1e-9)
        thermal_throttled_s = _scaled(counters.get(_THERMAL_NS), 1e-9)
        parts = [part for part in (power_capped_s, thermal_throttled_s) if part is not None]
        pcie_tx_bytes, pcie_rx_bytes = self._pcie(gpm, counters)
        return GpuSample(
            uuid=self.uuid,
            time_s=now_s,
            utilization=tuple(self._read_utilization(now_s, gpm)),
            memory_used_bytes=memory and memory.used,
            memory_total_bytes=memory and memory.total,
            power_watts=_scaled(milliwatts, 1e-3),
            energy_joules=_scaled(counters.get(_ENERGY_MJ), 1e-3),
            temperature_celsius=_scaled(celsius, 1.0),
            throttled_s=sum(parts) if parts else None,
            power_capped_s=power_capped_s,
            thermal_throttled_s=thermal_throttled_s,
            pcie_tx_bytes=pcie_tx_bytes,
            pcie_rx_bytes=pcie_rx_bytes,
            sm_active_percent=gpm.get(_GPM_SM),
            sm_occupancy_percent=gpm.get(_GPM_OCCUPANCY),
            tensor_active_percent=gpm.get(_GPM_TENSOR),
            dram_active_percent=gpm.get(_GPM_DRAM),
            processes=None
            if processes is None
            else tuple(GpuProcess(pid=process.pid, memory_used_bytes=process.usedGpuMemory) for process in processes),
            problems=tuple(self._problems),
        )

    def _find(self) -> None:
        try:
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(self.uuid)
        except pynvml.NVMLError as error:
            self._fail("GPU", error)
            return
        self._failing.discard("GPU")
        self._gpm_s = None  # the counters behind it may have started again

    def _ask(self, metric: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call NVML for a metric of this GPU; ``None`` if it does not have it, or fails."""
        if self._handle is None or metric in self._absent:
            return None
        try:
            value = function(self._handle, *arguments)
        except _NEVER:
            self._absent.add(metric)
        except pynvml.NVMLError as error:
            self._fail(metric, error)
        else:
            self._failing.discard(metric)
            return value
        return None

    def _fail(self, metric: str, error: pynvml.NVMLError) -> None:
        if isinstance(error, _GONE):
            metric, self._handle = "GPU", None  # nothing else of it can be read; look for it again the next time
        if metric not in self._failing:
            self._failing.add(metric)
            self._problems.append(f"{metric} of {self.uuid} cannot be read: {_why_unreadable(error)}.")

    def _read_utilization(self, now_s: float, gpm: dict[int, float]) -> list[UtilizationSample]:
        if self._is_mig:
            busy = gpm.get(_GPM_GRAPHICS)
            return [] if busy is None else [UtilizationSample(time_s=now_s, percent=busy)]
        answer = self._ask("utilization samples", _utilization_samples, self._last_sample_us or 0)
        has_buffer = "utilization samples" not in self._absent
        if has_buffer and answer is None:
            return []
        is_first_look = self._last_sample_us is None
        samples, self._last_sample_us = answer or ([], 0)
        if samples or is_first_look:
            self._last_sample_s = now_s
            return [] if is_first_look else samples
        # On some products (GB10) the buffer is not filled while the GPU is idle. Two of the longest sample periods tell
        # that from a look that was just too early for the next sample.
        if has_buffer and now_s - self._last_sample_s < 2 * LONGEST_PERIOD_S:
            return []
        rates = self._ask("utilization", pynvml.nvmlDeviceGetUtilizationRates)
        return [] if rates is None else [UtilizationSample(time_s=now_s, percent=float(rates.gpu))]

    def _read_counters(self) -> dict[int, float]:
        """Return the fields that this GPU has, by their number."""
        wanted = [field for field in _FIELDS if field not in self._absent]
        if self._is_mig or not wanted:
            return {}
        counters = {}
        for value in self._ask("counters", pynvml.nvmlDeviceGetFieldValues, wanted) or ():
            if value.nvmlReturn == pynvml.NVML_SUCCESS:
                self._failing.discard(f"counter {value.fieldId}")
                counters[value.fieldId] = getattr(value.value, _VALUE_MEMBERS[value.valueType])
            elif isinstance(error := pynvml.NVMLError(value.nvmlReturn), (*_NEVER, pynvml.NVMLError_InvalidArgument)):
                self._absent.add(value.fieldId)  # an unknown field is an invalid argument to an older driver
            else:
                self._fail(f"counter {value.fieldId}", error)
        return counters

    def _pcie(self, gpm: dict[int, float], counters: dict[int, float]) -> tuple[int | None, int | None]:
        if _GPM_PCIE_TX in gpm and _GPM_PCIE_RX in gpm:
            self._absent |= {_PCIE_TX_BYTES, _PCIE_RX_BYTES}
            return int(self._pcie_bytes[0]), int(self._pcie_bytes[1])
        if self._gpm_samples and not gpm:  # what GPM will count from here on is not what the fields count
            return None, None
        sent, received = counters.get(_PCIE_TX_BYTES), counters.get(_PCIE_RX_BYTES)
        if sent is None or received is None:
            return None, None
        self._pcie_is_wide |= max(sent, received) >= _32_BITS
        return (int(sent), int(received)) if self._pcie_is_wide else (None, None)

    def _read_gpm(self, now_s: float) -> dict[int, float]:
        """Return the means since the last look by metric, empty if this GPU or this look has none."""
        if not self._gpm_samples:
            self._ask("GPM", self._start_gpm)
        if not self._gpm_samples or (self._gpm_s is not None and now_s - self._gpm_s < _GPM_INTERVAL_S):
            return {}
        first, second = self._gpm_samples
        if self._gpm_s is None:
            if self._ask("GPM", self._take_gpm_sample, first) is not None:
                self._gpm_s = now_s
            return {}
        if self._ask("GPM", self._take_gpm_sample, second) is None:
            return {}
        metrics: dict[int, float] | None = self._ask("GPM", _gpm_metrics, first, second)
        if metrics is None:
            return {}
        # The interval of the next look begins where that of this one ends, so that nothing is left out.
        self._gpm_samples = [second, first]
        interval_s, self._gpm_s = now_s - self._gpm_s, now_s
        for direction, metric in enumerate((_GPM_PCIE_TX, _GPM_PCIE_RX)):
            self._pcie_bytes[direction] += metrics.get(metric, 0.0) * 2**20 * interval_s
        return metrics

    def _start_gpm(self, handle: Any) -> None:
        whole_gpu = pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle) if self._is_mig else handle
        if not pynvml.nvmlGpmQueryDeviceSupport(whole_gpu).isSupportedDevice:
            raise pynvml.NVMLError_NotSupported
        self._gpm_samples = [pynvml.nvmlGpmSampleAlloc(), pynvml.nvmlGpmSampleAlloc()]

    def _take_gpm_sample(self, handle: Any, sample: Any) -> Any:
        if not self._is_mig:
            return pynvml.nvmlGpmSampleGet(handle, sample)
        whole_gpu = pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
        return pynvml.nvmlGpmMigSampleGet(whole_gpu, pynvml.nvmlDeviceGetGpuInstanceId(handle), sample)


def _gpm_metrics(_handle: Any, first: Any, second: Any) -> dict[int, float]:
    request = pynvml.c_nvmlGpmMetricsGet_t()
    request.version = pynvml.NVML_GPM_METRICS_GET_VERSION
    request.numMetrics, request.sample1, request.sample2 = len(_GPM_METRICS), first, second
    for slot, metric in enumerate(_GPM_METRICS):
        request.metrics[slot].metricId = metric
    pynvml.nvmlGpmMetricsGet(request)
    answers = {answer.metricId: answer for answer in request.metrics[: len(_GPM_METRICS)]}
    return {
        metric: float(answer.value)
        for metric, answer in answers.items()
        if answer.nvmlReturn == pynvml.NVML_SUCCESS and math.isfinite(answer.value) and answer.value >= 0
    }


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


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
    if isinstance(error, pynvml.NVMLError_NotFound):
        return "the driver knows no GPU or MIG instance with this UUID (any more): see `nvidia-smi -L`"
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
