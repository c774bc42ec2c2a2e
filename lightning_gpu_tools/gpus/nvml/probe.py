"""Cheap repeated reads of one GPU or MIG instance: counters, performance monitors, Xid events."""

import contextlib
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import pynvml

from lightning_gpu_tools.gpus.metrics import GpuSample
from lightning_gpu_tools.gpus.nvml import (
    GPU_LOST,
    REFUSED,
    call_or_none,
    process_utilization,
    session,
    utilization_samples,
    why_unreadable,
)
from lightning_gpu_tools.gpus.readings import LONGEST_PERIOD_S, GpuProcess, UtilizationSample

_MAX_PER_READ = 16  # further events wait for the next read


# The GPU performance monitors (GPM) of Hopper and later: nvmlGpmMetricId_t; in percent, and MiB/s for PCIe
_GRAPHICS, _SM, _OCCUPANCY, _TENSOR, _DRAM, _GPM_PCIE_TX, _GPM_PCIE_RX = _GPM_METRICS = (1, 2, 3, 5, 10, 20, 21)
_GPM_INTERVAL_S = 0.1  # nvml.h: two samples "should be greater than 100ms" apart


class PerformanceMonitors:
    """Metrics of one GPU or MIG instance, averaged over the time between two reads."""

    def __init__(self, *, is_mig: bool) -> None:
        self.since_s: float | None = None  # time of the first sample; None begins a new interval with the next read
        self._is_mig = is_mig
        self._samples: list[Any] = []  # two samples that alternate, so that no time is skipped

    def read(self, handle: Any, now_s: float) -> dict[int, float]:
        """Return the means since the last read, by metric; empty on the first read and if called too soon."""
        if not self._samples:
            whole_gpu = pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle) if self._is_mig else handle
            if not pynvml.nvmlGpmQueryDeviceSupport(whole_gpu).isSupportedDevice:
                raise pynvml.NVMLError_NotSupported
            self._samples = [pynvml.nvmlGpmSampleAlloc(), pynvml.nvmlGpmSampleAlloc()]
        if self.since_s is not None and now_s - self.since_s < _GPM_INTERVAL_S:
            return {}
        first, second = self._samples
        self._take(handle, second)
        is_first = self.since_s is None
        self._samples, self.since_s = [second, first], now_s
        if is_first:
            return {}
        request = pynvml.c_nvmlGpmMetricsGet_t()
        request.version = pynvml.NVML_GPM_METRICS_GET_VERSION
        request.numMetrics, request.sample1, request.sample2 = len(_GPM_METRICS), first, second
        for slot, metric in enumerate(_GPM_METRICS):
            request.metrics[slot].metricId = metric
        pynvml.nvmlGpmMetricsGet(request)
        return {
            answer.metricId: float(answer.value)
            for answer in request.metrics[: len(_GPM_METRICS)]
            if answer.nvmlReturn == pynvml.NVML_SUCCESS and math.isfinite(answer.value) and answer.value >= 0
        }

    def close(self) -> None:
        """Return the samples to the driver."""
        for sample in self._samples:
            call_or_none(pynvml.nvmlGpmSampleFree, sample)
        self._samples = []

    def _take(self, handle: Any, sample: Any) -> None:
        if self._is_mig:
            whole_gpu = pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
            pynvml.nvmlGpmMigSampleGet(whole_gpu, pynvml.nvmlDeviceGetGpuInstanceId(handle), sample)
        else:
            pynvml.nvmlGpmSampleGet(handle, sample)


# Counter -> field value of NVML, and scale to the counter's unit. By number because older versions of nvidia-ml-py lack
# the names. The finer throttle counters (NVML_FI_DEV_CLOCKS_EVENT_REASON_*_SLOWDOWN) have different
# numbers in R580 and in nvidia-ml-py 13.615.
_COUNTERS = {
    "power_capped_percent": (74, 1e-9),  # seconds, from nanoseconds; normal at full load
    "thermal_throttled_percent": (75, 1e-9),
    "energy_joules": (83, 1e-3),  # from millijoules
    "pcie_tx_bytes": (197, 1),
    "pcie_rx_bytes": (198, 1),
}

_THROTTLED = ("power_capped_percent", "thermal_throttled_percent")

# Members of nvmlValue_t in the order of nvmlValueType_t
_VALUE_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")

_PCIE = {"pcie_tx_bytes": _GPM_PCIE_TX, "pcie_rx_bytes": _GPM_PCIE_RX}
# Some PCIe counters wrap at this value, up to seven times a second (L40S), so their differences are meaningless:
# https://github.com/NVIDIA/dcgm-exporter/issues/721. A counter that has exceeded this value does not wrap.
_32_BITS = 2**32


