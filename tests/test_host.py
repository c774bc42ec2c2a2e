"""The host's limits, read from real files laid out as the kernel lays them out."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gpu_tools import host
from lightning_gpu_tools.host import (
    affinity_cores,
    children_cpu_s,
    cores_in_reach,
    idle_cpu_s,
    io_pressure_s,
    is_network,
    mount_of,
    oom_kills,
    parse_mounts,
    private_memory_bytes,
    read_host_budget,
    read_mounts,
    throttled_periods,
)

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


def test_a_quota_of_half_a_core_is_half_a_core(cgroup) -> None:
    cgroup("0::/job\n", {"job/cpu.max": "50000 100000\n"})
    assert read_host_budget().cores == 0.5


@pytest.mark.parametrize(
    ("membership", "files", "counts"),
    [
        (
            "0::/pod/job\n",
            {
                "pod/cpu.stat": "usage_usec 9\nnr_periods 70\nnr_throttled 30\nthrottled_usec 5\n",
                "pod/job/cpu.stat": "usage_usec 9\nnr_periods 60\nnr_throttled 2\n",
            },
            (30, 70),
        ),
        (
            "7:cpu,cpuacct:/job\n",
            {"cpu,cpuacct/job/cpu.stat": "nr_periods 8\nnr_throttled 4\nthrottled_time 5\n"},
            (4, 8),
        ),
        ("0::/\n", {"cpu.stat": "usage_usec 9\n"}, (0, 0)),
        ("", {}, (0, 0)),
    ],
    ids=["v2", "v1", "no quota", "no cgroup"],
)
def test_periods_in_which_a_quota_was_used_up_are_counted(cgroup, membership: str, files: dict, counts: tuple) -> None:
    cgroup(membership, files)
    assert throttled_periods() == counts


def test_the_tightest_limit_up_to_the_root_applies(cgroup) -> None:
    files = {
        "slurm/job/step/cpu.max": "max 100000\n",
        "slurm/job/cpu.max": "25000 100000\n",
        "slurm/cpu.max": "80000 100000\n",
        "slurm/job/memory.max": f"{2 * GIB}\n",
        "slurm/job/memory.current": f"{2 * GIB - 4096}\n",
    }
    cgroup("0::/slurm/job/step\n", files)
    budget = read_host_budget()
    assert budget.cores == budget.quota_cores == 0.25
    assert budget.memory_available_bytes == 4096


def test_cgroups_of_version_1_are_read(cgroup) -> None:
    membership = "7:cpu,cpuacct:/docker/abc\n5:memory:/docker/abc\n2:freezer:/\n"
    files = {
        "cpu,cpuacct/docker/abc/cpu.cfs_quota_us": "75000\n",
        "cpu,cpuacct/docker/abc/cpu.cfs_period_us": "100000\n",
        "memory/docker/abc/memory.limit_in_bytes": "8192\n",
        "memory/docker/abc/memory.usage_in_bytes": "4096\n",
    }
    cgroup(membership, files)
    budget = read_host_budget()
    assert budget.cores == 0.75
    assert budget.memory_available_bytes == 4096


@pytest.mark.parametrize(
    ("membership", "limit", "usage", "stat"),
    [
        ("0::/\n", "memory.max", "memory.current", "inactive_file"),
        ("5:memory:/\n", "memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ],
    ids=["v2", "v1"],
)
def test_cached_files_count_as_available_memory(cgroup, membership: str, limit: str, usage: str, stat: str) -> None:
    own = "inactive_file 1\n" if stat.startswith("total") else ""  # v1 has it without and with that of the children
    files = {
        limit: f"{2**20}\n",
        usage: f"{2**20 - 1}\n",
        str(Path(limit).with_name("memory.stat")): f"anon 5\n{own}{stat} 4096\nactive_file 7\n",
    }
    cgroup(membership, files)
    assert read_host_budget().memory_available_bytes == 4097


@pytest.mark.parametrize("files", [{}, {"cpu.max": "max 100000\n", "memory.max": "max\n", "memory.current": "5\n"}])
def test_without_a_quota_the_affinity_mask_counts(cgroup, files: dict[str, str]) -> None:
    cgroup("0::/\n", files)
    budget = read_host_budget(local_ranks=4)
    assert budget.cores == affinity_cores() == len(os.sched_getaffinity(0))
    assert budget.quota_cores is None
    assert budget.memory_available_bytes > 0
    assert budget.local_ranks == 4


def test_the_affinity_mask_is_that_of_the_process() -> None:
    one_core = {min(os.sched_getaffinity(0))}
    code = "from lightning_gpu_tools.host import read_host_budget; print(read_host_budget().cores)"
    result = subprocess.run(
        [sys.executable, "-c", code],
        preexec_fn=lambda: os.sched_setaffinity(0, one_core),
        capture_output=True,
        text=True,
        check=True,
    )
    assert float(result.stdout) <= 1.0


def test_cpu_time_of_living_and_ended_children_is_counted() -> None:
    before = children_cpu_s()
    burn = "import time\nwhile time.process_time() < 0.3: pass\nprint('burned', flush=True)\ninput()"
    child = subprocess.Popen([sys.executable, "-c", burn], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "burned\n"
    alive = children_cpu_s()
    child.communicate("\n")
    assert alive - before >= 0.28
    assert children_cpu_s() - before >= 0.28


def test_idle_time_does_not_outrun_the_clock() -> None:
    burn = "import time\nwhile time.process_time() < 0.5: pass"
    began_s, idle_s = time.perf_counter(), idle_cpu_s()
    subprocess.run([sys.executable, "-c", burn], check=True)
    elapsed_s = time.perf_counter() - began_s
    cores = len(os.sched_getaffinity(0))
    # The kernel counts in hundredths of a second, for each core.
    assert 0 <= idle_cpu_s() - idle_s <= cores * elapsed_s - 0.5 + 0.03 * cores


@pytest.mark.parametrize(
    ("used_or_idle", "in_reach"),
    [
        (8.0, 8.0),  # nobody else
        (6.0, 6.4),  # others keep two busy
        (0.5, 64 / 15.5),  # others take all they can get, and the job slept: it would get its share
        (9.0, 8.0),  # counters round
    ],
)
def test_a_job_gets_idle_cores_and_its_fair_share(used_or_idle: float, in_reach: float) -> None:
    assert cores_in_reach(8.0, used_or_idle) == pytest.approx(in_reach)


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
        ("5:memory:/job\n", {"memory/job/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n"}, 1),
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
    (tmp_path / "vmstat").unlink()  # no Linux
    cgroup("", {})
    assert oom_kills() == 0


# As the kernel writes them: a container, whose root is an overlay, with a bind mount of a folder and of a file.
MOUNTINFO = r"""2048 1024 0:300 / / rw,relatime master:77 - overlay overlay rw,lowerdir=/l/A:/l/B,upperdir=/d,workdir=/w
2049 2048 0:24 / /proc rw,nosuid,nodev,noexec,relatime - proc proc rw
2050 2048 0:25 / /dev/shm rw,nosuid - tmpfs shm rw,size=65536k
2051 2048 8:1 /var/lib/etc-hosts /etc/hosts rw,relatime - ext4 /dev/sda1 rw
2052 2048 8:17 /users/ada /home/ada rw,relatime shared:5 master:2 - xfs /dev/sdb1 rw,attr2
2053 2048 0:51 / /data rw,relatime shared:9 - nfs4 10.0.0.9:/export rw,vers=4.2,hard
2054 2053 0:52 / /data/scratch rw - lustre 10.0.0.7@tcp:/scratch rw,flock
2055 2048 0:53 / /buckets/my\040images rw,nosuid,nodev - fuse.gcsfuse my-images rw,user_id=0
2056 2048 0:54 / /old rw - ext4 /dev/sdc rw
2057 2056 0:55 / /old rw - nfs filer:/old rw
a line of a new kernel
"""


@pytest.mark.parametrize(
    ("path", "point", "file_system", "of_others"),
    [
        ("/opt/data.bin", "/", "overlay", None),
        ("/dev/shm", "/dev/shm", "tmpfs", False),
        ("/home/ada/set/a.png", "/home/ada", "xfs", False),
        ("/home/adam", "/", "overlay", None),
        ("/data/train", "/data", "nfs4", True),
        ("/data/scratch/train", "/data/scratch", "lustre", True),
        ("/buckets/my images/0.tar", "/buckets/my images", "fuse.gcsfuse", True),
        ("/old/a", "/old", "nfs", True),  # the later mount hides the earlier one
    ],
)
def test_a_file_is_on_the_innermost_mount(path: str, point: str, file_system: str, of_others: bool | None) -> None:
    mount = mount_of(path, parse_mounts(MOUNTINFO))
    assert mount is not None
    assert (mount.point, mount.file_system, is_network(mount.file_system)) == (point, file_system, of_others)


NAMES = st.lists(st.sampled_from(["a", "ab", "b c", "d\\e", "\t"]), max_size=4)


@given(st.lists(NAMES), NAMES)
def test_of_all_mounts_that_contain_a_path_the_longest_wins(folders: list[list[str]], parts: list[str]) -> None:
    points, path = ["/" + "/".join(folder) for folder in folders], "/" + "/".join(parts)
    escaped = [re.sub(r"[\s\\]", lambda one: f"\\{ord(one[0]):03o}", point) for point in points]
    mounts = parse_mounts("\n".join(f"1 1 0:{i} / {one} rw - ext4 x rw" for i, one in enumerate(escaped)))
    containing = [one for one in points if one in ("/", path) or path.startswith(one + "/")]
    mount = mount_of(path, mounts)
    assert (mount and mount.point) == (max(containing, key=len) if containing else None)


@pytest.mark.skipif(not Path("/proc/self/mountinfo").exists(), reason="needs Linux")
def test_the_file_system_of_this_folder_is_the_one_that_df_says(tmp_path: Path) -> None:
    mount = mount_of(os.path.realpath(tmp_path), read_mounts())
    assert mount is not None
    df = subprocess.run(["df", "--output=fstype", tmp_path], capture_output=True, text=True, check=True)
    assert mount.file_system == df.stdout.split()[-1]


PRESSURE = "some avg10=0.16 avg60=0.16 avg300=0.50 total={}\nfull avg10=0.00 avg60=0.00 avg300=0.14 total=9\n"


@pytest.mark.parametrize(
    ("membership", "files", "seconds"),
    [
        (
            "0::/pod/job\n",
            {f"{group}/io.pressure": PRESSURE.format(n) for group, n in (("pod", 8), ("pod/job", 3_000_000))},
            3,
        ),
        ("0::/pod/job\n", {"pod/job/cpu.max": "max 100000"}, 370.5),  # without its own count: the machine
        ("", {}, 370.5),
    ],
)
def test_the_pressure_on_storage_is_that_of_the_job(
    cgroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, membership: str, files: dict[str, str], seconds: float
) -> None:
    monkeypatch.setattr(host, "_PRESSURE", tmp_path / "pressure")
    (tmp_path / "pressure").write_text(PRESSURE.format(370_500_000))
    cgroup(membership, files)
    assert io_pressure_s() == seconds
    (tmp_path / "pressure").unlink()
    assert io_pressure_s() == (None if seconds > 3 else seconds)
