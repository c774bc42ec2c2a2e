"""What was sampled of a GPU, at one moment and over a window: units in the names.

``None`` = not reported.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_gpu_tools.gpus.readings import GpuProcess, UtilizationSample


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuSample:
    """What the sampler saw of one GPU since its last look; what the hardware does not report is ``None`` or empty.

    Attributes:
        uuid: The GPU or MIG instance.
        time_s: ``time.time()`` of the look.
        utilization: The driver's own samples since the last look, oldest first.
        memory_used_bytes: Memory in use by everyone, by the driver's word.
        memory_total_bytes: All memory of the GPU.
        power_watts: Power draw at the moment of the look.
        energy_joules: Energy counter since the driver was loaded; take differences.
        temperature_celsius: Temperature of the GPU core.
        throttled_s: Counter of the seconds for which power or heat held the clocks down, the sum of the next two; take
            differences.
        power_capped_s: The part of it due to the power limit. Normal at full load.
        thermal_throttled_s: The part of it due to heat.
        held_clock_percent: Clock of the multiprocessors against the highest they have, if power or heat has held it
            down since the last look.
        pcie_tx_bytes: Counter of the bytes sent over PCIe; take differences.
        pcie_rx_bytes: Counter of the bytes received over PCIe; take differences.
        sm_active_percent: Hopper and later (GPM): mean over the interval since the last look, as the next three.
        sm_occupancy_percent: Warps resident against what would fit.
        tensor_active_percent: Tensor cores busy.
        dram_active_percent: Memory bandwidth used.
        processes: Processes that compute on the GPU, without user and name; ``None`` if they cannot be read.
        errors: What the GPU itself reported since the last look, in words: Xid events, uncorrectable ECC errors.
        problems: What could not be read and should have been, in words. Each is told once, until it has worked again.
    """

    uuid: str
    time_s: float
    utilization: tuple[UtilizationSample, ...] = ()
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    power_watts: float | None = None
    energy_joules: float | None = None
    temperature_celsius: float | None = None
    throttled_s: float | None = None
    power_capped_s: float | None = None
    thermal_throttled_s: float | None = None
    held_clock_percent: float | None = None
    pcie_tx_bytes: int | None = None
    pcie_rx_bytes: int | None = None
    sm_active_percent: float | None = None
    sm_occupancy_percent: float | None = None
    tensor_active_percent: float | None = None
    dram_active_percent: float | None = None
    processes: tuple[GpuProcess, ...] | None = None
    errors: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuWindow:
    """All that the sampler saw of one GPU between two calls of ``take``; ``None`` = nothing was reported.

    Attributes:
        uuid: The GPU or MIG instance.
        duration_s: From the last look of the window before to the last look of this one; 0 if there was no look.
        utilization_observed_s: For how much of it the driver gave utilization samples.
        utilization_mean_percent: Time-weighted mean of the driver's samples.
        utilization_p5_percent: Utilization was at most this for 5 % of the time.
        utilization_p95_percent: Utilization was at most this for 95 % of the time.
        memory_used_bytes: At the last look.
        memory_used_peak_bytes: The most that any look saw.
        memory_total_bytes: All memory of the GPU.
        power_watts: At the last look.
        energy_joules: Energy used in the window, by the counter: without gaps from one window to the next.
        temperature_celsius: At the last look.
        throttled_percent: Share of the time in which power or heat held the clocks down, by the counters.
        power_capped_percent: Share of the time in which the power limit did.
        thermal_throttled_percent: Share of the time in which heat did.
        pcie_tx_bytes_per_second: Mean over the window, by the counter.
        pcie_rx_bytes_per_second: Mean over the window, by the counter.
        held_clock_percent: Mean clock of the multiprocessors against the highest they have, while power or heat held
            it down.
        sm_active_percent: Mean over the window, as the next three.
        sm_occupancy_percent: Warps resident against what would fit.
        tensor_active_percent: Tensor cores busy.
        dram_active_percent: Memory bandwidth used.
        processes: At the last look, with the mean utilization of each over the window.
        errors: What the GPU itself reported in this window, in words: Xid events, uncorrectable ECC errors.
        problems: What went wrong in this window, in words; each problem is told once.
    """

    uuid: str
    duration_s: float = 0.0
    utilization_observed_s: float = 0.0
    utilization_mean_percent: float | None = None
    utilization_p5_percent: float | None = None
    utilization_p95_percent: float | None = None
    memory_used_bytes: int | None = None
    memory_used_peak_bytes: int | None = None
    memory_total_bytes: int | None = None
    power_watts: float | None = None
    energy_joules: float | None = None
    temperature_celsius: float | None = None
    throttled_percent: float | None = None
    power_capped_percent: float | None = None
    thermal_throttled_percent: float | None = None
    pcie_tx_bytes_per_second: float | None = None
    pcie_rx_bytes_per_second: float | None = None
    held_clock_percent: float | None = None
    sm_active_percent: float | None = None
    sm_occupancy_percent: float | None = None
    tensor_active_percent: float | None = None
    dram_active_percent: float | None = None
    processes: tuple[GpuProcess, ...] | None = None
    errors: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
