"""The host's limits and its file systems, read from real files laid out as the kernel lays them out."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_gpu_tools import host
from lightning_gpu_tools.host import (
    children_cpu_s,
    cores_in_reach,
    idle_cpu_s,
    oom_kills,
    private_memory_bytes,
    read_host_budget,
)
from lightning_gpu_tools.processes import mount_of, parse_mounts, read_mounts

GIB = 2**30


@pytest.fixture
def cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Put this process into another cgroup tree."""
    monkeypatch.setattr(host, "_CGROUP_MOUNT", tmp_path / "mount")
    monkeypatch.setattr(host, "_CGROUP_MEMBERSHIP", tmp_path / "membership")

    def make(membership: str, files: dict[str, str]) -> None:
        (tmp_path / "membership").write_text(membership)
        for name, text in files.items():
            path = tmp_path / "mount" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    return make


def test_the_tightest_limit_up_to_the_root_applies(cgroup) -> None:
    files = {
        "slurm/job/step/cpu.max": "max 100000\n",
        "slurm/job/cpu.max": "25000 100000\n",
        "slurm/cpu.max": "80000 100000\n",
        "slurm/job/memory.max": f"{2 * GIB}\n",
        "slurm/job/memory.current": f"{2 * GIB - 1}\n",
        "slurm/job/memory.stat": "anon 5\ninactive_file 4096\nactive_file 7\n",
    }
    cgroup("0::/slurm/job/step\n", files)
    budget = read_host_budget(local_ranks=4)
    # Cached files count as available.
    assert (budget.cores, budget.local_ranks, budget.memory_available_bytes) == (0.25, 4, 4097)
    cgroup("0::/\n", {"cpu.max": "max 100000\n", "memory.max": "max\n", "memory.current": "5\n"})
    assert read_host_budget().cores == len(os.sched_getaffinity(0))


def test_cgroups_of_version_1_are_read(cgroup) -> None:
    files = {
        "cpu,cpuacct/docker/cpu.cfs_quota_us": "75000\n",
        "cpu,cpuacct/docker/cpu.cfs_period_us": "100000\n",
        "memory/docker/memory.limit_in_bytes": f"{2**20}\n",
        "memory/docker/memory.usage_in_bytes": f"{2**20 - 1}\n",
        "memory/docker/memory.stat": "anon 5\ninactive_file 1\ntotal_inactive_file 4096\n",
    }
    cgroup("7:cpu,cpuacct:/docker\n5:memory:/docker\n2:freezer:/\n", files)
    budget = read_host_budget()
    assert (budget.cores, budget.memory_available_bytes) == (0.75, 4097)


def test_cpu_time_of_living_and_ended_children_is_counted() -> None:
    before = children_cpu_s()
    burn = "import time\nwhile time.process_time() < 0.3: pass\nprint('burned', flush=True)\ninput()"
    child = subprocess.Popen([sys.executable, "-c", burn], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "burned\n"
    alive = children_cpu_s()
    child.communicate("\n")
    assert alive - before >= 0.28
    assert children_cpu_s() - before >= 0.28


@pytest.mark.parametrize(("listed", "idle_s"), [((0, 2, 5, 9), 20.5 + 50.5), ((0, 1), None)])
def test_idle_time_is_that_of_this_processs_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listed: tuple[int, ...], idle_s: float | None
) -> None:
    """Cores that are offline are not listed, and a container may have numbers of its own."""
    lines = [f"cpu{core} 7 7 7 {1000 * core} 50 7 7 7 7 7" for core in listed]
    stat = tmp_path / "stat"
    stat.write_text("\n".join(["cpu  7 7 7 7 7 7 7 7 7 7", *lines, "intr 7 7", ""]))
    monkeypatch.setattr(host, "_STAT", stat)
    monkeypatch.setattr(host, "TICKS_PER_S", 100)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {2, 5})
    assert idle_cpu_s() == idle_s


def test_a_job_gets_idle_cores_and_its_fair_share() -> None:
    assert cores_in_reach(8.0, 6.0) == pytest.approx(6.4)  # others keep two busy
    assert cores_in_reach(8.0, 0.5) == pytest.approx(64 / 15.5)  # this job slept: it would get its share
    assert cores_in_reach(8.0, 9.0) == 8.0  # counters round


def test_only_private_memory_of_a_worker_counts() -> None:
    taken = bytearray(os.urandom(2**20)) * 32  # in this process, and shared with the child until it writes to it
    child = os.fork()
    if not child:
        own = bytearray(os.urandom(2**20)) * 64
        os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(len(own) % 2)
    os.waitid(os.P_PID, child, os.WSTOPPED)
    try:
        (memory,) = private_memory_bytes([child, 2**22 + 1])  # the second one is no process
        assert 64 * 2**20 <= memory < 64 * 2**20 + len(taken)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.parametrize(
    ("membership", "files", "killed"),
    [
        ("0::/pod/job\n", {"pod/memory.events": "oom 9\noom_kill 5\n", "pod/job/memory.events": "oom_kill 2\n"}, 2),
        ("0::/\n", {"cgroup.procs": ""}, 7),  # not in a group: the whole machine
    ],
)
def test_killed_processes_are_counted_where_the_job_is(
    cgroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, membership: str, files: dict[str, str], killed: int
) -> None:
    monkeypatch.setattr(host, "_VMSTAT", tmp_path / "vmstat")
    (tmp_path / "vmstat").write_text("nr_free_pages 1\noom_kill 7\nnuma_hit 3\n")
    cgroup(membership, files)
    assert oom_kills() == killed


# Mounts as the kernel writes them: a container, whose root is an overlay, with bind mounts of a folder and a file.
MOUNTINFO = r"""2048 1024 0:300 / / rw,relatime master:77 - overlay overlay rw,lowerdir=/l/A:/l/B,upperdir=/d,workdir=/w
2049 2048 0:24 / /proc rw,nosuid,nodev,noexec,relatime - proc proc rw
2050 2048 0:25 / /dev/shm rw,nosuid - tmpfs shm rw,size=65536k
2051 2048 8:1 /var/lib/etc-hosts /etc/hosts rw,relatime - ext4 /dev/sda1 rw
2052 2048 8:17 /users/ada /home/ada rw,relatime shared:5 master:2 - xfs /dev/sdb1 rw,attr2
2053 2048 0:51 / /data rw,relatime shared:9 - nfs4 10.0.0.9:/export rw,vers=4.2,hard
2054 2053 0:52 / /data/scratch rw - lustre 10.0.0.7@tcp:/scratch rw,flock
2055 2048 0:53 / /buckets/my\040images rw,nosuid,nodev - fuse.gcsfuse user_id=0 rw,user_id=1000,group_id=0
2056 2048 0:54 / /old rw - ext4 /dev/sdc rw
2057 2056 0:55 / /old rw - nfs filer:/old rw
a line of a new kernel
"""


@pytest.mark.parametrize(
    ("path", "mount"),
    [
        ("/home/ada/set/a.png", ("/home/ada", "xfs", "8:17", "/users/ada", None)),
        ("/home/adam", ("/", "overlay", "0:300", "/", None)),
        ("/buckets/my images/0.tar", ("/buckets/my images", "fuse.gcsfuse", "0:53", "/", 1000)),
        ("/old/a", ("/old", "nfs", "0:55", "/", None)),  # the later mount hides the earlier one
    ],
)
def test_a_file_is_on_the_innermost_mount(path: str, mount: tuple[object, ...]) -> None:
    assert mount_of(path, parse_mounts(MOUNTINFO)) == mount
    assert "/proc" in read_mounts()
