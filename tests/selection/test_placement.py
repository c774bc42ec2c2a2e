"""Processes of one job and of several: they agree, or keep apart. Without Lightning, which only passes it all on."""

import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_driver import Driver, gpu
from launched_jobs import PLACE, by_hand, live_claims, mpirun, said, slurm, torchrun

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


@pytest.mark.parametrize("given", [{}, {"CUDA_VISIBLE_DEVICES": "1,2"}], ids=["picked", "given"])
def test_a_claim_of_two_ranks_lives_until_the_last_ends(
    driver: Driver, script: Callable[[str], str], claims_dir: Path, given: dict[str, str]
) -> None:
    command = [sys.executable, script(f"place_and_say(exclusive=True){STAY}")]
    environments = [torchrun(rank, **given) for rank in (0, 1)]
    ranks = [subprocess.Popen(command, env=one, stdin=-1, stdout=-1, text=True) for one in environments]
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
    ],
)
def test_ranks_agree_however_they_were_started(
    driver: Driver, script: Callable[[str], str], ranks: Callable[[int], dict[str, str]], devices: str, expected: object
) -> None:
    assert placed(driver, script(BY_ARGUMENT), [ranks(0), ranks(1)], devices) == expected


@pytest.mark.follows("install mpi4py")
@pytest.mark.skipif(importlib.util.find_spec("mpi4py") is not None, reason="mpi4py is installed")
def test_processes_of_mpi_share_once_the_advised_package_is_installed(
    driver: Driver, script: Callable[[str], str], capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    ranks = [mpirun(0), mpirun(1)]
    assert placed(driver, script(BY_ARGUMENT), ranks, "2") == [[3, 2], [1, 0]]
    warning = r"mpirun started 2 processes on this machine, but Lightning trains in .* together, install (\w+)\."
    package = re.search(warning, capfd.readouterr().err)[1]
    (tmp_path / f"{package}.py").touch()  # as if it were installed
    assert placed(driver, script(BY_ARGUMENT), ranks, "2") == [[3, 2], [3, 2]]
    assert capfd.readouterr().err == ""
