"""``gpus``: the table and its JSON."""

import json
import os
import pwd
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import psutil
import pytest
from fake_driver import Driver, gpu, mig, process

from lightning_gpu_tools import select_gpus
from lightning_gpu_tools.cli import gpus as gpus_command
from lightning_gpu_tools.gpus import nvml
from lightning_gpu_tools.processes import INIT

pytestmark = pytest.mark.usefixtures("claims_dir")
Call = Callable[..., "subprocess.CompletedProcess[str]"]


def test_table_and_json_show_memory_load_users_claims_and_faults(driver: Driver, call: Call) -> None:
    driver.gpus = [
        gpu(name="NVIDIA A100 [PCIe]", memory_free="21GiB", utilization=87),
        gpu(lost=True),
        gpu(mig=[mig(memory_total="10GiB", memory_free="4GiB")]),
        gpu(processes=None, compute_mode="prohibited"),
        gpu(memory_total=None, utilization=None, processes=[process(memory="3GiB")]),
        gpu(mig=[]),
    ]
    selection = select_gpus(min_free="9GiB")
    answer = call("gpus")
    assert (answer.returncode, answer.stderr) == (0, "")
    text = " ".join(answer.stdout.split())
    for words in (
        *("NVIDIA A100 [PCIe]", "21.0 GiB 80.0 GiB 87%", "python", "3.00", f"pid {os.getpid()}", "9.00"),
        *("fallen off the bus", "PROHIBITED", "is in MIG mode but has no instance"),
        f"2:0 1g.10gb {driver.gpus[2].mig[0].uuid[:12]} 4.00 GiB 10.0 GiB ? nobody",
    ):
        assert words in text
    assert max(map(len, answer.stdout.splitlines())) <= 100
    whole, lost, divided, *_ = json.loads(call("gpus", "--json").stdout)
    assert [whole["uuid"]] == [*selection.uuids]
    assert (whole["memory_free_bytes"], whole["effective_free_bytes"]) == (21 * 2**30, 12 * 2**30)
    (claim,) = whole["claims"]
    assert (claim["pid"], claim["kind"], claim["memory_bytes"]) == (os.getpid(), "memory", 9 * 2**30)
    assert abs(claim["since_s"] - time.time()) < 60
    assert (bool(lost["error"]), lost["memory_free_bytes"]) == (True, None)
    assert divided["mig_instances"][0]["effective_free_bytes"] == 4 * 2**30


@pytest.fixture
def left_process() -> Iterator[int]:
    """A process whose parent has ended."""
    script = "import subprocess as s; print(s.Popen(['sleep', '100'], stdout=s.DEVNULL).pid)"
    pid = int(subprocess.check_output([sys.executable, "-c", script]))
    yield pid
    os.kill(pid, signal.SIGKILL)


