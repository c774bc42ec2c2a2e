"""The one table of GPU metrics: from a sample of the driver to a window, a logger and the report. Pure.

A new metric is one field of :class:`GpuSample` and one of :class:`GpuWindow`; one that the report has, too, is also a
field of :class:`GpuSummary`. Units are in the names; ``None`` = not reported.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal, NamedTuple

from lightning_gpu_tools.gpus.readings import GpuProcess, GpuReading, UtilizationSample
from lightning_gpu_tools.gpus.sharing import Sharing
from lightning_gpu_tools.training.timeline import Series


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuSample:
    """What the sampler saw of one GPU since the sample before; ``None`` or empty = not reported."""

    uuid: str  # of the GPU or MIG instance
    time_s: float  # time.time()
    utilization: tuple[UtilizationSample, ...] = ()  # the driver's own samples, oldest first
    memory_used_bytes: int | None = None  # by everyone
    memory_total_bytes: int | None = None
    driver_memory_bytes: int | None = None  # the part of it that the driver keeps for itself; it counts as used
    power_watts: float | None = None
    temperature_celsius: float | None = None
    # Counters, of which only differences mean something:
    energy_joules: float | None = None
    throttled_s: float | None = None  # for which power or heat held the clocks down, the sum of the next two
    power_capped_s: float | None = None  # normal at full load
    thermal_throttled_s: float | None = None
    pcie_tx_bytes: int | None = None
    pcie_rx_bytes: int | None = None
    # The multiprocessors' clock against their highest one, if power or heat has held it down since the sample before.
    held_clock_percent: float | None = None
    # Means since the sample before, by the performance monitors of Hopper and later:
    sm_active_percent: float | None = None
    sm_occupancy_percent: float | None = None  # warps resident against what would fit
    tensor_active_percent: float | None = None
    dram_active_percent: float | None = None  # memory bandwidth used
    processes: tuple[GpuProcess, ...] | None = None  # those that compute, without user and name
    lists_processes: bool = False  # whether their memory was read now, and not at the sample before
    errors: tuple[str, ...] = ()  # of the GPU itself, in words: Xid events, uncorrectable ECC errors
    problems: tuple[str, ...] = ()  # what could not be read and should have been; once, until it has worked again


# How the samples of a window become one value. The last three are of a counter: "rate" is its difference per second.
Reduction = Literal["last", "max", "mean", "p5", "p95", "difference", "rate", "percent_of_time"]


class Metric(NamedTuple):
    """A metric of a GPU; its unit is the end of its names."""

    field: str  # of GpuWindow
    source: str  # field of GpuSample that it is made of
    reduction: Reduction
    logged: str | None = None  # its name behind gpu/<i>/
    reported: str | None = None  # field of GpuSummary


def _of(source: str, reduction: Reduction, logged: str | None = None, reported: str | None = None) -> Any:
    return dataclasses.field(default=None, metadata={"metric": (source, reduction, logged, reported)})


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuWindow:
    """All that the sampler saw of one GPU in a window of time; ``None`` = nothing was reported.

    Of memory and temperature the last value is logged and the greatest one reported.
    """

    uuid: str
    duration_s: float = 0.0  # from the last sample before the window to its own last one; 0 without a sample
    utilization_observed_s: float = 0.0  # for how much of it the driver gave utilization samples
    # Source, reduction, name in a logger, name in the report.
    utilization_mean_percent: float | None = _of(
        "utilization", "mean", "utilization_percent/mean", "utilization_percent_mean"
    )
    utilization_p5_percent: float | None = _of("utilization", "p5", "utilization_percent/p5", "utilization_percent_p5")
    utilization_p95_percent: float | None = _of(
        "utilization", "p95", "utilization_percent/p95", "utilization_percent_p95"
    )
    memory_used_bytes: int | None = _of("memory_used_bytes", "last", "memory_used_bytes")
    memory_used_peak_bytes: int | None = _of("memory_used_bytes", "max", reported="memory_used_bytes_max")
    memory_total_bytes: int | None = _of("memory_total_bytes", "last", "memory_total_bytes", "memory_total_bytes")
    power_watts: float | None = _of("power_watts", "last", "power_watts")
    energy_joules: float | None = _of("energy_joules", "difference", reported="energy_joules")
    temperature_celsius: float | None = _of("temperature_celsius", "last", "temperature_celsius")
    temperature_max_celsius: float | None = _of("temperature_celsius", "max", reported="temperature_celsius_max")
    throttled_percent: float | None = _of("throttled_s", "percent_of_time", "throttled_percent", "throttled_percent")
    power_capped_percent: float | None = _of("power_capped_s", "percent_of_time")
    thermal_throttled_percent: float | None = _of("thermal_throttled_s", "percent_of_time")
    held_clock_percent: float | None = _of("held_clock_percent", "mean")
    pcie_tx_bytes_per_second: float | None = _of("pcie_tx_bytes", "rate", "pcie_tx_bytes_per_second")
    pcie_rx_bytes_per_second: float | None = _of("pcie_rx_bytes", "rate", "pcie_rx_bytes_per_second")
    sm_active_percent: float | None = _of("sm_active_percent", "mean", "sm_active_percent", "sm_active_percent")
    sm_occupancy_percent: float | None = _of(
        "sm_occupancy_percent", "mean", "sm_occupancy_percent", "sm_occupancy_percent"
    )
    tensor_active_percent: float | None = _of(
        "tensor_active_percent", "mean", "tensor_active_percent", "tensor_active_percent"
    )
    dram_active_percent: float | None = _of("dram_active_percent", "mean", "dram_active_percent", "dram_active_percent")
    processes: tuple[GpuProcess, ...] | None = None  # at the last sample, each with its mean utilization
    errors: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


METRICS = tuple(
    Metric(field.name, *field.metadata["metric"]) for field in dataclasses.fields(GpuWindow) if field.metadata
)


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuSummary:
    """One GPU over a whole run. What the hardware does not report is ``None``.

    Attributes:
        index: Torch device index on the node; with ``devices="all"`` the index that ``nvidia-smi`` shows.
        uuid: The GPU.
        name: Product name.
        node: Number of the node; ``index`` counts within it.
        utilization_percent_mean: Time-weighted over every sample of the driver outside of validation; the next two are
            percentiles of it.
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
        errors: Errors that the GPU reported: Xid events, uncorrectable ECC errors.
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
        """Return what another node needs of it: timelines only at the end of the run, and in little room."""
        sent = [name for name in _SENT if at_end and name in self.timelines]
        short = {name: self.timelines[name].at_most(_SENT[name]) for name in sent}
        rounded = {name: _rounded(series, series.begin_s) for name, series in short.items()}
        return dataclasses.replace(self, timelines=rounded)


