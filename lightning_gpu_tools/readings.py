"""What was read from the machine: frozen dataclasses, units in the names, ``None`` = not reported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

ComputeMode = Literal["default", "exclusive_thread", "prohibited", "exclusive_process"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuProcess:
    """A process that the driver lists on a GPU.

    Attributes:
        pid: As the driver gives it: in a container this is the host's number, which may name another process here.
        memory_used_bytes: GPU memory of the process, ``None`` where the driver does not tell (Windows, WSL).
        user: Owner of the process, ``None`` where the process cannot be seen from here.
        name: Name of the process, ``None`` likewise.
        graphics_only: It draws (a desktop) and computes nothing.
        utilization_percent: How busy this process kept the GPU lately; ``None`` where the driver does not tell (MIG).
    """

    pid: int
    memory_used_bytes: int | None = None
    user: str | None = None
    name: str | None = None
    graphics_only: bool = False
    utilization_percent: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuReading:
    """One GPU, or one MIG instance of a GPU, at one moment.

    Attributes:
        index: Position in PCI bus order, the number that ``nvidia-smi`` shows. For display; the UUID is the identity. A
            MIG instance has the index of its GPU.
        uuid: ``GPU-...`` or ``MIG-...``; ``None`` only if the driver would not even tell that (see ``error``).
        name: Product name.
        pci_bus_id: ``domain:bus:device.function``.
        memory_total_bytes: All memory of the GPU.
        memory_free_bytes: What the driver reports as free; never computed from total and used, because drivers differ
            in what "used" includes.
        utilization_percent: Time-weighted mean over the samples the driver has buffered (the last seconds) of the share
            of time in which at least one kernel ran; its instantaneous reading where there is no buffer; ``None`` on
            MIG.
        processes: Processes with a context on the GPU, ``None`` if they cannot be read. Empty does not mean idle: in a
            container the processes of others are invisible.
        mig_mode: Whether the GPU is divided into MIG instances; ``None`` if it cannot tell.
        mig_instances: The instances, if it is divided.
        mig_gpu_instance_id: Of a MIG instance: the number of its GPU instance, as ``nvidia-smi mig -lgi`` shows it.
        mig_compute_instance_id: Of a MIG instance: the number of its compute instance, as ``nvidia-smi mig -lci``
            shows it.
        compute_mode: As set with ``nvidia-smi -c``.
        numa_node: NUMA node of the host that the GPU hangs on, ``None`` if unknown or not asked for.
        integrated: Whether the GPU shares the host's memory (Jetson, GB10).
        error: Why this GPU cannot be used, in words with what to do; ``None`` if it could be read.
    """

    index: int
    uuid: str | None = None
    name: str | None = None
    pci_bus_id: str | None = None
    memory_total_bytes: int | None = None
    memory_free_bytes: int | None = None
    utilization_percent: float | None = None
    processes: tuple[GpuProcess, ...] | None = None
    mig_mode: bool | None = None
    mig_instances: tuple[GpuReading, ...] = ()
    mig_gpu_instance_id: int | None = None
    mig_compute_instance_id: int | None = None
    compute_mode: ComputeMode | None = None
    numa_node: int | None = None
    integrated: bool | None = None
    error: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuLink:
    """How two GPUs of one machine are joined.

    Attributes:
        uuids: The two GPUs, sorted.
        nvlink: Whether peer access goes over NVLink (directly or through NVSwitch).
        topology_level: NVML's common-ancestor level: 0 same board, 10 one PCIe switch, 20 several switches, 30 host
            bridge, 40 same NUMA node, 50 across NUMA nodes. ``None`` if the driver does not tell.
    """

    uuids: tuple[str, str]
    nvlink: bool | None = None
    topology_level: int | None = None


class GpuClaim(NamedTuple):
    """What a live job has said it needs of some GPUs, so that others do not take it away.

    Attributes:
        job: Random name of the claim. The job hands it on to its children, which count the claim as their own.
        uuids: The GPUs and MIG instances, best first.
        kind: ``memory``: the given number of bytes of each; ``whole``: all of each, but others are not refused;
            ``exclusive``: all of each, and others are refused.
        memory_bytes: How much of each, for the kind ``memory``; else ``None``.
        pid: Process that made the claim, as it sees itself: in a container this is the container's number.
        user: Owner of the claim, by the file system's word where it has one.
        hostname: Host or container of the process.
        since_s: Time of the claim, seconds since the epoch.
        group: Where a launcher starts several processes of one job on this machine: its name for them, by which the
            others find the choice that the first one made. Else ``None``.
        process_ids: The job's processes as the driver lists them, as far as they could be told.
    """

    job: str
    uuids: tuple[str, ...]
    kind: Literal["memory", "whole", "exclusive"]
    memory_bytes: int | None
    pid: int
    user: str
    hostname: str
    since_s: float
    group: str | None = None
    process_ids: frozenset[int] = frozenset()


class GpuWaiter(NamedTuple):
    """A live job that waits for GPUs.

    Attributes:
        name: The smaller, the longer it has waited.
        uuids: The GPUs and MIG instances that it could use.
        requested: How many of them it waits for.
        pid: The process, as it sees itself.
        user: Its owner, by the file system's word where it has one.
        since_s: Since when, seconds since the epoch.
    """

    name: str
    uuids: tuple[str, ...]
    requested: int
    pid: int
    user: str
    since_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class UtilizationSample:
    """One entry of the driver's utilization buffer: the mean over the driver's sample period that ends at ``time_s``.

    Attributes:
        time_s: End of the period in seconds since the epoch, by the driver's clock on this host.
        percent: Share of the period in which at least one kernel ran, 0 to 100.
    """

    time_s: float
    percent: float


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
    sm_active_percent: float | None = None
    sm_occupancy_percent: float | None = None
    tensor_active_percent: float | None = None
    dram_active_percent: float | None = None
    processes: tuple[GpuProcess, ...] | None = None
    errors: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class StepBlock:
    """Consecutive steady training steps, added up. A step lasts from the start of its fetch to the start of the next.

    Attributes:
        steps: How many steps.
        wall_s: Their wall time.
        data_loading_s: Part of it in which the training thread waited for a batch.
        data_loading_cpu_s: CPU time the training thread itself spent in that wait, as seen in every tenth step; near
            zero where worker processes load.
        host_to_device_copy_s: Part of it spent handing the batch to the device.
        training_step_s: Part of it spent in forward, backward and optimizer, as the training thread sees it.
        paused_s: Part of it spent in validation and checkpoints.
        forward_s: The part of ``training_step_s`` spent in the model's ``training_step``: before any rank waits for
            another one; 0 where there is only one rank.
    """

    steps: int = 0
    wall_s: float = 0.0
    data_loading_s: float = 0.0
    data_loading_cpu_s: float = 0.0
    host_to_device_copy_s: float = 0.0
    training_step_s: float = 0.0
    paused_s: float = 0.0
    forward_s: float = 0.0

    def __add__(self, other: StepBlock) -> StepBlock:
        return StepBlock(**{name: getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__})

    def __sub__(self, other: StepBlock) -> StepBlock:
        return StepBlock(**{name: getattr(self, name) - getattr(other, name) for name in self.__dataclass_fields__})


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderSettings:
    """The settings of a ``torch.utils.data.DataLoader`` that decide how fast it delivers.

    Attributes:
        num_workers: Worker processes; 0 = the training process loads by itself.
        prefetch_factor: Batches each worker loads ahead; ``None`` without workers.
        persistent_workers: Whether the workers live on after an epoch.
        pin_memory: Whether batches are put into page-locked memory, from which a GPU can copy in the background.
        batch_size: Samples in a batch; ``None`` if the loader does not batch by itself.
    """

    num_workers: int
    prefetch_factor: int | None
    persistent_workers: bool
    pin_memory: bool
    batch_size: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class HostBudget:
    """What the host grants this process.

    Attributes:
        cores: CPU cores that can be used at once: the affinity mask, cut by the cgroup's quota, so possibly a fraction.
        cores_in_reach: How many of them this job can get while others are busy on the machine. ``None`` if it was not
            measured.
        memory_available_bytes: Memory that can still be taken, cut by the cgroup's limit.
        shm_free_bytes: Free space in ``/dev/shm``, through which workers hand over batches; ``None`` where there is
            none.
        local_ranks: Training processes on this machine that share the above.
    """

    cores: float
    memory_available_bytes: int
    shm_free_bytes: int | None
    local_ranks: int = 1
    cores_in_reach: float | None = None
