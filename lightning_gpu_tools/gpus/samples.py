"""What was sampled of a GPU at one moment: units in the names, ``None`` = not reported."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_gpu_tools.gpus.readings import GpuProcess, UtilizationSample


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuSample:
    """What the sampler saw of one GPU since the sample before; what the hardware does not report is ``None`` or empty.

    Attributes:
        uuid: The GPU or MIG instance.
        time_s: ``time.time()`` of the sample.
        utilization: The driver's own samples since then, oldest first.
        memory_used_bytes: Memory in use by everyone, by the driver's word.
        memory_total_bytes: All memory of the GPU.
        power_watts: Power draw at this moment.
        energy_joules: Energy counter since the driver was loaded; take differences.
        temperature_celsius: Temperature of the GPU core.
        throttled_s: Counter of the seconds for which power or heat held the clocks down, the sum of the next two; take
            differences.
        power_capped_s: The part of it due to the power limit. Normal at full load.
        thermal_throttled_s: The part of it due to heat.
        held_clock_percent: Clock of the multiprocessors against the highest they have, if power or heat has held it
            down since then.
        pcie_tx_bytes: Counter of the bytes sent over PCIe; take differences.
        pcie_rx_bytes: Counter of the bytes received over PCIe; take differences.
        sm_active_percent: Hopper and later (GPM): mean over the interval since then, as the next three.
        sm_occupancy_percent: Warps resident against what would fit.
        tensor_active_percent: Tensor cores busy.
        dram_active_percent: Memory bandwidth used.
        processes: Processes that compute on the GPU, without user and name; ``None`` if they cannot be read.
        errors: What the GPU itself reported since then, in words: Xid events, uncorrectable ECC errors.
        problems: What could not be read and should have been, in words; once, until it has worked again.
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
