"""Aggregation of the samples of a GPU over a window of time. No driver calls, no threads."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightning_gpu_tools.gpus.metrics import METRICS, GpuSample, GpuWindow, Metric
from lightning_gpu_tools.gpus.readings import LONGEST_PERIOD_S, weighted_mean, weights_s

# Metrics that need more than the last sample, or than the driver's own samples.
_COLLECTED = [metric for metric in METRICS if metric.reduction != "last" and metric.source != "utilization"]


def percentile(seconds: Mapping[int, float], share: float) -> float | None:
    """Return the lowest value that was not exceeded for this share (0 to 1) of the time, given the seconds of each."""
    # Rounding errors in the sum must not push a percentile beyond the last value.
    below_s, wanted_s = 0.0, share * sum(seconds.values()) * (1 - 1e-9)
    for value in sorted(seconds):
        below_s += seconds[value]
        if below_s >= wanted_s:
            return float(value)
    return None


def overlap_s(phases: Sequence[tuple[float, str]], phase: str, begin_s: float, end_s: float) -> float:
    """Return the seconds between two times that belong to a phase. ``phases`` are the time and name of each start."""
    total_s, until_s = 0.0, end_s
    for since_s, name in reversed(phases):
        if name == phase:
            total_s += max(0.0, until_s - max(since_s, begin_s))
        until_s = min(until_s, since_s)
        if since_s <= begin_s:
            break
    return total_s


class WindowBuilder:
    """An aggregate of the samples of one GPU until it is taken.

    ``overlap_s`` returns the seconds between two times that belong to the window; sums are divided in proportion.
    """

    def __init__(self, uuid: str, overlap_s: Callable[[float, float], float]) -> None:
        self._uuid = uuid
        self._overlap_s = overlap_s
        # Kept from one window to the next:
        self._sample_s: float | None = None
        self._utilization_s: float | None = None
        self._begin()

    def _begin(self) -> None:
        self._last: GpuSample | None = None
        # Percent -> seconds; the driver reports whole percents.
        self._utilization: defaultdict[int, float] = defaultdict(float)
        self._maxima: dict[str, float] = {}
        # A quantity times seconds, or a sum, and the seconds; by source or process.
        self._sums: dict[str | int, tuple[float, float]] = {}
        self._errors: dict[str, None] = {}
        self._problems: dict[str, None] = {}

    def add(self, sample: GpuSample) -> None:
        """Add the next sample."""
        for entry, seconds in zip(sample.utilization, weights_s(sample.utilization, self._utilization_s), strict=True):
            counted_s = self._overlap_s(entry.time_s - seconds, entry.time_s)
            if counted_s > 0:
                self._utilization[round(entry.percent)] += counted_s
            self._utilization_s = entry.time_s
        before_s, self._sample_s = self._sample_s, sample.time_s
        begin_s = sample.time_s - LONGEST_PERIOD_S if before_s is None else min(before_s, sample.time_s)
        counted_s = self._overlap_s(begin_s, sample.time_s)
        share = counted_s / (sample.time_s - begin_s) if sample.time_s > begin_s else 1.0
        self._errors |= dict.fromkeys(sample.errors)
        self._problems |= dict.fromkeys(sample.problems)
        if share <= 0:
            return
        for metric in _COLLECTED:
            value = sample.values.get(metric.source)
            if value is not None and metric.reduction == "max":
                self._maxima[metric.source] = max(value, self._maxima.get(metric.source, value))
            elif value is not None:
                self._sum_up(metric.source, value * (share if metric.reduction == "sum" else counted_s), counted_s)
        for process in sample.processes or ():
            if process.utilization_percent is not None:
                self._sum_up(process.pid, process.utilization_percent * counted_s, counted_s)
        self._last = sample

    def _sum_up(self, key: str | int, amount: float, seconds: float) -> None:
        total, total_s = self._sums.get(key, (0.0, 0.0))
        self._sums[key] = total + amount, total_s + seconds

    def take(self) -> GpuWindow:
        """Return the window since the last call, and begin a new one."""
        window = self.so_far()
        self._begin()
        return window

    def so_far(self) -> GpuWindow:
        """Return the window since the last ``take`` without ending it."""
        last = self._last or GpuSample(uuid=self._uuid, time_s=0.0)
        metrics: dict[str, Any] = {metric.field: self._reduced(metric, last) for metric in METRICS}
        processes = []
        for process in last.processes or ():
            total, seconds = self._sums.get(process.pid, (0.0, 0.0))
            processes.append(process._replace(utilization_percent=total / seconds if seconds > 0 else None))
        return GpuWindow(
            uuid=self._uuid,
            utilization_observed_s=sum(self._utilization.values()),
            processes=None if last.processes is None else tuple(processes),
            errors=tuple(self._errors),
            problems=tuple(self._problems),
            **metrics,
        )

    def _reduced(self, metric: Metric, last: GpuSample) -> float | None:
        source, reduction = metric.source, metric.reduction
        if source == "utilization":
            percents = self._utilization
            if reduction == "mean":
                return weighted_mean([*percents], [*percents.values()])
            return percentile(percents, int(reduction[1:]) / 100)
        if reduction == "last":
            return last.values.get(source)
        if reduction == "max":
            return self._maxima.get(source)
        total, seconds = self._sums.get(source, (None, 0.0))
        if total is None or reduction == "sum":
            return total
        if seconds <= 0:
            return None
        # Power and heat may throttle the clocks at the same time, and their counters advance in steps of 0.1 s.
        return min(total / seconds, 100.0) if metric.field.endswith("_percent") else total / seconds