@pytest.fixture
def visible_pids(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's PIDs name this machine's processes, also if this test runs in a container."""
    monkeypatch.setattr(nvml, "pids_are_ours", lambda: True)


@pytest.mark.usefixtures("visible_pids")
def test_who_only_holds_memory_is_marked(
    driver: Driver, call: Call, monkeypatch: pytest.MonkeyPatch, left_process: int
) -> None:
    driver.gpus = [gpu(processes=[process(left_process, "3GiB"), process(memory="1GiB"), process(1, "1GiB", sm=40)])]
    monkeypatch.setattr(gpus_command, "_MIN_AGE_S", 1e9)  # they are all young then, also this one
    (listed,) = json.loads(call("gpus", "--json").stdout)
    assert [one["is_idle"] for one in listed["processes"]] == [False, False, False]
    monkeypatch.setattr(gpus_command, "_MIN_AGE_S", -1.0)
    (listed,) = json.loads(call("gpus", "--json").stdout)
    processes = {one["pid"]: one for one in listed["processes"]}
    states = {pid: (one["is_idle"], one["is_left_over"]) for pid, one in processes.items()}
    own = True, os.getppid() == INIT  # as under nohup
    assert states == {left_process: (True, True), os.getpid(): own, 1: (False, False)}
    assert abs(processes[left_process]["started_s"] - time.time()) < 60
    text = " ".join(call("gpus").stdout.split())
    assert f"(pid {left_process}), left over, started" in text
    assert f"(pid {os.getpid()}), {'left over' if own[1] else 'idle'}, started" in text


def test_a_pid_of_another_container_names_nobody_here(
    driver: Driver, call: Call, claims_dir: object, kernel_thread: int
) -> None:
    driver.gpus = [gpu(processes=[process(kernel_thread, "3GiB")])]
    shown = " ".join(call("gpus").stdout.split())
    assert "a process of another container or the host 3.00 GiB" in shown.replace("│", "")
    refused = call("pick", "--exclusive")
    assert "in use by a process of another container or the host" in refused.stderr


@pytest.mark.usefixtures("visible_pids")
def test_a_claim_whose_owner_runs_nothing_there_is_unused(
    driver: Driver, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpus_command, "_MIN_AGE_S", -1.0)
    driver.gpus = [gpu(), gpu()]
    select_gpus(2)
    with driver.change():
        driver.gpus[0].processes = [process()]
    used, unused = json.loads(call("gpus", "--json").stdout)
    assert [reading["claims"][0]["is_unused"] for reading in (used, unused)] == [False, True]
    assert "unused" in call("gpus").stdout


@pytest.mark.usefixtures("visible_pids")
def test_each_user_has_a_row(driver: Driver, call: Call, kernel_thread: int) -> None:
    me = psutil.Process().username()
    driver.gpus = [
        gpu(processes=[process(memory="3GiB"), process(os.getppid(), "1GiB")]),
        gpu(processes=[process(memory="2GiB")]),
        gpu(processes=[process(kernel_thread, "7GiB")]),
        gpu(processes=None),
    ]
    with select_gpus(2, min_free="4GiB"):
        found = json.loads(call("gpus", "--by-user", "--json").stdout)
        shown = call("gpus", "--by-user").stdout
    assert found["unknown_gpus"] == ["3"]
    strangers, mine = found["users"]
    assert (strangers["user"], strangers["gpus"], strangers["memory_used_bytes"]) == (None, ["2"], 7 * 2**30)
    assert (mine["user"], mine["gpus"], mine["memory_used_bytes"]) == (me, ["0", "1"], 6 * 2**30)
    assert (len(mine["claimed_gpus"]), mine["claimed_memory_bytes"]) == (2, 8 * 2**30)
    rows = [" ".join(line.split()) for line in shown.splitlines()]
    assert rows[3].startswith("not visible from here 2 7.00 GiB")
    assert rows[4].startswith(f"{me} 0, 1 6.00 GiB {', '.join(mine['claimed_gpus'])} 8.00 GiB")
    assert "processes that cannot be read: GPU 3" in shown


@pytest.mark.usefixtures("visible_pids")
def test_users_are_many_and_hostile(driver: Driver, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = (SimpleNamespace(pw_name=f"\x1b[2J[red]{i}\nFORGED") for i in range(1000))
    monkeypatch.setattr(pwd, "getpwuid", lambda user_id: next(entries))
    driver.gpus = [gpu(processes=[process()]) for _ in range(45)]
    shown = call("gpus", "--by-user").stdout
    assert r"\x1b[2J[red]0\nFORGED" in "".join(shown.split())
    assert "\x1b" not in shown
    assert "and 5 more users" in shown
    assert max(map(len, shown.splitlines())) <= 100
    assert len(json.loads(call("gpus", "--by-user", "--json").stdout)["users"]) == 45


def test_without_a_driver_the_exit_code_is_4(driver: Driver, call: Call) -> None:
    assert call("gpus").stdout == "The NVIDIA driver lists no GPU.\n"
    driver.init_error = "DRIVER_NOT_LOADED"
    answer = call("gpus", "--json")
    assert (answer.returncode, answer.stdout, "modprobe" in answer.stderr) == (4, "", True)


def test_watch_follows_the_machine_until_ctrl_c(driver: Driver) -> None:
    driver.gpus = [gpu(utilization=11)]
    command = [sys.executable, "-u", "-m", "lightning_gpu_tools", "gpus", "--watch"]
    with subprocess.Popen(command, stdout=-1, stderr=-1, env={**os.environ, "FORCE_COLOR": "1"}) as watch:
        read_until(watch.stdout.fileno(), b"11%")
        with driver.change():
            driver.gpus[0].utilization = 77
            driver.gpus[0].utilization_rate = 77
            driver.gpus[0].samples = []
        read_until(watch.stdout.fileno(), b"77%")
        watch.send_signal(signal.SIGINT)
        assert watch.communicate()[1] == b""
    assert watch.returncode == 0


def read_until(descriptor: int, words: bytes) -> None:
    text = b""
    while words not in text:
        chunk = os.read(descriptor, 65536)
        assert chunk, f"ended without {words!r}: {text!r}"
        text += chunk
