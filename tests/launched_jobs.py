"""Scripts for jobs of several processes, what launchers put into their environment, and what the processes said."""

from __future__ import annotations

import os
import socket

from fake_driver import Driver

from lightning_gpu_tools.selection.claims import read_ledger

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
    names = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "JSM_NAMESPACE_RANK", "LOCAL_RANK")
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
    """What torchrun tells a rank of two on one node."""
    names = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
    elastic = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0", "MASTER_PORT": "29500"}
    return {**os.environ, **names, **elastic, **changed}


def slurm(task: int, **changed: str) -> dict[str, str]:
    """What ``srun`` tells a task of two on one node."""
    names = {"JOB_ID": "77", "STEP_ID": "0", "JOB_NAME": "train", "NTASKS": "2", "NTASKS_PER_NODE": "2", "NNODES": "1"}
    own = {"NODEID": "0", "PROCID": str(task), "LOCALID": str(task), "STEP_TASKS_PER_NODE": "2"}
    told = {f"SLURM_{name}": value for name, value in {**names, **own}.items()}
    return {**os.environ, **told, "MASTER_ADDR": "127.0.0.1", **changed}


def mpirun(rank: int, **changed: str) -> dict[str, str]:
    """What Open MPI tells a process of two on one node."""
    names = {"SIZE": "2", "RANK": str(rank), "LOCAL_SIZE": "2", "LOCAL_RANK": str(rank)}
    told = {f"OMPI_COMM_WORLD_{name}": value for name, value in names.items()}
    return {**os.environ, **told, "PMIX_NAMESPACE": "790888449", **changed}


def mpiexec(rank: int, **changed: str) -> dict[str, str]:
    """What MPICH and Intel MPI tell a process of two on one node."""
    names = {"MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": str(rank), "PMI_SIZE": "2", "PMI_RANK": str(rank)}
    return {**os.environ, **names, **changed}


def jsrun(rank: int, **changed: str) -> dict[str, str]:
    """What LSF's ``jsrun`` tells a process of two on one node."""
    names = {"SIZE": "2", "RANK": str(rank), "LOCAL_SIZE": "2", "LOCAL_RANK": str(rank)}
    told = {f"JSM_NAMESPACE_{name}": value for name, value in names.items()}
    return {**os.environ, **told, "LSB_JOBID": "77", "PMIX_NAMESPACE": "1", **changed}


def by_hand(rank: int, **changed: str) -> dict[str, str]:
    """What a user tells a rank whom no launcher starts, as Lightning's guide to general-purpose clusters says."""
    names = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "WORLD_SIZE": "2", "NODE_RANK": "0"}
    return {**os.environ, **names, "LOCAL_RANK": str(rank), **changed}


def free_port() -> str:
    with socket.socket() as probe:  # a fixed one may be another test run's on the same machine
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def positions(driver: Driver, uuids: list[str]) -> list[int]:
    return [[one.uuid for one in driver.gpus].index(uuid) for uuid in uuids]


def said(output: str, driver: Driver) -> dict[str, dict[int, list[int]]]:
    """What the processes said: what was done -> rank -> positions of the GPUs in the order of the ranks."""
    found: dict[str, dict[int, list[int]]] = {}
    for line in output.splitlines():
        if line.startswith("SAID"):
            done, rank, *uuids = line.split()[1:]
            found.setdefault(done, {})[int(rank)] = positions(driver, uuids)
    return found


def live_claims(claims_dir: os.PathLike[str]) -> list[tuple[str, int]]:
    with read_ledger(str(claims_dir)) as ledger:
        return [(claim.kind, len(claim.uuids)) for claim in ledger.claims()]