class GpuProbe:
    """A repeated reader of one GPU or MIG instance, for one thread, with about a dozen NVML calls per read.

    The constructor raises ``NvmlUnavailableError`` without a usable NVIDIA driver; a read never raises. Metrics that
    this hardware, driver, or user never gets are tried once. ``GpuSample.problems`` reports each other failure once.

    For a MIG instance, only memory, processes, and GPM (also for utilization) are read: the rest covers the whole GPU.
    """

    def __init__(self, uuid: str) -> None:
        self.uuid = uuid
        self._is_mig = uuid.startswith("MIG-")
        self._handle: Any = None
        self._absent: set[str] = {"power", "temperature", "counters"} if self._is_mig else set()
        self._failing: set[str] = set()  # failures already reported
        self._problems: list[str] = []
        self._last_sample_us: int | None = None
        self._last_sample_s = 0.0
        self._event_set: Any = None  # for Xid events
        self._monitors = PerformanceMonitors(is_mig=self._is_mig)
        self._counters: dict[str, tuple[float, float]] = {}  # time and value at the last read
        self._pcie_is_wide = False
        self._fixed: dict[str, float] = {}  # values that do not change
        self._last_process_us = 0
        self._driver = contextlib.ExitStack()
        self._driver.enter_context(session())

    def close(self) -> None:
        """Release all driver resources."""
        self._monitors.close()
        self._close_events()
        self._handle = None
        self._driver.close()

    def read(self) -> GpuSample:
        """Return a sample of the time since the last read."""
        now_s = time.time()
        self._problems = []
        errors: list[str] = []
        while len(errors) < _MAX_PER_READ:  # those since the last read, even of a GPU that was just lost
            event = call_or_none(pynvml.nvmlEventSetWait_v2, self._event_set, 0)
            if event is None:  # a timeout: no more events
                break
            errors.append(f"Xid {event.eventData} (see NVIDIA's Xid catalog)")
        if self._handle is None:
            self._find()
        metrics: dict[int, float] = self._ask("GPM", self._monitors.read, now_s) or {}
        increases = self._read_counters(now_s)
        memory = self._ask("memory", pynvml.nvmlDeviceGetMemoryInfo)
        milliwatts = self._ask("power", pynvml.nvmlDeviceGetPowerUsage)
        throttled = {
            name: 100.0 * increase / seconds for name, (increase, seconds) in increases.items() if name in _THROTTLED
        }
        throttled_percent = sum(throttled.values()) if throttled else None
        values = {
            "memory_used_bytes": memory and memory.used,  # by all processes
            "memory_total_bytes": memory and memory.total,
            "power_watts": None if milliwatts is None else 1e-3 * milliwatts,
            "temperature_celsius": self._ask(
                "temperature", pynvml.nvmlDeviceGetTemperature, pynvml.NVML_TEMPERATURE_GPU
            ),
            # Since the previous sample:
            **throttled,
            "throttled_percent": throttled_percent,
            "held_clock_percent": self._clock_percent() if throttled_percent else None,
            "energy_joules": increases["energy_joules"][0] if "energy_joules" in increases else None,
            **self._pcie_traffic(increases, metrics),
            # The same (Hopper and later):
            "sm_active_percent": metrics.get(_SM),
            "sm_occupancy_percent": metrics.get(_OCCUPANCY),
            "tensor_active_percent": metrics.get(_TENSOR),
            "dram_active_percent": metrics.get(_DRAM),
            **self._fixed,
        }
        return GpuSample(
            uuid=self.uuid,
            time_s=now_s,
            utilization=tuple(self._read_utilization(now_s, metrics)),
            values={name: value for name, value in values.items() if value is not None},
            processes=self._read_processes(),
            errors=tuple(errors),
            problems=tuple(self._problems),
        )

    def _start_events(self, handle: Any) -> None:
        self._close_events()
        self._event_set = pynvml.nvmlEventSetCreate()
        try:
            pynvml.nvmlDeviceRegisterEvents(handle, pynvml.nvmlEventTypeXidCriticalError, self._event_set)
        except pynvml.NVMLError:
            self._close_events()
            raise

    def _close_events(self) -> None:
        call_or_none(pynvml.nvmlEventSetFree, self._event_set)
        self._event_set = None

    def _clock_percent(self) -> float | None:
        """Return the clock as a percentage of the highest."""
        highest_mhz = self._ask("highest clock", pynvml.nvmlDeviceGetMaxClockInfo, pynvml.NVML_CLOCK_SM)
        mhz = self._ask("clock", pynvml.nvmlDeviceGetClockInfo, pynvml.NVML_CLOCK_SM)
        return 100.0 * mhz / highest_mhz if mhz and highest_mhz else None

    def _find(self) -> None:
        try:
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(self.uuid)
        except pynvml.NVMLError as error:
            self._fail("GPU", error)
            return
        self._failing.discard("GPU")
        self._fixed = {}
        with contextlib.suppress(pynvml.NVMLError):  # drivers before 510
            memory = pynvml.nvmlDeviceGetMemoryInfo(self._handle, version=pynvml.nvmlMemory_v2)
            self._fixed["driver_memory_bytes"] = memory.reserved  # counts as used
        self._monitors.since_s = None
        self._ask("error events", self._start_events)
        limit = self._ask("power", pynvml.nvmlDeviceGetPowerManagementLimit)
        limits = self._ask("power limits", pynvml.nvmlDeviceGetPowerManagementLimitConstraints)
        # The second one is the highest limit that an administrator can set.
        watts = {"power_limit_watts": limit, "power_limit_watts_max": limits and limits[1]}
        self._fixed |= {name: 1e-3 * milliwatts for name, milliwatts in watts.items() if milliwatts is not None}

    def _ask(self, metric: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call NVML for a metric; return ``None`` if this GPU lacks the metric or the call fails."""
        if self._handle is None or metric in self._absent:
            return None
        try:
            value = function(self._handle, *arguments)
        except REFUSED:
            self._absent.add(metric)
        except pynvml.NVMLError as error:
            self._fail(metric, error)
        else:
            self._failing.discard(metric)
            return value
        return None

    def _fail(self, metric: str, error: pynvml.NVMLError) -> None:
        if isinstance(error, GPU_LOST):
            metric, self._handle = "GPU", None  # look it up again on the next read
        if metric not in self._failing:
            self._failing.add(metric)
            self._problems.append(f"{metric} of {self.uuid} cannot be read: {why_unreadable(error)}.")

    def _read_utilization(self, now_s: float, metrics: dict[int, float]) -> list[UtilizationSample]:
        if self._is_mig:
            busy = metrics.get(_GRAPHICS)
            return [] if busy is None else [UtilizationSample(time_s=now_s, percent=busy)]
        answer = self._ask("utilization samples", utilization_samples, self._last_sample_us or 0)
        has_buffer = "utilization samples" not in self._absent
        if has_buffer and answer is None:
            return []
        is_first = self._last_sample_us is None
        samples, self._last_sample_us = answer or ([], 0)
        if samples or is_first:
            self._last_sample_s = now_s
            return [] if is_first else samples
        # On some products (GB10), the buffer stays empty while the GPU is idle. Or this read was too early.
        if has_buffer and now_s - self._last_sample_s < 2 * LONGEST_PERIOD_S:
            return []
        rates = self._ask("utilization", pynvml.nvmlDeviceGetUtilizationRates)
        return [] if rates is None else [UtilizationSample(time_s=now_s, percent=float(rates.gpu))]

    def _read_counters(self, now_s: float) -> dict[str, tuple[float, float]]:
        """Return by how much each counter has increased since it was last read, and in how many seconds."""
        wanted = {name: counter for name, counter in _COUNTERS.items() if name not in self._absent}
        ids = [field_id for field_id, _ in wanted.values()]
        values = self._ask("counters", pynvml.nvmlDeviceGetFieldValues, ids) if ids else None
        increases = {}
        for (name, (field_id, scale)), value in zip(wanted.items(), values or (), strict=False):
            if value.nvmlReturn == pynvml.NVML_SUCCESS:
                self._failing.discard(f"counter {field_id}")
                total = getattr(value.value, _VALUE_MEMBERS[value.valueType]) * scale
                before_s, before = self._counters.get(name, (now_s, total))
                self._counters[name] = now_s, total
                # A counter starts over after a reset, for example by a new driver.
                if total >= before and now_s > before_s:
                    increases[name] = total - before, now_s - before_s
            elif isinstance(error := pynvml.NVMLError(value.nvmlReturn), (*REFUSED, pynvml.NVMLError_InvalidArgument)):
                self._absent.add(name)  # older drivers report unknown fields as invalid arguments
            else:
                self._fail(f"counter {field_id}", error)
        return increases

    def _pcie_traffic(
        self, increases: Mapping[str, tuple[float, float]], metrics: Mapping[int, float]
    ) -> dict[str, float]:
        """Return the traffic since the last read, by GPM or by counters that do not wrap."""
        self._pcie_is_wide |= any(name in self._counters and self._counters[name][1] >= _32_BITS for name in _PCIE)
        traffic = {}
        for name, metric in _PCIE.items():
            if metric in metrics:
                traffic[f"{name}_per_second"] = metrics[metric] * 2**20
            elif self._pcie_is_wide and name in increases:
                increase, seconds = increases[name]
                traffic[f"{name}_per_second"] = increase / seconds
        return traffic

    def _read_processes(self) -> tuple[GpuProcess, ...] | None:
        """Return the processes with their memory, and their utilization since the last read."""
        listed = self._ask("processes", pynvml.nvmlDeviceGetComputeRunningProcesses_v3)
        answer = self._ask("process utilization", process_utilization, self._last_process_us) if listed else None
        percents, self._last_process_us = answer or ({}, self._last_process_us)
        # A process without a sample did not use the GPU.
        unused = None if answer is None else 0.0
        found = (
            GpuProcess(process.pid, process.usedGpuMemory, utilization_percent=percents.get(process.pid, unused))
            for process in listed or ()
        )
        return None if listed is None else tuple(found)
