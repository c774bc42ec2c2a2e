"""Identities of processes on this and other machines, and other facts that the kernel reports in ``/proc``."""

import functools
import os
import re
import time
from collections.abc import Collection, Mapping
from typing import NamedTuple, NoReturn, TypedDict

INIT = 1  # becomes the parent of processes whose parent has ended
TICKS_PER_S = os.sysconf("SC_CLK_TCK")  # the unit of CPU times in /proc
_PF_KTHREAD = 0x00200000  # include/linux/sched.h
# The PID of a process that became a command, perhaps after a long wait, and when: seconds since boot.
_BECAME = "LIGHTNING_GPU_TOOLS_BECAME_COMMAND"


class ProcessStat(NamedTuple):
    """Fields of proc_pid_stat(5)."""

    name: str
    state: str
    parent: int
    started_ticks: int  # since boot
    is_kernel_thread: bool
    cpu_s: float
    core: int  # on which it last ran


def read_kernel_file(path: str | os.PathLike[str]) -> str:
    """Return the text of a file in ``/proc`` or ``/sys``; empty if it is missing or hidden."""
    try:
        with open(path, errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def process_stat(pid: int | str) -> ProcessStat | None:
    """Return facts about a process, or a thread ``"PID/task/TID"``; ``None`` if it has ended or is hidden."""
    head, _, rest = read_kernel_file(f"/proc/{pid}/stat").rpartition(")")  # after the name, which may contain ")"
    fields = rest.split()  # from the third one on
    if not fields:
        return None
    return ProcessStat(
        name=head.partition("(")[2],
        state=fields[0],
        parent=int(fields[1]),
        started_ticks=int(fields[19]),
        is_kernel_thread=bool(int(fields[6]) & _PF_KTHREAD),
        cpu_s=(int(fields[11]) + int(fields[12])) / TICKS_PER_S,
        core=int(fields[36]),
    )


def become(command: list[str]) -> NoReturn:
    """Execute a command in place of this process."""
    os.environ[_BECAME] = f"{os.getpid()} {time.clock_gettime(time.CLOCK_BOOTTIME)}"
    os.execvp(command[0], command)


def process_age_s() -> float | None:
    """Return the seconds since this process was started, or became a command; ``None`` if unknown."""
    stat = process_stat(os.getpid())
    if stat is None:
        return None
    pid, _, became_s = os.environ.get(_BECAME, "").partition(" ")
    began_s = float(became_s) if pid == str(os.getpid()) else stat.started_ticks / TICKS_PER_S
    return time.clock_gettime(time.CLOCK_BOOTTIME) - began_s


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
    """Return 12 hex digits that identify this boot of this machine, including across containers and NFS.

    Empty if a sandbox hides them.
    """
    return read_kernel_file("/proc/sys/kernel/random/boot_id").replace("-", "")[:12]


class ProcessId(TypedDict):
    """A process on any machine."""

    kernel: str  # identifier of its machine's boot
    namespace: str | None  # name of its PID namespace, which differs between containers; `None` if unknown
    pid: int  # PID within that namespace
    started_ticks: int | None  # start time in clock ticks since boot; `None` if unknown


def process_id(pid: int) -> ProcessId:
    """Return the process that now has this PID in this process's namespace."""
    stat = process_stat(pid)
    ticks = None if stat is None else stat.started_ticks
    return ProcessId(kernel=running_kernel(), namespace=pid_namespace(), pid=pid, started_ticks=ticks)


def is_running(process: ProcessId) -> bool | None:
    """Return whether it is running; ``None`` if unknown: it is on another machine or in another container."""
    is_here = (process["kernel"], process["namespace"]) == (running_kernel(), pid_namespace())
    if process["started_ticks"] is None or not process["kernel"] or not is_here:
        return None
    stat = process_stat(process["pid"])
    return stat is not None and stat.started_ticks == process["started_ticks"] and stat.state not in "ZX"


class Mount(NamedTuple):
    """A mounted file system."""

    point: str
    file_system: str  # type, as the kernel names it: "ext4", "nfs4", "fuse.gcsfuse"
    device: str  # "8:1"; the same for all mounts of one file system
    folder: str  # the folder of the file system that is mounted: "/"
    user_id: int | None  # UID of the mounting user; None except for FUSE, which any user may mount


def read_mounts(process: int | str = "self") -> dict[str, Mount]:
    """Return the mounts that a process sees, by mount point; empty if they are hidden from this user."""
    return parse_mounts(read_kernel_file(f"/proc/{process}/mountinfo"))


def parse_mounts(mountinfo: str) -> dict[str, Mount]:
    """Parse the text of proc_pid_mountinfo(5). A later mount hides an earlier one at the same point."""
    found = {}
    for line in mountinfo.split("\n"):
        words, _, kind = line.partition(" - ")
        fields = words.split(" ")
        if kind and len(fields) > 4:
            # Spaces, tabs, newlines and backslashes are in octal.
            point = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), fields[4])
            user = re.search(r"\buser_id=(\d+)", kind.rpartition(" ")[2])  # not in the source, which is free text
            found[point] = Mount(point, kind.split(" ")[0], fields[2], fields[3], int(user[1]) if user else None)
    return found


def mount_of(path: str, mounts: Mapping[str, Mount]) -> Mount | None:
    """Return the mount with the longest mount point that contains a real path; ``None`` if there is none."""
    while path not in mounts and path != os.path.dirname(path):
        path = os.path.dirname(path)
    return mounts.get(path)
