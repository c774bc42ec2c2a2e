"""What was read of GPUs, and who has claimed them: units in the names, ``None`` = not reported.

Only what a pick needs: making a dataclass costs a millisecond.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar

_T = TypeVar("_T")
ComputeMode = Literal["default", "prohibited", "exclusive_process"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuProcess:
    """A process that the driver lists on a GPU.

    Attributes:
        pid: As the driver gives it: in a container the host's number, which may name another process here.
        memory_used_bytes: GPU memory, ``None`` where the driver does not report it (Windows, WSL).
        user: Owner, ``None`` where the process cannot be seen from here.
        name: Its name, ``None`` likewise.
        graphics_only: It draws (a desktop) and computes nothing.
        utilization_percent: How busy it kept the GPU lately; ``None`` where not reported (MIG).
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
        index: Position in PCI bus order, as in ``nvidia-smi``, for display; a MIG instance has that of its GPU.
        uuid: Its identity, ``GPU-...`` or ``MIG-...``; ``None`` if the driver does not report even that.
        name: Product name.
        pci_bus_id: ``domain:bus:device.function``.
        memory_total_bytes: All memory of the GPU.
        memory_free_bytes: What the driver reports as free; not total minus used, which drivers define differently.
        utilization_percent: Share of the time in which a kernel ran: the mean over the driver's buffer of the last
            seconds, or without one its momentary reading; ``None`` on MIG.
        processes: Processes with a context on the GPU, ``None`` if they cannot be read. Empty does not mean idle: in a
            container those of others are invisible.
        mig_mode: Whether the GPU is divided into MIG instances; ``None`` if unknown.
        mig_instances: The instances.
        mig_index: Number of a MIG instance on its GPU; ``None`` for a whole GPU.
        compute_mode: As set with ``nvidia-smi -c``.
        integrated: Whether the GPU shares the host's memory (Jetson, GB10).
        error: Why this GPU cannot be used, and what to do; ``None`` if it could be read.
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
        """What ``nvidia-smi`` calls it: ``"2"``, and an instance of it ``"2:0"``."""
        return f"{self.index}" if self.mig_index is None else f"{self.index}:{self.mig_index}"


class GpuClaim(NamedTuple):
    """What a live job needs of some GPUs, so that others do not take it away.

    Attributes:
        job: Random name of the job. Its children inherit it, and count the claim as their own.
        uuids: The GPUs and MIG instances, best first.
        kind: ``memory``: the given number of bytes of each; ``whole``: all of each, but others are not refused;
            ``exclusive``: all of each, and others are refused.
        memory_bytes: How much of each, for the kind ``memory``; else ``None``.
        pid: Process that made the claim, as it sees itself: in a container its number there.
        user: Owner of the claim, by the file system.
        owner_id: The same user's number.
        hostname: Host or container of the process.
        since_s: Time of the claim, seconds since the epoch.
        group: A launcher's name for the processes of one job on this machine, by which they find the choice of the
            first one; else ``None``.
        process_ids: The job's processes as the driver lists them, as far as they were recognized.
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
    """One entry of the driver's buffer: in which share of a period at least one kernel ran."""

    time_s: float  # end of the period, seconds since the epoch
    percent: float


def known(values: Iterable[_T | None]) -> list[_T]:
    """Return the values that were reported."""
    return [value for value in values if value is not None]
