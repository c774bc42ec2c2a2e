"""The one table of GPU metrics: from a sample of the driver to a window, a logger and the report. Pure.

A new metric is one field of :class:`GpuSample` and one of :class:`GpuWindow`; if the report is to have it, also one of
the same name in :class:`GpuSummary`. Units are in the names; ``None`` = not reported.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal, NamedTuple

from lightning_gpu_tools.gpus.readings import GpuProcess, Sharing, UtilizationSample, known
from lightning_gpu_tools.training.timeline import Series


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuSample:
    """One GPU since the sample before; ``None`` or empty = not reported."""

    uuid: str  # of the GPU or MIG instance
    time_s: float  # time.time()
    utilization: tuple[UtilizationSample, ...] = ()  # the driver's own samples, oldest first
    memory_used_bytes: int | None = None  # by everyone
    memory_total_bytes: int | None = None
    driver_memory_bytes: int | None = None  # what the driver keeps for itself; counts as used
    power_watts: float | None = None
    temperature_celsius: float | None = None
    # Counters:
    energy_joules: float | None = None
    throttled_s: float | None = None  # power or heat held the clocks down, the sum of the next two
    power_capped_s: float | None = None  # normal at full load
    thermal_throttled_s: float | None = None
    pcie_tx_bytes: int | None = None
    pcie_rx_bytes: int | None = None
    held_clock_percent: float | None = None  # of the highest SM clock, if power or heat has held it down
    # Means since the sample before (Hopper and later):
    sm_active_percent: float | None = None
    sm_occupancy_percent: float | None = None
    tensor_active_percent: float | None = None
    dram_active_percent: float | None = None
    processes: tuple[GpuProcess, ...] | None = None  # those that compute, without user and name
    lists_processes: bool = False  # whether their memory was read now, and not at the sample before
    errors: tuple[str, ...] = ()  # of the GPU itself: Xid events, uncorrectable ECC errors
    problems: tuple[str, ...] = ()  # what could not be read, once until it has worked again


# How the samples of a window become one value; the last three are for counters.
Reduction = Literal["last", "max", "mean", "p5", "p95", "difference", "rate", "percent_of_time"]


class Metric(NamedTuple):
    """A metric of a GPU; its unit is the end of its names."""

    field: str  # of GpuWindow, and of GpuSummary if it is reported
    source: str  # field of GpuSample that it is made of
    reduction: Reduction
    logged: str | None  # its name behind gpu/<i>/


def _by(reduction: Reduction, source: str = "", *, logged: bool | str = False) -> Any:
    """Declare a metric of this source, by default of its own name, logged by its own name or another."""
    return dataclasses.field(default=None, metadata={"metric": (source, reduction, logged)})


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuWindow:
    """One GPU in a window of time; ``None`` = nothing was reported."""

    uuid: str
    utilization_observed_s: float = 0.0  # for how long the driver gave utilization samples
    utilization_percent_mean: float | None = _by("mean", "utilization", logged="utilization_percent/mean")
    utilization_percent_p5: float | None = _by("p5", "utilization", logged="utilization_percent/p5")
    utilization_percent_p95: float | None = _by("p95", "utilization", logged="utilization_percent/p95")
    memory_used_bytes: int | None = _by("last", logged=True)
    memory_used_bytes_max: int | None = _by("max", "memory_used_bytes")
    memory_total_bytes: int | None = _by("last", logged=True)
    power_watts: float | None = _by("last", logged=True)
    energy_joules: float | None = _by("difference")
    temperature_celsius: float | None = _by("last", logged=True)
    temperature_celsius_max: float | None = _by("max", "temperature_celsius")
    throttled_percent: float | None = _by("percent_of_time", "throttled_s", logged=True)
    power_capped_percent: float | None = _by("percent_of_time", "power_capped_s")
    thermal_throttled_percent: float | None = _by("percent_of_time", "thermal_throttled_s")
    held_clock_percent: float | None = _by("mean")
    pcie_tx_bytes_per_second: float | None = _by("rate", "pcie_tx_bytes", logged=True)
    pcie_rx_bytes_per_second: float | None = _by("rate", "pcie_rx_bytes", logged=True)
    sm_active_percent: float | None = _by("mean", logged=True)
    sm_occupancy_percent: float | None = _by("mean", logged=True)
    tensor_active_percent: float | None = _by("mean", logged=True)
    dram_active_percent: float | None = _by("mean", logged=True)
    processes: tuple[GpuProcess, ...] | None = None  # at the last sample, each with its mean utilization
    errors: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


def _metric(field: str, source: str, reduction: Reduction, logged: bool | str) -> Metric:
    return Metric(field, source or field, reduction, field if logged is True else logged or None)


METRICS = tuple(
    _metric(field.name, *field.metadata["metric"]) for field in dataclasses.fields(GpuWindow) if field.metadata
)


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuSummary:
    """One GPU over a whole run. What the hardware does not report is ``None``.

    Attributes:
        index: Torch device index on the node; with ``devices="all"`` the index that ``nvidia-smi`` shows.
        uuid: The GPU.
        name: Product name.
        node: Number of the node; ``index`` counts within it.
        utilization_percent_mean: Outside of validation, weighted by time; the next two are percentiles of it.
        utilization_percent_p5: 5th percentile.
        utilization_percent_p95: 95th percentile.
        validation_utilization_percent_mean: The same mean, in validation.
        memory_used_bytes_max: Peak, including other users.
        memory_total_bytes: Size of the memory.
        power_watts_mean: Mean power draw.
        energy_joules: Energy used during the run.
        temperature_celsius_max: Hottest moment.
        throttled_percent: Share of the time in which power or heat throttled the clocks.
        own_memory_bytes: Memory of this job's processes at the last sample.
        others_memory_bytes_max: Peak memory of all other listed processes.
        own_utilization_percent: How busy this job's processes kept the GPU.
        others_utilization_percent: How busy other jobs kept it.
        sm_active_percent: Hopper and later: mean over the run, as the next three.
        sm_occupancy_percent: Warps resident against what would fit.
        tensor_active_percent: Tensor cores busy.
        dram_active_percent: Memory bandwidth used.
        errors: What the GPU reported: Xid events, uncorrectable ECC errors.
        timelines: ``utilization_percent``, ``memory_used_bytes`` and ``power_watts`` over the run, in at most 2000
            intervals; of other nodes than the first only the first two, in at most 128 and 32.
    """

    index: int
    uuid: str
    name: str | None = None
    node: int = 0
    utilization_percent_mean: float | None = None
    utilization_percent_p5: float | None = None
    utilization_percent_p95: float | None = None
    validation_utilization_percent_mean: float | None = None
    memory_used_bytes_max: int | None = None
    memory_total_bytes: int | None = None
    power_watts_mean: float | None = None
    energy_joules: float | None = None
    temperature_celsius_max: float | None = None
    throttled_percent: float | None = None
    own_memory_bytes: int | None = None
    others_memory_bytes_max: int | None = None
    own_utilization_percent: float | None = None
    others_utilization_percent: float | None = None
    sm_active_percent: float | None = None
    sm_occupancy_percent: float | None = None
    tensor_active_percent: float | None = None
    dram_active_percent: float | None = None
    errors: tuple[str, ...] = ()
    timelines: Mapping[str, Series] = dataclasses.field(default_factory=dict)

    def to_send(self, *, at_end: bool) -> GpuSummary:
        """Return what another node needs of it: timelines only at the end, and in little room."""
        sent = [name for name in _SENT if at_end and name in self.timelines]
        short = {name: self.timelines[name].at_most(_SENT[name]) for name in sent}
        timelines = {name: rounded(series, series.begin_s) for name, series in short.items()}
        return dataclasses.replace(self, timelines=timelines)


# Our default for the points of timelines: with 1,024 GPUs these take 1 MB of a report.
_SENT = {"utilization_percent": 128, "memory_used_bytes": 32}


def gpu_metrics(
    index: int, window: GpuWindow, sharing: Sharing, energy_joules: float | None, node: int = 0
) -> dict[str, float]:
    """Return what to log of one GPU, by name; the energy is that since training started."""
    prefix = f"node{node}/gpu/{index}/" if node else f"gpu/{index}/"
    values = {metric.logged: getattr(window, metric.field) for metric in METRICS if metric.logged}
    values |= {**sharing._asdict(), "energy_joules": energy_joules}
    return {f"{prefix}{name}": float(value) for name, value in values.items() if value is not None}


# Our default: eight machines of eight GPUs, with a dozen metrics each.
MAX_NAMED_GPUS = 64


def count_gpus(by_node: Sequence[Mapping[str, float]], nodes: int) -> int:
    """Return how many GPUs a job has on so many nodes, by the metrics of the nodes that were heard."""
    heard = [{name.partition("gpu/")[2].partition("/")[0] for name in metrics} for metrics in by_node if metrics]
    return sum(map(len, heard)) * nodes // max(1, len(heard))


def job_metrics(by_node: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return what to log of all GPUs of a job instead of each by name: ``gpu/all/<metric>/{min,mean,max}``."""
    values: defaultdict[str, list[float]] = defaultdict(list)
    for metrics in by_node:
        for name, value in metrics.items():
            values[name.partition("gpu/")[2].partition("/")[2]].append(value)
    found: dict[str, float] = {}
    for name, numbers in values.items():
        prefix = f"gpu/all/{name}"
        found |= {f"{prefix}/min": min(numbers), f"{prefix}/mean": fmean(numbers), f"{prefix}/max": max(numbers)}
    return found


def rounded(series: Series, begin_s: float) -> Series:
    """Return the series as a file has it: bytes as whole numbers, percent and watts to one decimal."""
    values = [None if value is None else round(value, 1) if value < 1000 else round(value) for value in series.values]
    return Series(max(0.0, round(begin_s, 2)), series.interval_s, values)


def over_run(window: GpuWindow, validation: GpuWindow) -> dict[str, Any]:
    """Return the reported metrics of a whole run: peaks and counters include validation, means do not."""
    found = {}
    for metric in METRICS:
        if metric.field in GpuSummary.__dataclass_fields__:
            combine: Any = {"max": max, "last": max, "difference": sum}.get(metric.reduction)
            phases = (window,) if combine is None else (window, validation)
            values = known(getattr(phase, metric.field) for phase in phases)
            found[metric.field] = None if not values else values[0] if combine is None else combine(values)
    return found
