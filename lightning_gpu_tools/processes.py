"""What distinguishes a process from all others, here and on other machines."""

from __future__ import annotations

import hashlib
import os
import platform
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple


class ProcessStat(NamedTuple):
    """What the kernel says of a process, see proc_pid_stat(5).

    Attributes:
        state: A letter; ``Z`` has ended, and its parent has not asked how.
        parent: Number of the process that started it.
        started_ticks: When it started, in clock ticks since boot.
    """

    state: str
    parent: int
    started_ticks: int


def process_stat(pid: int) -> ProcessStat | None:
    """Return what the kernel says of a process; ``None`` if it has ended, is hidden, or this is not Linux."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()  # the name before that may hold anything
    except OSError:
        return None
    return ProcessStat(fields[0].decode(), int(fields[1]), int(fields[19]))  # fields 3, 4 and 22


# The number of the process that gets every other one whose parent has ended.
INIT = 1


def started_s(stat: ProcessStat) -> float | None:
    """Return when a process started, in seconds since the epoch; ``None`` if this is not Linux."""
    try:
        lines = Path("/proc/stat").read_text().splitlines()
    except OSError:
        return None
    booted_s = next(int(line.split()[1]) for line in lines if line.startswith("btime "))
    return booted_s + stat.started_ticks / os.sysconf("SC_CLK_TCK")


def pid_namespace() -> str | None:
    """Return a name of the numbering of processes, which differs between containers."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:  # /proc is not mounted
        return None


def running_kernel() -> str:
    """Return 12 hex digits that tell one boot of one machine from any other, also across containers and NFS."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    except OSError:  # not Linux: a machine counts as one kernel for good
        boot = f"{platform.node()}-{uuid.getnode()}"
    return hashlib.sha256(boot.encode()).hexdigest()[:12]


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessId:
    """A process of some machine.

    Attributes:
        kernel: Tells the boot of its machine from any other.
        namespace: Name of the numbering of processes there, which differs between containers; ``None`` if unknown.
        pid: Its number.
        started_ticks: When it started, in clock ticks since boot; ``None`` if unknown.
    """

    kernel: str
    namespace: str | None
    pid: int
    started_ticks: int | None

    @classmethod
    def of(cls, pid: int) -> ProcessId:
        """Return the process that has this number now, as this process counts them."""
        stat = process_stat(pid)
        ticks = None if stat is None else stat.started_ticks
        return cls(kernel=running_kernel(), namespace=pid_namespace(), pid=pid, started_ticks=ticks)

    @property
    def is_running(self) -> bool | None:
        """Whether it runs; ``None`` where that cannot be seen: from another machine or container."""
        if self.started_ticks is None or (self.kernel, self.namespace) != (running_kernel(), pid_namespace()):
            return None
        stat = process_stat(self.pid)
        return stat is not None and stat.started_ticks == self.started_ticks and stat.state not in "ZX"
