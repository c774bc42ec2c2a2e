"""Processes of one job and of several: they agree, or keep apart. Without Lightning, which only passes it all on."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_driver import Driver, gpu
from launched_jobs import PLACE, by_hand, live_claims, said, slurm, torchrun

STAY = "\nsys.stdin.read()"
BY_ARGUMENT = f"""
devices = sys.argv[1] if sys.argv[1] == "auto" else int(sys.argv[1])
place_and_say(devices, min_free="5GiB", exclusive=True){STAY}
"""


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


def shell(task: int) -> dict[str, str]:
    return slurm(task, SLURM_JOB_NAME="bash")


def placed(driver: Driver, path: str, environments: list[dict[str, str]], *arguments: str) -> list[list[int]]:
    """Return the GPUs of processes that live at the same time and pick one after the other."""
    lines, processes = [], []
    for environment in environments:
        command = [sys.executable, path, *arguments]
        processes.append(subprocess.Popen(command, env=environment, stdin=-1, stdout=-1, text=True))
        lines.append(processes[-1].stdout.readline())  # type: ignore[union-attr]
    for process in processes:
        process.communicate()
    return [next(iter(said(line, driver)["placed"].values())) for line in lines]


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
    ("ranks", "devices", "expected"),
    [
        (slurm, "auto", [[3, 2], [3, 2]]),
        (by_hand, "2", [[3, 2], [3, 2]]),
        (by_hand, "1", [[3], [2]]),  # of a training on two nodes, both of which are this machine
        (shell, "1", [[3], [2]]),  # Lightning trains in each of them separately
    ],
)
def test_ranks_agree_however_they_were_started(
    driver: Driver, script: Callable[[str], str], ranks: Callable[[int], dict[str, str]], devices: str, expected: object
) -> None:
    assert placed(driver, script(BY_ARGUMENT), [ranks(0), ranks(1)], devices) == expected
