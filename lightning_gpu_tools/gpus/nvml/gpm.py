"""The GPU performance monitors (GPM) of Hopper and later."""

from __future__ import annotations

import math
from typing import Any

import pynvml

from lightning_gpu_tools.gpus.nvml import call_or_none

# nvmlGpmMetricId_t; in percent, and MiB/s for PCIe
GRAPHICS, SM, OCCUPANCY, TENSOR, DRAM = 1, 2, 3, 5, 10
PCIE_TX, PCIE_RX = 20, 21
_METRICS = (GRAPHICS, SM, OCCUPANCY, TENSOR, DRAM, PCIE_TX, PCIE_RX)

_INTERVAL_S = 0.1  # nvml.h: two samples "should be greater than 100ms" apart


class PerformanceMonitors:
    """Metrics of one GPU or MIG instance, averaged over the time between two reads."""

    def __init__(self, *, is_mig: bool) -> None:
        self.pcie_bytes = [0.0, 0.0]  # sent and received
        self._is_mig = is_mig
        self._samples: list[Any] = []  # two samples that alternate, so that no time is skipped
        self._since_s: float | None = None  # time of the first sample

    def restart(self) -> None:
        """Begin a new interval with the next read, because the GPU was unavailable."""
        self._since_s = None

    def read(self, handle: Any, now_s: float) -> dict[int, float]:
        """Return the means since the last read, by metric; empty on the first read and if called too soon."""
        if not self._samples:
            self._start(handle)
        if self._since_s is not None and now_s - self._since_s < _INTERVAL_S:
            return {}
        first, second = self._samples
        if self._since_s is None:
            self._take(handle, first)
            self._since_s = now_s
            return {}
        self._take(handle, second)
        metrics = _difference(first, second)
        self._samples = [second, first]
        interval_s, self._since_s = now_s - self._since_s, now_s
        for direction, metric in enumerate((PCIE_TX, PCIE_RX)):
            self.pcie_bytes[direction] += metrics.get(metric, 0.0) * 2**20 * interval_s
        return metrics

    def close(self) -> None:
        """Return the samples to the driver."""
        for sample in self._samples:
            call_or_none(pynvml.nvmlGpmSampleFree, sample)
        self._samples = []

    def _start(self, handle: Any) -> None:
        whole_gpu = pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle) if self._is_mig else handle
        if not pynvml.nvmlGpmQueryDeviceSupport(whole_gpu).isSupportedDevice:
            raise pynvml.NVMLError_NotSupported
        self._samples = [pynvml.nvmlGpmSampleAlloc(), pynvml.nvmlGpmSampleAlloc()]

    def _take(self, handle: Any, sample: Any) -> None:
        if self._is_mig:
            whole_gpu = pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
            pynvml.nvmlGpmMigSampleGet(whole_gpu, pynvml.nvmlDeviceGetGpuInstanceId(handle), sample)
        else:
            pynvml.nvmlGpmSampleGet(handle, sample)


def _difference(first: Any, second: Any) -> dict[int, float]:
    request = pynvml.c_nvmlGpmMetricsGet_t()
    request.version = pynvml.NVML_GPM_METRICS_GET_VERSION
    request.numMetrics, request.sample1, request.sample2 = len(_METRICS), first, second
    for slot, metric in enumerate(_METRICS):
        request.metrics[slot].metricId = metric
    pynvml.nvmlGpmMetricsGet(request)
    return {
        answer.metricId: float(answer.value)
        for answer in request.metrics[: len(_METRICS)]
        if answer.nvmlReturn == pynvml.NVML_SUCCESS and math.isfinite(answer.value) and answer.value >= 0
    }
