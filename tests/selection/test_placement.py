"""Processes of one job and of several: they agree, or keep apart. Without Lightning, which only passes it all on."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_driver import Driver, gpu
from launched_jobs import PLACE, live_claims, said, slurm, torchrun

STAY = "\nsys.stdin.read()"


@pytest.fixture(autouse=True)
def machine(driver: Driver, claims_dir: Path) -> None:
    """Four idle GPUs; the higher the number, the more free memory."""
    driver.gpus = [gpu(memory_free=f"{gib}GiB") for gib in (10, 20, 30, 40)]


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    def write(code: str) -> str:
        (tmp_path / "train.py").write_text(PLACE + code)
        return str(tmp_path / "train.py")

    return write


def placed(driver: Driver, path: str, environments: list[dict[str, str]], *arguments: str) -> list[list[int]]:
    """What processes that live at the same time get, one after the other."""
    lines, processes = [], []
    for environment in environments:
        command = [sys.executable, path, *arguments]
        processes.append(subprocess.Popen(command, env=environment, stdin=-1, stdout=-1, text=True))
        lines.append(processes[-1].stdout.readline())  # type: ignore[union-attr]
    for process in processes:
        process.communicate()
    return [next(iter(said(line, driver)["placed"].values())) for line in lines]


def test_a_child_that_outlives_its_parent_keeps_the_claim(
    driver: Driver, script: Callable[[str], str], claims_dir: Path
) -> None:
    path = script("""
import subprocess
place_and_say(1, exclusive=True)
if len(sys.argv) > 1:
    subprocess.Popen([sys.executable, sys.argv[0]])
sys.stdin.read()
""")
    with subprocess.Popen([sys.executable, path, "parent"], stdin=-1, stdout=-1, text=True) as parent:
        assert parent.stdout.readline() == parent.stdout.readline() != ""
        parent.kill()
        parent.wait()
        assert live_claims(claims_dir) == [("exclusive", 1)]
        parent.stdin.close()  # which ends the child
        assert parent.stdout.read() == ""
        assert live_claims(claims_dir) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [("GROUP_RANK", "{}"), ("TORCHELASTIC_ERROR_FILE", "/tmp/none_{}/attempt_0/0/error.json")],
    ids=["node", "start"],
)
def test_every_node_and_every_start_chooses_for_itself(
    driver: Driver, script: Callable[[str], str], name: str, value: str
) -> None:
    # Both nodes are this machine. Ranks of a torchrun that was killed may live on beside those of a new one.
    ranks = [torchrun(rank, **{name: value.format(group)}) for group in "01" for rank in (0, 1)]
    chosen = placed(driver, script(f"place_and_say(exclusive=True){STAY}"), ranks)
    assert chosen == [[3, 2], [3, 2], [1, 0], [1, 0]]


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_jobs_of_two_users_share_no_choice_whatever_their_names(
    driver: Driver, script: Callable[[str], str], tmp_path: Path
) -> None:
    tmp_path.chmod(0o777)
    for folder in tmp_path.parents:
        if not folder.stat().st_mode & 0o005:
            folder.chmod(0o755)
    (tmp_path / "nvidia_driver_calls.log").chmod(0o666)
    # What it would import only then may lie where this user may not read.
    become = "import lightning_gpu_tools.gpus.nvml\nos.setuid(int(os.environ['BECOME']))\n"
    names = {"USER", "LOGNAME", "LNAME", "USERNAME"}  # as in a container that was given just a number
    users = [
        {name: value for name, value in torchrun(0, BECOME=user).items() if name not in names} for user in ("4711", "0")
    ]
    assert placed(driver, script(f"{become}place_and_say(exclusive=True){STAY}"), users) == [[3, 2], [1, 0]]


def test_a_claim_of_two_ranks_lives_until_the_last_ends(
    driver: Driver, script: Callable[[str], str], claims_dir: Path
) -> None:
    command = [sys.executable, script(f"place_and_say(exclusive=True){STAY}")]
    ranks = [subprocess.Popen(command, env=torchrun(rank), stdin=-1, stdout=-1, text=True) for rank in (0, 1)]
    assert all(rank.stdout and rank.stdout.readline() for rank in ranks)
    for rank in ranks:
        assert live_claims(claims_dir) == [("exclusive", 2)]
        rank.kill()
        rank.communicate()
    assert live_claims(claims_dir) == []


@pytest.mark.parametrize(
    ("job", "devices", "expected"), [("train", "auto", [[3, 2], [3, 2]]), ("bash", "1", [[3], [2]])]
)
def test_tasks_of_slurm_agree_but_not_jobs_in_a_shell(
    driver: Driver, script: Callable[[str], str], job: str, devices: str, expected: list[list[int]]
) -> None:
    code = "devices = sys.argv[1] if sys.argv[1] == 'auto' else int(sys.argv[1])\n"
    path = script(f"{code}place_and_say(devices, min_free='5GiB', exclusive=True){STAY}")
    assert placed(driver, path, [slurm(task, SLURM_JOB_NAME=job) for task in (0, 1)], devices) == expected
