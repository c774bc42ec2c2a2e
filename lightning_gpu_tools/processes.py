"""Identities of processes on this and other machines."""

import functools
import os
import time
from collections.abc import Collection
from typing import NamedTuple, TypedDict

INIT = 1  # becomes the parent of processes whose parent has ended
TICKS_PER_S = os.sysconf("SC_CLK_TCK")  # the unit of CPU times in /proc
_PF_KTHREAD = 0x00200000  # include/linux/sched.h


class ProcessStat(NamedTuple):
    """Fields of proc_pid_stat(5)."""

    state: str
    parent: int
    started_ticks: int  # since boot
    is_kernel_thread: bool


def read_kernel_file(path: str | os.PathLike[str]) -> str:
    """Return the text of a file in ``/proc`` or ``/sys``; empty if it is missing or hidden."""
    try:
        with open(path, errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def process_stat(pid: int) -> ProcessStat | None:
    """Return the kernel's facts about a process; ``None`` if it has ended or is hidden."""
    fields = read_kernel_file(f"/proc/{pid}/stat").rpartition(")")[2].split()  # skip the name, which may contain ")"
    if not fields:
        return None
    is_kernel_thread = bool(int(fields[6]) & _PF_KTHREAD)
    return ProcessStat(fields[0], int(fields[1]), int(fields[19]), is_kernel_thread)  # fields 3, 4, 22 and 9


def process_age_s() -> float | None:
    """Return the seconds since this process was started; ``None`` if unknown, as without ``/proc``."""
    stat = process_stat(os.getpid())
    return None if stat is None else time.clock_gettime(time.CLOCK_BOOTTIME) - stat.started_ticks / TICKS_PER_S


def descendants(pids: Collection[int], ancestors: Collection[int]) -> frozenset[int]:
    """Return those of the processes that are one of the ancestors or descend from one."""
    found = set()
    for pid in pids:
        ancestor = pid
        while ancestor and ancestor not in ancestors:
            stat = process_stat(ancestor)
            ancestor = stat.parent if stat else 0
        if ancestor:
            found.add(pid)
    return frozenset(found)


def pid_namespace() -> str | None:
    """Return the name of this process's PID namespace; ``None`` if unknown."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:  # /proc is not mounted
        return None


@functools.cache
def running_kernel() -> str:
    """Return 12 hex digits that identify this boot of this machine, including across containers and NFS."""
    boot = read_kernel_file("/proc/sys/kernel/random/boot_id")
    if boot:
        return boot.replace("-", "")[:12]
    import uuid  # not needed elsewhere

    return f"{uuid.getnode():012x}"  # some sandboxes hide the boot: there, all boots of a machine count as one


class ProcessId(TypedDict):
    """A process on any machine.

    Attributes:
        kernel: Identifier of its machine's boot.
        namespace: Name of its PID namespace, which differs between containers; ``None`` if unknown.
        pid: PID within that namespace.
        started_ticks: Start time in clock ticks since boot; ``None`` if unknown.
    """

    kernel: str
    namespace: str | None
    pid: int
    started_ticks: int | None


def process_id(pid: int) -> ProcessId:
    """Return the process that now has this PID in this process's namespace."""
    stat = process_stat(pid)
    ticks = None if stat is None else stat.started_ticks
    return ProcessId(kernel=running_kernel(), namespace=pid_namespace(), pid=pid, started_ticks=ticks)


def is_running(process: ProcessId) -> bool | None:
    """Return whether it is running; ``None`` if unknown: it is on another machine or in another container."""
    is_here = (process["kernel"], process["namespace"]) == (running_kernel(), pid_namespace())
    if process["started_ticks"] is None or not is_here:
        return None
    stat = process_stat(process["pid"])
    return stat is not None and stat.started_ticks == process["started_ticks"] and stat.state not in "ZX"
