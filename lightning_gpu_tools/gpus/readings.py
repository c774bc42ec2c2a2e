"""Readings of GPUs, and claims on them. ``None`` = not reported. Pure data and functions."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

_T = TypeVar("_T")
ComputeMode = Literal["default", "prohibited", "exclusive_process"]


class GpuProcess(NamedTuple):
    """A process that the driver lists on a GPU.

    Attributes:
        pid: PID from the driver.
        memory_used_bytes: GPU memory; ``None`` if the driver does not report it (WSL).
        user: Owner; ``None`` if the process is not visible from here.
        name: Process name; ``None`` if the process is not visible from here.
        graphics_only: Whether it only draws, like a desktop, and does not compute.
        utilization_percent: Its recent utilization of the GPU; ``None`` if not reported (MIG).
        is_foreign: Whether it runs in another container or on the host, as seen from a container. The same PID may
            belong to a different process here.
    """

    pid: int
    memory_used_bytes: int | None = None
    user: str | None = None
    name: str | None = None
    graphics_only: bool = False
    utilization_percent: float | None = None
    is_foreign: bool = False


FOREIGN = "a process of another container or the host"


class GpuReading(NamedTuple):
    """One GPU, or one MIG instance of a GPU, at one moment.

    Attributes:
        index: Position in PCI bus order, as in ``nvidia-smi``, for display; a MIG instance has its GPU's index.
        uuid: Identity, ``GPU-...`` or ``MIG-...``; ``None`` if the driver does not report it.
        name: Product name.
        pci_bus_id: ``domain:bus:device.function``.
        memory_total_bytes: Total memory of the GPU.
        memory_free_bytes: Free memory as reported, not total minus used, which drivers define differently.
        utilization_percent: Share of time in which a kernel ran, averaged over the driver's buffer of the last seconds.
            Without a buffer, the driver's current reading; ``None`` on MIG.
        processes: Processes with a context on the GPU; ``None`` if they cannot be read. In a container, other users'
            processes are invisible, so an empty list does not mean idle.
        mig_mode: Whether the GPU is divided into MIG instances; ``None`` if unknown.
        mig_instances: The instances.
        mig_index: Number of a MIG instance on its GPU; ``None`` for a whole GPU.
        compute_mode: As set with ``nvidia-smi -c``.
        compute_capability: Major and minor version, as in ``torch.cuda.get_device_capability()``.
        error: Reason that this GPU cannot be used, and a remedy; ``None`` if it could be read.
    """

    index: int  # type: ignore[assignment]  # tuples have a method of this name, which nobody needs here
    uuid: str | None = None
    name: str | None = None
    pci_bus_id: str | None = None
    memory_total_bytes: int | None = None
    memory_free_bytes: int | None = None
    utilization_percent: float | None = None
    processes: tuple[GpuProcess, ...] | None = None
    mig_mode: bool | None = None
    mig_instances: tuple["GpuReading", ...] = ()
    mig_index: int | None = None
    compute_mode: ComputeMode | None = None
    compute_capability: tuple[int, int] | None = None
    error: str | None = None

    @property
    def number(self) -> str:
        """Name in ``nvidia-smi``: ``"2"``, or ``"2:0"`` for a MIG instance."""
        return f"{self.index}" if self.mig_index is None else f"{self.index}:{self.mig_index}"

    def as_json(self) -> dict[str, Any]:
        """Return the fields, and those of its processes and instances."""
        processes = None if self.processes is None else [process._asdict() for process in self.processes]
        instances = [instance.as_json() for instance in self.mig_instances]
        return {**self._asdict(), "processes": processes, "mig_instances": instances}


class GpuClaim(NamedTuple):
    """A claim of a live job on some GPUs, recorded so that other jobs do not take them.

    Attributes:
        job: Random name of the job. Its children inherit the name, and treat the claim as their own.
        uuids: The GPUs and MIG instances, best first. Prefixes of their UUIDs if this user may not read the claim.
        kind: ``memory``: ``memory_bytes`` on each GPU. ``whole``: each whole GPU; others use it only as a last resort.
            ``exclusive``: each whole GPU; others cannot use it.
        memory_bytes: Claimed bytes on each GPU for the kind ``memory``; otherwise ``None``.
        pid: PID of the process that made the claim. ``None`` if its start time does not prove that it still has this
            PID here: it has ended and left the claim to a child, or is in another container.
        user: Owner of the claim, according to the file system.
        owner_id: UID of the owner.
        hostname: Host or container of the process; ``None`` if this user may not read the claim, which then counts as
            exclusive.
        since_s: Time of the claim, in seconds since the epoch.
        group: A launcher's name for the processes of one job on this machine, by which they find the choice of the
            first process; ``None`` without a launcher.
        process_ids: PIDs of the job's processes in the driver's list, if they were recognized.
    """

    job: str
    uuids: tuple[str, ...]
    kind: Literal["memory", "whole", "exclusive"]
    memory_bytes: int | None
    user: str
    owner_id: int
    hostname: str | None
    since_s: float
    pid: int | None = None
    group: str | None = None
    process_ids: frozenset[int] = frozenset()

    def __str__(self) -> str:
        return self.user if self.pid is None else f"{self.user} (pid {self.pid})"

    def is_on(self, uuid: str | None) -> bool:
        """Return whether it claims this GPU or MIG instance."""
        return uuid is not None and (uuid in self.uuids or (self.hostname is None and uuid.startswith(self.uuids)))


MAX_USERS = 3  # named in a message or a table; our default: one person can act as thousands of users (subuid(5))


def folded_claims(claims: Iterable[GpuClaim], describe: Callable[[GpuClaim], str], max_each: int = 1) -> list[str]:
    """Describe at most ``max_each`` claims of each of three users, and count the others.

    A user's only claim is always described.
    """
    of_users: dict[str, list[GpuClaim]] = {}
    for claim in claims:
        of_users.setdefault(claim.user, []).append(claim)
    lines: list[str] = []
    for user, those in [*of_users.items()][:MAX_USERS]:
        shown = len(those) if len(those) <= max(1, max_each) else max_each
        lines += map(describe, those[:shown])
        if left := len(those) - shown:
            lines.append(f"and {left:,} more of {user}" if shown else f"{left:,} claims of {user}")
    if others := [*of_users.values()][MAX_USERS:]:
        lines.append(f"and {sum(map(len, others)):,} more of {len(others):,} other users")
    return lines


class GpuWaiter(NamedTuple):
    """A live job that waits for GPUs."""

    name: str  # random
    uuids: tuple[str, ...]  # GPUs that it could use
    requested: int  # number of GPUs that it waits for
    user: str  # according to the file system
    owner_id: int = -1  # UID of the user
    pid: int | None = None  # as in GpuClaim

    def __str__(self) -> str:
        return self.user if self.pid is None else f"{self.user} (pid {self.pid})"


class UtilizationSample(NamedTuple):
    """One entry of the driver's buffer: the share of a period in which at least one kernel ran."""

    time_s: float  # end of the period, seconds since the epoch
    percent: float


def not_none(values: Iterable[_T | None]) -> list[_T]:
    """Return the values that were reported."""
    return [value for value in values if value is not None]


# Longest period that one sample covers. nvml.h, nvmlUtilization_t: "between 1 second and 1/6 second, depending on the
# product". Beyond this period, utilization is unknown.
LONGEST_PERIOD_S = 1.0


def weights_s(samples: Sequence[UtilizationSample], previous_s: float | None = None) -> list[float]:
    """Return the seconds that each sample covers, oldest first. Without ``previous_s``, the first equals the second."""
    if not samples:
        return []
    times = [sample.time_s for sample in samples]
    if previous_s is None:
        previous_s = times[0] - (times[1] - times[0] if len(times) > 1 else LONGEST_PERIOD_S)
    periods = [end - begin for begin, end in zip([previous_s, *times], times, strict=False)]
    return [min(max(period, 0.0), LONGEST_PERIOD_S) for period in periods]


def weighted_mean(values: Sequence[float], weights: Sequence[float]) -> float | None:
    """Return the weighted mean of the values; ``None`` if the weights add up to 0."""
    total = math.fsum(weights)
    if total <= 0:
        return None
    return math.fsum(value * weight for value, weight in zip(values, weights, strict=True)) / total
