"""From what the sampler saw of a GPU to the metrics of a logger and the summary of a report. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_gpu_tools.gpus.readings import GpuReading
from lightning_gpu_tools.gpus.samples import GpuWindow
from lightning_gpu_tools.gpus.sharing import Sharing

# Metrics by their field in GpuWindow; utilization has three.
_OF_WINDOW = {
    "utilization_percent/mean": "utilization_mean_percent",
    "utilization_percent/p5": "utilization_p5_percent",
    "utilization_percent/p95": "utilization_p95_percent",
    "memory_used_bytes": "memory_used_bytes",
    "memory_total_bytes": "memory_total_bytes",
    "power_watts": "power_watts",
    "temperature_celsius": "temperature_celsius",
    "throttled_percent": "throttled_percent",
    "pcie_rx_bytes_per_second": "pcie_rx_bytes_per_second",
    "pcie_tx_bytes_per_second": "pcie_tx_bytes_per_second",
    "sm_active_percent": "sm_active_percent",
    "sm_occupancy_percent": "sm_occupancy_percent",
    "tensor_active_percent": "tensor_active_percent",
    "dram_active_percent": "dram_active_percent",
}
_OF_SHARING = {
    "own_memory_bytes": "own_memory_bytes",
    "others_memory_bytes": "others_memory_bytes",
    "own_utilization_percent": "own_utilization_percent",
    "others_utilization_percent": "others_utilization_percent",
}


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
        memory_used_bytes_max: Peak, everybody's use included.
        memory_total_bytes: Size of the memory.
        power_watts_mean: Mean power draw.
        energy_joules: Energy used during the run.
        temperature_celsius_max: Hottest moment.
        throttled_percent: Share of the time in which power or heat held the clocks down.
        own_memory_bytes: Memory of this job's processes at the last look.
        others_memory_bytes_max: The most that everybody else's listed processes used.
        own_utilization_percent: How busy this job's processes kept the GPU.
        others_utilization_percent: How busy all others kept it.
        sm_active_percent: Hopper and later: mean over the run, as the next three.
        sm_occupancy_percent: Warps resident against what would fit.
        tensor_active_percent: Tensor cores busy.
        dram_active_percent: Memory bandwidth used.
        errors: What the GPU itself reported: Xid events, uncorrectable ECC errors.
        timelines: Points (seconds since the start of training, value) of ``utilization_percent``,
            ``memory_used_bytes`` and ``power_watts``, at most 2000 of each.
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
    timelines: Mapping[str, Sequence[Sequence[float]]] = dataclasses.field(default_factory=dict)


def gpu_metrics(
    index: int, window: GpuWindow, sharing: Sharing, energy_joules: float | None, node: int = 0
) -> dict[str, float]:
    """Return what to log of one GPU, by name; what was not reported is absent.

    Args:
        index: The GPU's number on its node.
        window: What happened since the last point.
        sharing: Who uses what of it.
        energy_joules: Energy since training started.
        node: Its node; every one but the first stands in the name.
    """
    prefix = f"node{node}/gpu/{index}/" if node else f"gpu/{index}/"
    values = {name: getattr(window, field) for name, field in _OF_WINDOW.items()}
    values |= {name: getattr(sharing, field) for name, field in _OF_SHARING.items()}
    values["energy_joules"] = energy_joules
    return {prefix + name: float(value) for name, value in values.items() if value is not None}


def gpu_summary(
    gpu: GpuReading,
    window: GpuWindow,
    validation: GpuWindow,
    timelines: Mapping[str, Sequence[tuple[float, float]]],
    *,
    node: int,
    started_s: float,
    sharing: Sharing,
    others_memory_bytes_max: int | None,
    energy_joules: float | None,
) -> GpuSummary:
    """Return one GPU over a whole run.

    Args:
        gpu: Which one.
        window: The run outside of validation.
        validation: The run in validation.
        timelines: What it did over time, as ``sampler.Reader.timelines`` gives it.
        node: Its node.
        started_s: When training started, seconds since the epoch.
        sharing: Who used what of it, at the end.
        others_memory_bytes_max: The most memory that others used.
        energy_joules: Energy of the whole run.
    """
    power = [watts for _, watts in timelines.get("power_watts", ())]
    peaks = [window.memory_used_peak_bytes, validation.memory_used_peak_bytes]
    return GpuSummary(
        index=gpu.index,
        uuid=window.uuid,
        name=gpu.name,
        node=node,
        utilization_percent_mean=window.utilization_mean_percent,
        utilization_percent_p5=window.utilization_p5_percent,
        utilization_percent_p95=window.utilization_p95_percent,
        validation_utilization_percent_mean=validation.utilization_mean_percent,
        memory_used_bytes_max=max((peak for peak in peaks if peak is not None), default=None),
        memory_total_bytes=window.memory_total_bytes or validation.memory_total_bytes,
        power_watts_mean=sum(power) / len(power) if power else None,
        energy_joules=energy_joules,
        temperature_celsius_max=max((celsius for _, celsius in timelines.get("temperature_celsius", ())), default=None),
        throttled_percent=window.throttled_percent,
        own_memory_bytes=sharing.own_memory_bytes,
        others_memory_bytes_max=others_memory_bytes_max,
        own_utilization_percent=sharing.own_utilization_percent,
        others_utilization_percent=sharing.others_utilization_percent,
        sm_active_percent=window.sm_active_percent,
        sm_occupancy_percent=window.sm_occupancy_percent,
        tensor_active_percent=window.tensor_active_percent,
        dram_active_percent=window.dram_active_percent,
        errors=window.errors,
        timelines={
            name: [[round(time_s - started_s, 2), round(value, 2)] for time_s, value in timelines[name]]
            for name in ("utilization_percent", "memory_used_bytes", "power_watts")
            if name in timelines
        },
    )
