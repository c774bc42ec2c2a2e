"""Reads one GPU or MIG instance again and again, cheaply."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable
from typing import Any

import pynvml

from lightning_gpu_tools.gpus.metrics import GpuSample
from lightning_gpu_tools.gpus.nvml import gpm as _gpm
from lightning_gpu_tools.gpus.nvml.calls import (
    GONE,
    NEVER,
    process_utilization,
    utilization_samples,
    why_unreadable,
)
from lightning_gpu_tools.gpus.nvml.error_events import ErrorEvents
from lightning_gpu_tools.gpus.nvml.session import close_driver, open_driver
from lightning_gpu_tools.gpus.readings import GpuProcess, UtilizationSample
from lightning_gpu_tools.gpus.utilization import LONGEST_PERIOD_S

# Field values, by number because older versions of nvidia-ml-py lack the names. Not the finer throttle counters
# (NVML_FI_DEV_CLOCKS_EVENT_REASON_*_SLOWDOWN): their numbers, 251 to 253 in R580 and 269 to 271 in nvidia-ml-py 13.615,
# mean something else on the other side.
_FIELDS = 4, 74, 75, 83, 197, 198
_ECC_UNCORRECTED, _POWER_CAPPED_NS, _THERMAL_NS, _ENERGY_MJ, _PCIE_TX_BYTES, _PCIE_RX_BYTES = _FIELDS

# Members of nvmlValue_t in the order of nvmlValueType_t
_VALUE_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")

# The PCIe counters of a L40S stay below this (https://github.com/NVIDIA/dcgm-exporter/issues/721): at full PCIe 4 speed
# they start again at 0 seven times a second, and then the difference of two of them says nothing. A counter that was
# seen above it is wider.
_32_BITS = 2**32


class GpuProbe:
    """Reads one GPU or MIG instance again and again, cheaply, and never raises while doing so.

    A read costs at most 12 calls of the C library: error events (1), utilization samples (2), memory, processes or in
    turn with them the utilization of each (2), power, temperature, all counters (1), GPM (2); one more where the
    driver's sample buffer has run dry. What the hardware, the driver or this user's rights never give is asked for once
    and is ``None`` from then on. What fails otherwise, for example because the GPU is lost, is ``None`` as long as it
    fails, and reported once in ``GpuSample.problems``.

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
        # Metrics that this GPU does not have, and those whose failure has been reported.
        self._absent: set[object] = set() if gpm else {"GPM"}
        self._failing: set[str] = set()
        self._problems: list[str] = []
        self._last_sample_us: int | None = None
        self._last_sample_s = 0.0
        self._events = ErrorEvents()
        self._ecc_errors: int | None = None
        self._monitors = _gpm.PerformanceMonitors(is_mig=self._is_mig)
        self._pcie_is_wide = False
        self._driver_memory_bytes: int | None = None
        self._processes: tuple[GpuProcess, ...] | None = None
        self._processes_by_utilization = False
        self._last_process_us = 0
        self._held_s: float | None = None
        self._highest_mhz: int | None = None
        self._pid = open_driver()

    def close(self) -> None:
        """Give everything back to the driver; idempotent."""
        if self._pid != os.getpid():
            return
        self._monitors.close()
        self._events.close()
        self._handle = None
        close_driver(self._pid)
        self._pid = 0

    def read(self) -> GpuSample:
        """Return what happened since the last read; the first one only gives the counters their start."""
        now_s = self._clock()
        self._problems = []
        errors = self._events.read()
        if self._handle is None:
            self._find()
        metrics: dict[int, float] = self._ask("GPM", self._monitors.read, now_s) or {}
        counters = self._read_counters()
        memory = self._ask("memory", pynvml.nvmlDeviceGetMemoryInfo)
        milliwatts = celsius = None
        if not self._is_mig:
            milliwatts = self._ask("power", pynvml.nvmlDeviceGetPowerUsage)
            celsius = self._ask("temperature", pynvml.nvmlDeviceGetTemperature, pynvml.NVML_TEMPERATURE_GPU)
        power_capped_s = _scaled(counters.get(_POWER_CAPPED_NS), 1e-9)
        thermal_throttled_s = _scaled(counters.get(_THERMAL_NS), 1e-9)
        parts = [part for part in (power_capped_s, thermal_throttled_s) if part is not None]
        pcie_tx_bytes, pcie_rx_bytes = self._pcie(metrics, counters)
        return GpuSample(
            uuid=self.uuid,
            time_s=now_s,
            utilization=tuple(self._read_utilization(now_s, metrics)),
            memory_used_bytes=memory and memory.used,
            memory_total_bytes=memory and memory.total,
            driver_memory_bytes=self._driver_memory_bytes,
            power_watts=_scaled(milliwatts, 1e-3),
            energy_joules=_scaled(counters.get(_ENERGY_MJ), 1e-3),
            temperature_celsius=_scaled(celsius, 1.0),
            throttled_s=sum(parts) if parts else None,
            power_capped_s=power_capped_s,
            thermal_throttled_s=thermal_throttled_s,
            held_clock_percent=self._held_clock(sum(parts)),
            pcie_tx_bytes=pcie_tx_bytes,
            pcie_rx_bytes=pcie_rx_bytes,
            sm_active_percent=metrics.get(_gpm.SM),
            sm_occupancy_percent=metrics.get(_gpm.OCCUPANCY),
            tensor_active_percent=metrics.get(_gpm.TENSOR),
            dram_active_percent=metrics.get(_gpm.DRAM),
            lists_processes=not self._is_utilizations_turn,
            processes=self._read_processes(),
            errors=(*errors, *self._ecc(counters)),
            problems=tuple(self._problems),
        )

    def _held_clock(self, held_s: float) -> float | None:
        """Return the clock against the highest there is, if something has held it down since the last read."""
        before_s, self._held_s = self._held_s, held_s
        if before_s is None or held_s <= before_s:
            return None
        if self._highest_mhz is None:
            self._highest_mhz = self._ask("highest clock", pynvml.nvmlDeviceGetMaxClockInfo, pynvml.NVML_CLOCK_SM)
        mhz = self._ask("clock", pynvml.nvmlDeviceGetClockInfo, pynvml.NVML_CLOCK_SM)
        return 100.0 * mhz / self._highest_mhz if mhz and self._highest_mhz else None

    def _find(self) -> None:
        try:
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(self.uuid)
        except pynvml.NVMLError as error:
            self._fail("GPU", error)
            return
        self._failing.discard("GPU")
        # What it keeps does not change. A driver before 510 does not say, in one way or another.
        with contextlib.suppress(pynvml.NVMLError):
            memory = pynvml.nvmlDeviceGetMemoryInfo(self._handle, version=pynvml.nvmlMemory_v2)
            self._driver_memory_bytes = memory.reserved
        self._monitors.restart()
        self._ask("error events", self._events.start)

    def _ask(self, metric: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call NVML for a metric of this GPU; ``None`` if it does not have it, or fails."""
        if self._handle is None or metric in self._absent:
            return None
        try:
            value = function(self._handle, *arguments)
        except NEVER:
            self._absent.add(metric)
        except pynvml.NVMLError as error:
            self._fail(metric, error)
        else:
            self._failing.discard(metric)
            return value
        return None

    def _fail(self, metric: str, error: pynvml.NVMLError) -> None:
        if isinstance(error, GONE):
            metric, self._handle = "GPU", None  # nothing else of it can be read; find it again the next time
        if metric not in self._failing:
            self._failing.add(metric)
            self._problems.append(f"{metric} of {self.uuid} cannot be read: {why_unreadable(error)}.")

    def _read_utilization(self, now_s: float, metrics: dict[int, float]) -> list[UtilizationSample]:
        if self._is_mig:
            busy = metrics.get(_gpm.GRAPHICS)
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
        # On some products (GB10) the buffer is not filled while the GPU is idle. Two of the longest sample periods
        # distinguish that from a read that was just too early for the next sample.
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
            elif isinstance(error := pynvml.NVMLError(value.nvmlReturn), (*NEVER, pynvml.NVMLError_InvalidArgument)):
                self._absent.add(value.fieldId)  # an unknown field is an invalid argument to an older driver
            else:
                self._fail(f"counter {value.fieldId}", error)
        return counters

    def _ecc(self, counters: dict[int, float]) -> list[str]:
        count = counters.get(_ECC_UNCORRECTED)
        if count is None:
            return []
        before, self._ecc_errors = self._ecc_errors, int(count)
        if before is None or count <= before:
            return []
        return [f"{int(count) - before} uncorrectable ECC error(s) in the GPU's memory"]

    def _pcie(self, metrics: dict[int, float], counters: dict[int, float]) -> tuple[int | None, int | None]:
        if _gpm.PCIE_TX in metrics and _gpm.PCIE_RX in metrics:
            self._absent |= {_PCIE_TX_BYTES, _PCIE_RX_BYTES}
            sent_bytes, received_bytes = self._monitors.pcie_bytes
            return int(sent_bytes), int(received_bytes)
        if self._monitors.started and not metrics:  # what GPM will count from here on is not what the fields count
            return None, None
        sent, received = counters.get(_PCIE_TX_BYTES), counters.get(_PCIE_RX_BYTES)
        if sent is None or received is None:
            return None, None
        self._pcie_is_wide |= max(sent, received) >= _32_BITS
        return (int(sent), int(received)) if self._pcie_is_wide else (None, None)

    @property
    def _is_utilizations_turn(self) -> bool:
        return self._processes_by_utilization and bool(self._processes) and "process utilization" not in self._absent

    def _read_processes(self) -> tuple[GpuProcess, ...] | None:
        """Return the processes; who they are and how busy each keeps the GPU is asked for in turn, to save calls."""
        if self._handle is None:
            return None
        if self._is_utilizations_turn:
            answer = self._ask("process utilization", process_utilization, self._last_process_us)
            if answer is not None:
                percents, self._last_process_us = answer
                # A process without a sample has not used the GPU.
                self._processes = tuple(
                    dataclasses.replace(process, utilization_percent=percents.get(process.pid, 0.0))
                    for process in self._processes or ()
                )
        else:
            listed = self._ask("processes", pynvml.nvmlDeviceGetComputeRunningProcesses_v3)
            busy = {process.pid: process.utilization_percent for process in self._processes or ()}
            self._processes = (
                None
                if listed is None
                else tuple(
                    GpuProcess(pid=one.pid, memory_used_bytes=one.usedGpuMemory, utilization_percent=busy.get(one.pid))
                    for one in listed
                )
            )
        self._processes_by_utilization = not self._processes_by_utilization
        return self._processes


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor
