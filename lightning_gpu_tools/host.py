"""The host's limits for this process (cores, memory, shared memory), and the use of them."""

import contextlib
import functools
import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path

import psutil

from lightning_gpu_tools.processes import TICKS_PER_S, read_kernel_file

_SHARED_MEMORY = Path("/dev/shm")  # workers pass batches through it
_CGROUP_MOUNT, _CGROUP_MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_STAT, _VMSTAT = Path("/proc/stat"), Path("/proc/vmstat")


@dataclass(frozen=True, kw_only=True, slots=True)
class HostBudget:
    """The resources of this host that all local ranks of a job share."""

    cores: float  # limited by the affinity mask and the cgroup's quota
    memory_available_bytes: int
    shm_free_bytes: int | None  # None without /dev/shm
    local_ranks: int = 1
    cores_in_reach: float | None = None  # cores that this job can get while other jobs run; None: not measured


def read_host_budget(*, local_ranks: int = 1) -> HostBudget:
    """Return the resources of the host that this process may use now."""
    cores = [float(len(os.sched_getaffinity(0)))]
    memory_bytes = [psutil.virtual_memory().available]
    # Limits apply anywhere on the path to the root, so the tightest one counts. Files: cgroup v2, or else v1.
    for folder in _cgroup_folders("cpu"):
        quota = _words(folder / "cpu.max") or _words(folder / "cpu.cfs_quota_us") + _words(folder / "cpu.cfs_period_us")
        if len(quota) == 2 and quota[0] not in ("max", "-1"):
            cores.append(int(quota[0]) / int(quota[1]))
    for folder in _cgroup_folders("memory"):
        limit = _words(folder / "memory.max") or _words(folder / "memory.limit_in_bytes")
        used = _words(folder / "memory.current") or _words(folder / "memory.usage_in_bytes")
        if limit and used and limit[0] != "max":
            # Excludes memory that the kernel frees on demand, like the kubelet's working set:
            # https://kubernetes.io/docs/concepts/scheduling-eviction/node-pressure-eviction/
            usage = _counters(folder / "memory.stat")
            cached = usage.get("total_inactive_file") or usage.get("inactive_file", 0)  # v1 has both; v2 the second
            memory_bytes.append(max(0, int(limit[0]) - max(0, int(used[0]) - cached)))
    return HostBudget(
        cores=min(cores),
        memory_available_bytes=min(memory_bytes),
        shm_free_bytes=psutil.disk_usage(str(_SHARED_MEMORY)).free if _SHARED_MEMORY.is_dir() else None,
        local_ranks=local_ranks,
    )


def children_cpu_s() -> float:
    """Return the CPU seconds of this process's children, including those that have ended."""
    process = psutil.Process()
    ended = process.cpu_times()
    total: float = ended.children_user + ended.children_system
    for child in process.children():
        with contextlib.suppress(psutil.NoSuchProcess):  # ended since the line above
            times = child.cpu_times()
            total += times.user + times.system
    return total


def idle_cpu_s() -> float | None:
    """Return the total idle seconds of this process's cores since boot; ``None`` if not reported."""
    # Not by psutil, whose list leaves out the cores that are offline.
    lines = re.findall(r"^cpu(\d+) \d+ \d+ \d+ (\d+) (\d+)", read_kernel_file(_STAT), re.MULTILINE)
    # A core that waits for a disk is also free for other threads.
    idle_s = {int(core): (int(idle) + int(waiting)) / TICKS_PER_S for core, idle, waiting in lines}
    mine = os.sched_getaffinity(0)
    # Otherwise it is hidden (mounted with subset=pid), or has a container's own numbers (lxcfs).
    return sum(idle_s[core] for core in mine) if idle_s.keys() >= mine else None


def resident_memory_bytes() -> int:
    """Return this process's memory, excluding mapped files, which the kernel drops when memory is short."""
    rss: int = _sum_bytes("self/status", "RssAnon|RssShmem") or psutil.Process().memory_info().rss  # Linux 4.5
    return rss


def private_memory_bytes(pids: list[int]) -> list[int]:
    """Return the bytes that each process does not share with others, for processes that report it."""
    private = [_sum_bytes(f"{pid}/smaps_rollup", "Private_Clean|Private_Dirty") for pid in pids]  # Linux 4.14
    return [size for size in private if size is not None]


def oom_kills() -> int:
    """Return the running total of this job's processes (without a cgroup: of all) killed by the OOM killer."""
    groups = reversed(_cgroup_folders("memory"))  # the innermost group holds this process's siblings
    files = [group / name for group in groups for name in ("memory.events", "memory.oom_control")]
    return next((found["oom_kill"] for found in map(_counters, [*files, _VMSTAT]) if "oom_kill" in found), 0)


def cores_in_reach(cores: float, used_or_idle: float) -> float:
    """Return the number of cores that a job could use while other jobs run, given its mean of used or idle cores."""
    taken = max(0.0, cores - used_or_idle)
    # A job that mostly slept would get its fair share once it has as many runnable threads as cores.
    return max(min(cores, used_or_idle), cores * cores / (cores + taken))


@functools.cache
def processor_name() -> str:
    """Return the name of the CPU, or of its architecture if the name is unknown."""
    name = re.search(r"^model name\s*:\s*(.+)$", read_kernel_file("/proc/cpuinfo"), re.MULTILINE)
    return name[1] if name else platform.processor() or platform.machine()


def _cgroup_folders(controller: str) -> list[Path]:
    """Return the folders of this process's cgroup and its ancestors, starting at the root."""
    folders: set[Path] = set()
    for line in read_kernel_file(_CGROUP_MEMBERSHIP).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        # cgroup v2 has one tree and names no controllers; v1 has one tree for each group of controllers.
        root = _CGROUP_MOUNT / controllers
        group = root / path.lstrip("/")
        folders.update(folder for folder in (group, *group.parents) if folder.is_relative_to(root) and folder.is_dir())
    return sorted(folders)


def _words(path: Path) -> list[str]:
    return read_kernel_file(path).split()


def _counters(path: Path) -> dict[str, int]:
    """Parse a file with a name and a number on each line."""
    words = _words(path)
    return {name: int(number) for name, number in zip(words[::2], words[1::2], strict=False)}


def _sum_bytes(file: str, fields: str) -> int | None:
    """Return the sum of the given fields of a file in ``/proc``; ``None`` if it has none of them."""
    kilobytes = re.findall(rf"^(?:{fields}):\s*(\d+) kB$", read_kernel_file(f"/proc/{file}"), re.MULTILINE)
    return 1024 * sum(map(int, kilobytes)) if kilobytes else None
