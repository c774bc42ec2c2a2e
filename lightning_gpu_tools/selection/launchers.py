"""Detection of processes that a launcher started on this machine as one job, from their environment variables."""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping
from typing import NamedTuple

# Launchers that Lightning detects, in its order, except Kubeflow, which starts one process per container. Fields:
# the program; the variables for the number of local processes and for the local rank; variables that identify the job.
# Their values change when the job restarts, because a restarted job picks again.
_LAUNCHERS = (
    (
        "torchrun",
        "LOCAL_WORLD_SIZE",
        "LOCAL_RANK",
        ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK"),
    ),
    (
        "srun",
        "SLURM_STEP_TASKS_PER_NODE",
        "SLURM_LOCALID",
        ("SLURM_STEP_ID", "SLURM_JOB_ID", "SLURM_NODEID", "SLURM_RESTART_COUNT"),
    ),
    # Its PMIx server names the job.
    ("mpirun", "OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", ("PMIX_NAMESPACE",)),
)


class Launch(NamedTuple):
    """The processes that a launcher started on this machine."""

    program: str
    processes: int | None  # None: unknown
    local_rank: str
    job: tuple[str, ...]  # identical for these processes and for no other on this machine
    needs: str | None = None  # missing requirement without which Lightning trains in each process separately

    def group(self, gpus: int) -> str:
        """Return a name for their shared choice of this number of GPUs."""
        # The name includes the host, because containers that share the claims may use the same port.
        return " ".join([platform.node(), *self.job, f"devices={gpus}"])


def find_launch(environ: Mapping[str, str], *, has_mpi4py: bool) -> Launch | None:
    """Return the launcher of this process, preferably one that Lightning recognizes; ``None`` if there is none."""
    unrecognized = None
    for program, count, rank, names in _LAUNCHERS:
        if not {count, names[0]} <= environ.keys():
            continue
        job = [environ.get(name, "") for name in names]
        if program == "torchrun":
            # <folder of this start>/<rank>/error.json. Ranks of an earlier start may still exist with the same names.
            job.append(environ.get("TORCHELASTIC_ERROR_FILE", "").rpartition("/")[0].rpartition("/")[0])
        node = int(environ["SLURM_NODEID"]) if program == "srun" else 0
        needs = _needs(program, environ, has_mpi4py)
        launch = Launch(program, _processes(environ[count], node), environ.get(rank, ""), tuple(job), needs)
        if needs is None:
            return launch
        if launch.processes != 1:
            unrecognized = unrecognized or launch
    if {"LOCAL_RANK", "MASTER_PORT"} <= environ.keys():  # set by Lightning's DDP, or by hand
        job = [environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK")]
        return Launch("", None, environ["LOCAL_RANK"], tuple(job))
    return unrecognized


def _processes(counts: str, node: int) -> int:
    """Return a node's number of processes. SLURM's ``"2(x3),1"`` means 2 on each of three nodes, 1 on the fourth."""
    runs = re.findall(r"(\d+)(?:\(x(\d+)\))?", counts)
    return [int(processes) for processes, nodes in runs for _ in range(int(nodes or 1))][node]


def _needs(program: str, environ: Mapping[str, str], has_mpi4py: bool) -> str | None:
    if program == "srun" and environ.get("SLURM_JOB_NAME") in ("bash", "interactive"):
        # Lightning takes this for an interactive shell, see SLURMEnvironment.detect.
        return f"a job name other than {environ['SLURM_JOB_NAME']!r}: put SLURM_JOB_NAME=train before srun"
    if program == "mpirun" and not has_mpi4py:
        return "the package mpi4py"
    return None
