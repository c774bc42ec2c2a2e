"""The table of GPU metrics: from a driver sample to a window, a logger, and the report. Pure data and functions.

A new metric is a value that ``nvml/probe.py`` reads, and a field of :class:`GpuWindow` that says what becomes of it.
For the report, it is also a field of :class:`GpuSummary`. Names include units; ``None`` = not reported.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Annotated, Any, Literal, NamedTuple

from msgspec import Meta

from lightning_gpu_tools.gpus.readings import GpuProcess, UtilizationSample, not_none, weighted_mean


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuSample:
    """A sample of one GPU since the previous sample; what is not reported is missing or empty."""

    uuid: str  # of the GPU or MIG instance
    time_s: float  # time.time()
    utilization: tuple[UtilizationSample, ...] = ()  # the driver's samples, oldest first
    values: Mapping[str, int | float] = dataclasses.field(default_factory=dict)  # by the names in GpuProbe.read
    processes: tuple[GpuProcess, ...] | None = None  # compute processes, without user and name
    errors: tuple[str, ...] = ()  # Xid events of the GPU
    problems: tuple[str, ...] = ()  # failed reads; each is reported once until it works again

    def size(self, name: str) -> int | None:
        """Return a value in bytes; ``None`` if it is not reported."""
        return int(self.values[name]) if name in self.values else None


# Reduction of the samples in a window to one value
Reduction = Literal["last", "max", "mean", "p5", "p95", "sum"]


class Metric(NamedTuple):
    """A metric of a GPU. Its names end with its unit."""

    field: str  # field of GpuWindow, and of GpuSummary if it is reported
    source: str  # name of the value in a GpuSample that it is derived from
    reduction: Reduction
    logged: str  # logged name after gpu/<i>/
    meaning: str  # of the logged value, for the documentation; empty if it is not logged


def _by(reduction: Reduction, source: str = "", *, logged: str = "") -> Any:
    """Declare a metric. It is logged if ``logged`` says what it means. ``source`` defaults to the field.

    A maximum is a metric of its own. Of a whole run, ``last`` and ``max`` are the larger value of training and
    validation; others are those of training.
    """
    return dataclasses.field(default=None, metadata={"metric": (source, reduction, logged)})


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuWindow:
    """The metrics of one GPU over a window of time; ``None`` = not reported."""

    uuid: str = ""
    utilization_observed_s: float = 0.0  # seconds covered by the driver's utilization samples
    utilization_percent_mean: float | None = _by(
        "mean", "utilization", logged="share of time in which at least one kernel ran"
    )
    utilization_percent_p5: float | None = _by("p5", "utilization", logged="5th percentile of the driver's samples")
    utilization_percent_p95: float | None = _by("p95", "utilization", logged="95th percentile of the driver's samples")
    memory_used_bytes: int | None = _by("last", logged="used by all processes")
    memory_used_bytes_max: int | None = _by("max", "memory_used_bytes")
    memory_total_bytes: int | None = _by("last", logged="size of the memory")
    power_watts: float | None = _by("last", logged="power draw at the last poll")
    energy_joules: float | None = _by("sum")
    temperature_celsius: float | None = _by("last", logged="of the GPU core, at the last poll")
    temperature_celsius_max: float | None = _by("max", "temperature_celsius")
    throttled_percent: float | None = _by("mean", logged="share of time in which power or heat throttled the clocks")
    power_capped_percent: float | None = _by("mean")
    thermal_throttled_percent: float | None = _by("mean")
    held_clock_percent: float | None = _by("mean")
    power_limit_watts: float | None = _by("last")
    power_limit_watts_max: float | None = _by("last")
    pcie_tx_bytes_per_second: float | None = _by("mean", logged="sent over PCIe")
    pcie_rx_bytes_per_second: float | None = _by("mean", logged="received over PCIe")
    sm_active_percent: float | None = _by("mean", logged="active multiprocessors (Hopper and later)")
    sm_occupancy_percent: float | None = _by("mean", logged="resident warps relative to the maximum (Hopper and later)")
    tensor_active_percent: float | None = _by("mean", logged="activity of the tensor cores (Hopper and later)")
    dram_active_percent: float | None = _by("mean", logged="memory bandwidth in use (Hopper and later)")
    processes: tuple[GpuProcess, ...] | None = None  # at the last sample, each with its mean utilization
    others_memory_bytes: int | None = None
    own_utilization_percent: float | None = None  # by the processes of this job
    others_utilization_percent: float | None = None
    errors: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


METRICS = tuple(
    Metric(field.name, source or field.name, reduction, field.name.replace(f"_{reduction}", f"/{reduction}"), logged)
    for field in dataclasses.fields(GpuWindow)
    if field.metadata
    for source, reduction, logged in [field.metadata["metric"]]
)
_SHARES = {
    "others_memory_bytes": "used by other jobs",
    "own_utilization_percent": "share of time in which kernels of this job ran",
    "others_utilization_percent": "share of time in which kernels of other jobs ran",
}
# What gpu_metrics() returns: name after gpu/<i>/ -> meaning
LOGGED = {
    **{metric.logged: metric.meaning for metric in METRICS if metric.meaning},
    **_SHARES,
    "energy_joules": "used since training started, by the driver's counter",
}


@dataclass(frozen=True, slots=True)
class Series:
    """A quantity over time, as means over intervals of equal length."""

    begin_s: float  # start of the first interval, in seconds since training started
    interval_s: Annotated[float, Meta(ge=1e-9)]  # length of each interval
    values: Sequence[float | None]  # mean in each interval, in order; `None` where nothing was reported

    def points(self) -> list[tuple[float, float]]:
        """Return pairs of (middle of an interval, mean) where a value was reported, oldest first."""
        return [
            (self.begin_s + (number + 0.5) * self.interval_s, value)
            for number, value in enumerate(self.values)
            if value is not None
        ]

    def at_most(self, count: int) -> Series:
        """Return the series in at most ``count`` intervals, made longer by a power of two."""
        interval_s, values = self.interval_s, self.values
        while len(values) > count:
            pairs = [[value for value in values[i : i + 2] if value is not None] for i in range(0, len(values), 2)]
            interval_s, values = 2 * interval_s, [sum(pair) / len(pair) if pair else None for pair in pairs]
        return Series(self.begin_s, interval_s, values)


class Timeline:
    """A quantity over time in a bounded number of intervals. At the limit, neighboring intervals are merged in pairs.

    Intervals are ``width_s`` long at first and begin at the time of the first value.
    """

    def __init__(self, max_points: int, width_s: float) -> None:
        self._max_points = max_points
        self._width_s = width_s
        self._origin_s: float | None = None
        # By interval: the sum of values times weights, and the sum of weights.
        self._totals: list[float] = []
        self._weights: list[float] = []

    def add(self, time_s: float, value: float, weight: float = 1.0) -> None:
        """Add a value. Values within an interval are averaged by weight."""
        if self._origin_s is None:
            self._origin_s = time_s
        number = max(0, math.floor((time_s - self._origin_s) / self._width_s))
        while number >= self._max_points:
            number //= 2
            self._width_s *= 2
            self._totals = _in_pairs(self._totals)
            self._weights = _in_pairs(self._weights)
        missing = [0.0] * (number + 1 - len(self._totals))
        self._totals += missing
        self._weights += missing
        self._totals[number] += value * weight
        self._weights[number] += weight

    def series(self) -> Series:
        """Return the mean of every interval."""
        sums = zip(self._totals, self._weights, strict=True)
        means = [total / weight if weight > 0 else None for total, weight in sums]
        return Series(self._origin_s or 0.0, self._width_s, means)

    def points(self) -> list[tuple[float, float]]:
        """Return the points of the series."""
        return self.series().points()


def _in_pairs(sums: Sequence[float]) -> list[float]:
    return [sum(sums[i : i + 2]) for i in range(0, len(sums), 2)]


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuSummary:
    """The metrics of one GPU over a whole run. Values that the hardware does not report are ``None``."""

    index: int  # torch device index on the node; with `devices="all"` the index that `nvidia-smi` shows
    uuid: str  # UUID of the GPU
    name: str | None = None  # product name
    node: int = 0  # node number. `index` counts within the node.
    utilization_percent_mean: float | None = None  # time-weighted mean utilization outside validation
    memory_used_bytes_max: int | None = None  # peak memory use, including other users
    memory_total_bytes: int | None = None  # size of the memory
    power_watts_mean: float | None = None  # mean power draw
    temperature_celsius_max: float | None = None  # highest temperature
    throttled_percent: float | None = None  # share of time in which power or heat throttled the clocks
    others_memory_bytes_max: int | None = None  # peak memory of all other listed processes
    others_utilization_percent: float | None = None  # utilization of the GPU by other jobs
    # Share of time in which the driver reported the GPU as busy, but it waited in a collective for slower ranks; `None`
    # if unknown.
    rank_wait_percent: float | None = None
    sm_active_percent: float | None = None  # mean share of active multiprocessors (Hopper and later)
    tensor_active_percent: float | None = None  # mean activity of the tensor cores (Hopper and later)
    errors: tuple[str, ...] = ()  # errors that the GPU reported: Xid events
    # `utilization_percent`, `memory_used_bytes` and `power_watts` over the run, in at most 2000 intervals; empty for
    # the GPUs of nodes other than rank 0's.
    timelines: Mapping[str, Series] = dataclasses.field(default_factory=dict)


def gpu_metrics(index: int, window: GpuWindow, energy_joules: float | None, node: int = 0) -> dict[str, float]:
    """Return the metrics to log for one GPU, by name. The energy covers the time since training started."""
    prefix = f"node{node}/gpu/{index}/" if node else f"gpu/{index}/"
    values = {metric.logged: getattr(window, metric.field) for metric in METRICS if metric.meaning}
    values |= {name: getattr(window, name) for name in _SHARES}
    values["energy_joules"] = energy_joules
    return {f"{prefix}{name}": float(value) for name, value in values.items() if value is not None}


def with_shares(window: GpuWindow, own_pids: Collection[int] | None) -> GpuWindow:
    """Divide the use of a GPU between this job and others, given the driver's PIDs of this job.

    What the driver does not report of one process is unknown of its side.
    """
    if not window.processes or own_pids is None:  # an empty list does not mean idle, because containers hide processes
        return window
    own = [process for process in window.processes if process.pid in own_pids]
    others = [process for process in window.processes if process.pid not in own_pids]
    sizes = [process.memory_used_bytes for process in others]
    return dataclasses.replace(
        window,
        others_memory_bytes=None if None in sizes else sum(not_none(sizes)),
        own_utilization_percent=_utilization_of(own),
        others_utilization_percent=_utilization_of(others),
    )


def _utilization_of(processes: Sequence[GpuProcess]) -> float | None:
    percents = [process.utilization_percent for process in processes]
    return None if None in percents else min(sum(not_none(percents)), 100.0)


def mean_window(windows: Sequence[GpuWindow]) -> GpuWindow:
    """Return the mean metrics of several GPUs; of what jobs use, the largest."""
    values = {
        name: not_none(getattr(window, name) for window in windows)
        for name in [*(metric.field for metric in METRICS), *_SHARES]
    }
    means: dict[str, Any] = {
        name: (max if name in _SHARES else fmean)(known) for name, known in values.items() if known
    }
    # A GPU that was lost counts for as long as it was observed.
    percents = [window.utilization_percent_mean or 0.0 for window in windows]
    means["utilization_percent_mean"] = weighted_mean(percents, [one.utilization_observed_s for one in windows])
    return GpuWindow(**means)


def rounded(series: Series, begin_s: float) -> Series:
    """Round the series as in a report file: bytes to whole numbers, percent and watts to one decimal."""
    values = [None if value is None else round(value, 1) if value < 1000 else round(value) for value in series.values]
    return Series(max(0.0, round(begin_s, 2)), series.interval_s, values)


def over_run(window: GpuWindow, validation: GpuWindow) -> dict[str, Any]:
    """Return the report's metrics over a whole run. Peaks include validation; means do not."""
    found = {name: getattr(window, name) for name in (*_SHARES, "errors")}
    for metric in METRICS:
        value, other = getattr(window, metric.field), getattr(validation, metric.field)
        is_peak = metric.reduction in ("max", "last")
        found[metric.field] = max(not_none([value, other]), default=None) if is_peak else value
    return {name: value for name, value in found.items() if name in GpuSummary.__dataclass_fields__}