# Our default for the points of timelines: with 1,024 GPUs these take 1 MB of a report.
_SENT = {"utilization_percent": 128, "memory_used_bytes": 32}


def gpu_metrics(
    index: int, window: GpuWindow, sharing: Sharing, energy_joules: float | None, node: int = 0
) -> dict[str, float]:
    """Return what to log of one GPU, by name; the energy is that since training started."""
    prefix = f"node{node}/gpu/{index}/" if node else f"gpu/{index}/"
    values = {metric.logged: getattr(window, metric.field) for metric in METRICS if metric.logged}
    values |= {**dataclasses.asdict(sharing), "energy_joules": energy_joules}
    return {f"{prefix}{name}": float(value) for name, value in values.items() if value is not None}


# Our default: eight machines of eight GPUs. With a dozen metrics each, a page of charts shows no more.
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
    for name, known in values.items():
        prefix = f"gpu/all/{name}"
        found |= {f"{prefix}/min": min(known), f"{prefix}/mean": fmean(known), f"{prefix}/max": max(known)}
    return found


def gpu_summary(
    gpu: GpuReading,
    window: GpuWindow,
    validation: GpuWindow,
    timelines: Mapping[str, Series],
    *,
    node: int,
    started_s: float,
    sharing: Sharing,
    others_memory_bytes_max: int | None,
) -> GpuSummary:
    """Return one GPU over a whole run, from its windows outside of validation and in it."""
    power = [watts for _, watts in timelines["power_watts"].points()] if "power_watts" in timelines else []
    return GpuSummary(
        index=gpu.index,
        uuid=window.uuid,
        name=gpu.name,
        node=node,
        validation_utilization_percent_mean=validation.utilization_mean_percent,
        power_watts_mean=fmean(power) if power else None,
        own_memory_bytes=sharing.own_memory_bytes,
        others_memory_bytes_max=others_memory_bytes_max,
        own_utilization_percent=sharing.own_utilization_percent,
        others_utilization_percent=sharing.others_utilization_percent,
        errors=window.errors,
        timelines={name: _rounded(series, series.begin_s - started_s) for name, series in timelines.items()},
        **{metric.reported: over_run(metric, window, validation) for metric in METRICS if metric.reported},
    )


def _rounded(series: Series, begin_s: float) -> Series:
    """Return the series as a file has it: whole numbers of bytes, percent and watts to one decimal."""
    values = [None if value is None else round(value, 1) if value < 1000 else round(value) for value in series.values]
    return Series(max(0.0, round(begin_s, 2)), series.interval_s, values)


def over_run(metric: Metric, window: GpuWindow, validation: GpuWindow) -> Any:
    """Return a metric over a whole run: peaks and counters count in validation, too; means and shares do not."""
    combine: Any = {"max": max, "last": max, "difference": sum}.get(metric.reduction)
    if combine is None:
        return getattr(window, metric.field)
    values = [getattr(phase, metric.field) for phase in (window, validation)]
    known = [value for value in values if value is not None]
    return combine(known) if known else None
