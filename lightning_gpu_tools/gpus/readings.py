"""What was read of GPUs, and who has claimed them: units in the names, ``None`` = not reported.

All that a pick needs and nothing else, because making a dataclass costs a command that ends at once a millisecond.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

ComputeMode = Literal["default", "prohibited", "exclusive_process"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuProcess:
    """A process that the driver lists on a GPU.

    Attributes:
        pid: As the driver gives it: in a container this is the host's number, which may name another process here.
        memory_used_bytes: GPU memory of the process, ``None`` where the driver does not report it (Windows, WSL).
        user: Owner of the process, ``None`` where the process cannot be seen from here.
        name: Name of the process, ``None`` likewise.
        graphics_only: It draws (a desktop) and computes nothing.
        utilization_percent: How busy this process kept the GPU lately; ``None`` where not reported (MIG).
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
        index: Position in PCI bus order, as ``nvidia-smi`` shows it, for display; the UUID is the identity. A MIG
            instance has the index of its GPU.
        uuid: ``GPU-...`` or ``MIG-...``; ``None`` only if the driver does not report even that (see ``error``).
        name: Product name.
        pci_bus_id: ``domain:bus:device.function``.
        memory_total_bytes: All memory of the GPU.
        memory_free_bytes: What the driver reports as free; never computed from total and used, because drivers differ
            in what "used" includes.
        utilization_percent: Share of the time in which at least one kernel ran: the mean over the driver's buffer of
            the last seconds, or without one its instantaneous reading; ``None`` on MIG.
        processes: Processes with a context on the GPU, ``None`` if they cannot be read. Empty does not mean idle: in a
            container the processes of others are invisible.
        mig_mode: Whether the GPU is divided into MIG instances; ``None`` if unknown.
        mig_instances: The instances, if it is divided.
        mig_index: Number of a MIG instance on its GPU, as the driver counts; ``None`` for a whole GPU.
        compute_mode: As set with ``nvidia-smi -c``.
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
    mig_index: int | None = None
    compute_mode: ComputeMode | None = None
    integrated: bool | None = None
    error: str | None = None

    @property
    def number(self) -> str:
        """What the driver's tools call it: ``"2"``, and an instance of it ``"2:0"``."""
        return f"{self.index}" if self.mig_index is None else f"{self.index}:{self.mig_index}"


class GpuClaim(NamedTuple):
    """What a live job has said it needs of some GPUs, so that others do not take it away.

    Attributes:
        job: Random name of the job. It hands it on to its children, which count the claim as their own.
        uuids: The GPUs and MIG instances, best first.
        kind: ``memory``: the given number of bytes of each; ``whole``: all of each, but others are not refused;
            ``exclusive``: all of each, and others are refused.
        memory_bytes: How much of each, for the kind ``memory``; else ``None``.
        pid: Process that made the claim, as it sees itself: in a container this is the container's number.
        user: Owner of the claim, by the file system's word.
        owner_id: The same user's number.
        hostname: Host or container of the process.
        since_s: Time of the claim, seconds since the epoch.
        group: Where a launcher starts several processes of one job on this machine: its name for them, by which the
            others find the choice that the first one made. Else ``None``.
        process_ids: The job's processes as the driver lists them, as far as they could be recognized.
    """

    job: str
    uuids: tuple[str, ...]
    kind: Literal["memory", "whole", "exclusive"]
    memory_bytes: int | None
    pid: int
    user: str
    owner_id: int
    hostname: str
    since_s: float
    group: str | None = None
    process_ids: frozenset[int] = frozenset()


class GpuWaiter(NamedTuple):
    """A live job that waits for GPUs."""

    name: str  # random
    uuids: tuple[str, ...]  # that it could use
    requested: int  # how many of them it waits for
    pid: int  # as it sees itself
    user: str  # by the file system's word


class UtilizationSample(NamedTuple):
    """One entry of the driver's utilization buffer: in which share of a sample period at least one kernel ran."""

    time_s: float  # end of the period, seconds since the epoch
    percent: float
