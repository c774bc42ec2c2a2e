"""What the host grants this process: cores by affinity and cgroup quota, memory, shared memory; CPU time used."""

from __future__ import annotations

import functools
import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path

import psutil

_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, kw_only=True, slots=True)
class HostBudget:
    """What the host grants this process.

    Attributes:
        cores: CPU cores that can be used at once: the affinity mask, limited by the cgroup's quota; may be a fraction.
        cores_in_reach: How many of them this job can get beside other jobs; ``None`` if it was not measured.
        memory_available_bytes: Memory that can still be allocated, limited by the cgroup.
        shm_free_bytes: Free space in ``/dev/shm``, through which workers pass batches; ``None`` where there is none.
        local_ranks: Training processes on this machine that share the above.
    """

    cores: float
    memory_available_bytes: int
    shm_free_bytes: int | None
    local_ranks: int = 1
    cores_in_reach: float | None = None


def read_host_budget(
    *,
    local_ranks: int = 1,
    cgroup_mount: Path = Path("/sys/fs/cgroup"),
    cgroup_membership: Path = Path("/proc/self/cgroup"),
) -> HostBudget:
    """Return what this process may use of the host right now.

    Args:
        local_ranks: Training processes on this machine that share the budget.
        cgroup_mount: Where the cgroup file system (v1 or v2) is mounted.
        cgroup_membership: The file that says which cgroups this process is in.
    """
    cores = [float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)]
    memory_bytes = [psutil.virtual_memory().available]
    # A limit anywhere on the path to the root applies, so the tightest one counts.
    for folder in _cgroup_folders("cpu", cgroup_mount, cgroup_membership):
        quota = _words(folder / "cpu.max") or _words(folder / "cpu.cfs_quota_us") + _words(folder / "cpu.cfs_period_us")
        if len(quota) == 2 and quota[0] not in ("max", "-1"):
            cores.append(int(quota[0]) / int(quota[1]))
    for folder in _cgroup_folders("memory", cgroup_mount, cgroup_membership):
        limit = _words(folder / "memory.max") or _words(folder / "memory.limit_in_bytes")
        used = _words(folder / "memory.current") or _words(folder / "memory.usage_in_bytes")
        if limit and used and limit[0] != "max":
            # Without what the kernel frees on demand: the kubelet's working set,
            # https://kubernetes.io/docs/concepts/scheduling-eviction/node-pressure-eviction/
            words = _words(folder / "memory.stat")
            usage = dict(zip(words[::2], words[1::2], strict=False))
            cached = usage.get("total_inactive_file") or usage.get("inactive_file", "0")  # of v1, which has both; of v2
            memory_bytes.append(max(0, int(limit[0]) - max(0, int(used[0]) - int(cached))))
    return HostBudget(
        cores=min(cores),
        memory_available_bytes=min(memory_bytes),
        shm_free_bytes=psutil.disk_usage(str(_SHARED_MEMORY)).free if _SHARED_MEMORY.is_dir() else None,
        local_ranks=local_ranks,
    )


def shared_memory_bytes() -> int | None:
    """Return the size of ``/dev/shm``, through which workers pass batches; ``None`` where there is none."""
    return psutil.disk_usage(str(_SHARED_MEMORY)).total if _SHARED_MEMORY.is_dir() else None


def children_cpu_s() -> float:
    """Return the CPU seconds that this process's children have used so far, both living and ended ones.

    The kernel adds the CPU time of an ended DataLoader worker to its parent when the parent waits for it.
    """
    process = psutil.Process()
    ended = process.cpu_times()
    total: float = ended.children_user + ended.children_system
    for child in process.children():
        try:
            times = child.cpu_times()
        except psutil.NoSuchProcess:  # it has ended since the line above
            continue
        total += times.user + times.system
    return total


def idle_cpu_s() -> float:
    """Return for how many CPU seconds the cores of this process's affinity mask have been idle since boot.

    It is 0 where the system does not report it (``/proc`` mounted with ``subset=pid``).
    """
    try:
        per_core = psutil.cpu_times(percpu=True)
    except OSError:
        return 0.0
    mine = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(len(per_core))
    # A core that waits for a disk is free for others, too.
    return sum(per_core[core].idle + getattr(per_core[core], "iowait", 0.0) for core in mine if core < len(per_core))


def resident_memory_bytes() -> int:
    """Return how much memory this process uses, without the pages of files that it has mapped.

    The kernel drops those when memory is short; they grow as long as a mapped dataset is read for the first time.
    """
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:  # not Linux
        status = ""
    kilobytes = re.findall(r"^Rss(?:Anon|Shmem):\s*(\d+) kB$", status, re.MULTILINE)  # Linux 4.5 and later
    rss: int = 1024 * sum(map(int, kilobytes)) if kilobytes else psutil.Process().memory_info().rss
    return rss


def private_memory_bytes(pids: list[int]) -> list[int]:
    """Return the private memory of each of the processes, of which the kernel reports it.

    One more of them costs this much: forked workers share the rest with their parent.
    """
    private = [_private_memory_bytes(pid) for pid in pids]
    return [size for size in private if size is not None]


def _private_memory_bytes(pid: int) -> int | None:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]  # Linux 4.14 and later
    except OSError:
        return None
    kilobytes = {name: int(value.split()[0]) for name, _, value in (line.partition(":") for line in lines)}
    return 1024 * (kilobytes["Private_Clean"] + kilobytes["Private_Dirty"])


def oom_kills(
    *,
    cgroup_mount: Path = Path("/sys/fs/cgroup"),
    cgroup_membership: Path = Path("/proc/self/cgroup"),
    vmstat: Path = Path("/proc/vmstat"),
) -> int:
    """Return how many processes of this job the kernel has killed so far because memory ran out; take differences.

    Where no cgroup counts them, as outside of containers and batch systems, those of the whole machine count.
    """
    groups = _cgroup_folders("memory", cgroup_mount, cgroup_membership)
    events = [_words(folder / "memory.events") or _words(folder / "memory.oom_control") for folder in groups]
    # The innermost group has this process's siblings.
    for words in [*reversed(events), _words(vmstat)]:
        counts = dict(zip(words[::2], words[1::2], strict=False))
        if "oom_kill" in counts:
            return int(counts["oom_kill"])
    return 0


def cores_in_reach(cores: float, used_or_idle: float) -> float:
    """Return how many of its cores a job could use while others are busy on them.

    Args:
        cores: The cores that the job is granted.
        used_or_idle: The cores that the job used or that were idle, on average.
    """
    taken = max(0.0, cores - used_or_idle)
    # A job that mostly slept used less than the scheduler would give it: its fair share, once it has as many runnable
    # threads as cores.
    return max(min(cores, used_or_idle), cores * cores / (cores + taken))


def _cgroup_folders(controller: str, mount: Path, membership: Path) -> list[Path]:
    """Return the existing folders of this process's cgroup and of its ancestors for one controller."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:  # not Linux
        return []
    folders: set[Path] = set()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        # v2 has one tree and names no controllers; v1 has a tree for each group of controllers.
        root = mount / controllers if controllers else mount
        group = root / path.lstrip("/")
        folders.update(folder for folder in (group, *group.parents) if folder.is_relative_to(root) and folder.is_dir())
    return sorted(folders)


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:  # the file of the other version of cgroups, or a root cgroup, which has no limits
        return []


@functools.cache
def processor_name() -> str:
    """Return the name of the CPU, or of its architecture where the system does not report the name."""
    try:
        names = re.findall(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:  # not Linux
        names = []
    return names[0] if names else platform.processor() or platform.machine()
