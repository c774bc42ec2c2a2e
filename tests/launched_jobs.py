"""Scripts for jobs of several processes, what launchers put into their environment, and what the processes said."""

import os
import socket
import subprocess
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fake_driver import Driver
from slurm_cluster import wait_for

from lightning_gpu_tools.gpus.readings import GpuClaim
from lightning_gpu_tools.selection.claims import HeldClaim, open_ledger, read_ledger

# What the accelerator does underneath, without the seconds that it takes to import Lightning.
PLACE = """
import os, sys
from lightning_gpu_tools.selection.placement import how_many, place
from lightning_gpu_tools.selection.ranking import Request

def say(*words):  # in one write, because the ranks share the pipe
    os.write(1, (" ".join(map(str, ["SAID", *words])) + "\\n").encode())

def place_and_say(devices=2, **options):
    request = Request(**options)
    place(how_many(request) if devices == "auto" else devices, request, list)
    names = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "LOCAL_RANK")
    rank = next((os.environ[name] for name in names if name in os.environ), "0")
    say("placed", rank, *os.environ["CUDA_VISIBLE_DEVICES"].split(","))
"""
# A claim that nobody holds any more cannot be found, so ranks have to live at the same time, as in a training.
MEET = """
import pathlib, time
start = os.environ["TORCHELASTIC_RESTART_COUNT"]
pathlib.Path(__file__ + f".{start}.{os.environ['RANK']}").touch()
while len(list(pathlib.Path(__file__).parent.glob(f"train.py.{start}.*"))) < int(os.environ["WORLD_SIZE"]):
    time.sleep(0.02)
"""


def torchrun(rank: int, **changed: str) -> dict[str, str]:
    """Return the environment that torchrun gives a rank of two on one node."""
    names = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
    elastic = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0", "MASTER_PORT": "29500"}
    return {**os.environ, **names, **elastic, **changed}


def slurm(task: int, **changed: str) -> dict[str, str]:
    """Return the environment that ``srun`` gives a task of two on one node."""
    names = {"JOB_ID": "77", "STEP_ID": "0", "JOB_NAME": "train", "NTASKS": "2", "NTASKS_PER_NODE": "2", "NNODES": "1"}
    own = {"NODEID": "0", "PROCID": str(task), "LOCALID": str(task), "STEP_TASKS_PER_NODE": "2"}
    told = {f"SLURM_{name}": value for name, value in {**names, **own}.items()}
    return {**os.environ, **told, "MASTER_ADDR": "127.0.0.1", **changed}


def mpirun(rank: int, **changed: str) -> dict[str, str]:
    """Return the environment that Open MPI gives a process of two on one node."""
    names = {"SIZE": "2", "RANK": str(rank), "LOCAL_SIZE": "2", "LOCAL_RANK": str(rank)}
    told = {f"OMPI_COMM_WORLD_{name}": value for name, value in names.items()}
    return {**os.environ, **told, "PMIX_NAMESPACE": "790888449", **changed}


def by_hand(rank: int, **changed: str) -> dict[str, str]:
    """Return the environment of a rank without a launcher, from Lightning's guide to general-purpose clusters."""
    names = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "WORLD_SIZE": "2", "NODE_RANK": "0"}
    return {**os.environ, **names, "LOCAL_RANK": str(rank), **changed}


def free_port() -> str:
    with socket.socket() as probe:  # a fixed one may be another test run's on the same machine
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def positions(driver: Driver, uuids: list[str]) -> list[int]:
    return [[one.uuid for one in driver.gpus].index(uuid) for uuid in uuids]


def said(output: str, driver: Driver) -> dict[str, dict[int, list[int]]]:
    """Parse the output of processes: action -> rank -> positions of the GPUs, in the order of the ranks."""
    found: dict[str, dict[int, list[int]]] = {}
    for line in output.splitlines():
        if line.startswith("SAID"):
            done, rank, *uuids = line.split()[1:]
            found.setdefault(done, {})[int(rank)] = positions(driver, uuids)
    return found


def claims_in(folder: os.PathLike[str], process_ids: Collection[int] = ()) -> tuple[GpuClaim, ...]:
    """Return the live claims in a folder."""
    with read_ledger(os.fspath(folder)) as ledger:
        return ledger.claims(process_ids)


def live_claims(folder: os.PathLike[str]) -> list[tuple[str, int]]:
    """Return the kinds of the live claims in a folder, and their numbers of GPUs."""
    return [(claim.kind, len(claim.uuids)) for claim in claims_in(folder)]


def take(folder: os.PathLike[str], kind: Any = "whole", memory_bytes: int | None = None, **options: Any) -> HeldClaim:
    """Claim GPU-a in this process."""
    with open_ledger(os.fspath(folder)) as ledger:
        return ledger.take(["GPU-a"], kind, memory_bytes, **options)


WAIT = """
import sys
from lightning_gpu_tools import select_gpus
from lightning_gpu_tools.selection import picking
picking._POLL_AFTER_S, picking._POLL_JITTER_S = 0.1, 0.0
with select_gpus(exclusive=True, wait=60):
    print(sys.argv[1], flush=True)
"""


@contextmanager
def waiting(claims_dir: Path, name: str = "served", **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Start a job that is in the queue for a GPU of its own; when it gets one, it prints its name and ends."""
    before = len(list(claims_dir.glob("wait-*.json")))
    command = [sys.executable, "-c", WAIT, name]
    with subprocess.Popen(command, **{"stdout": -1, "stderr": -1, "text": True, **options}) as job:
        try:
            wait_for(lambda: len(list(claims_dir.glob("wait-*.json"))) > before)
            yield job
        finally:
            job.kill()
