"""The choice of CUDA devices for training, made once for all processes that a launcher started on this machine."""

import functools
import importlib.util
import logging
import os
import platform
import re
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from lightning_gpu_tools.errors import ClaimsError, NvmlUnavailableError
from lightning_gpu_tools.gpus.readings import folded_claims
from lightning_gpu_tools.selection import claims, cuda
from lightning_gpu_tools.selection.picking import Attempt, list_gpus, pick, show_gpus
from lightning_gpu_tools.selection.ranking import Request

# Launchers that Lightning detects, in its order, except Kubeflow, which starts one process per container. Fields:
# the program; the variable for the number of local processes; variables that identify the job. Their values change when
# the job restarts, because a restarted job picks again.
_LAUNCHERS = (
    (
        "torchrun",
        "LOCAL_WORLD_SIZE",
        ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK"),
    ),
    ("srun", "SLURM_STEP_TASKS_PER_NODE", ("SLURM_STEP_ID", "SLURM_JOB_ID", "SLURM_NODEID", "SLURM_RESTART_COUNT")),
    ("mpirun", "OMPI_COMM_WORLD_LOCAL_SIZE", ("PMIX_NAMESPACE",)),  # its PMIx server names the job
)


class Launch(NamedTuple):
    """The processes that a launcher started on this machine."""

    program: str
    processes: int | None  # None: unknown
    job: tuple[str, ...]  # identical for these processes and for no other on this machine

    def group(self, gpus: int) -> str:
        """Return a name for their shared choice of this number of GPUs."""
        # The name includes the host, because containers that share the claims may use the same port.
        return " ".join([platform.node(), *self.job, f"devices={gpus}"])


def find_launch(environ: Mapping[str, str], *, of_lightning: bool = True) -> Launch | None:
    """Return the launcher of this process; ``None`` if there is none.

    ``of_lightning`` leaves out those whose processes Lightning would train separately.
    """
    for program, count, names in _LAUNCHERS:
        if not {count, names[0]} <= environ.keys():
            continue
        # Lightning takes such jobs for interactive shells, see SLURMEnvironment.detect, and needs mpi4py for MPI.
        is_shell = program == "srun" and environ.get("SLURM_JOB_NAME") in ("bash", "interactive")
        lacks_mpi = program == "mpirun" and importlib.util.find_spec("mpi4py") is None
        if of_lightning and (is_shell or lacks_mpi):
            continue
        job = [environ.get(name, "") for name in names]
        if program == "torchrun":
            # <folder of this start>/<rank>/error.json. Ranks of an earlier start may still exist with the same names.
            job.append(environ.get("TORCHELASTIC_ERROR_FILE", "").rpartition("/")[0].rpartition("/")[0])
        node = int(environ["SLURM_NODEID"]) if program == "srun" else 0
        return Launch(program, _processes(environ[count], node), tuple(job))
    if {"LOCAL_RANK", "MASTER_PORT"} <= environ.keys():  # set by Lightning's DDP, or by hand
        job = [environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK")]
        return Launch("", None, tuple(job))
    return None


def _processes(counts: str, node: int) -> int:
    """Return a node's number of processes. SLURM's ``"2(x3),1"`` means 2 on each of three nodes, 1 on the fourth."""
    runs = re.findall(r"(\d+)(?:\(x(\d+)\))?", counts)
    return [int(processes) for processes, nodes in runs for _ in range(int(nodes or 1))][node]


def place(devices: int | Sequence[int], request: Request, cuda_uuids: Callable[[], Sequence[str]]) -> list[int]:
    """Return the numbers of the CUDA devices to use, and claim the GPUs behind them.

    If CUDA has not started in this process, set ``CUDA_VISIBLE_DEVICES`` to the picked GPUs, best first. They become
    devices 0, 1, ... here and in every child. Otherwise, pick by number among the visible devices, whose UUIDs
    ``cuda_uuids`` returns.

    ``devices`` is a count, -1 for all that qualify, or a list of numbers, which are only checked. The ``count`` of the
    request is ignored.
    """
    shown = cuda_uuids() if cuda.is_initialized() else None
    decide: Callable[[Attempt], list[int]]
    if isinstance(devices, int):
        decide, group = functools.partial(_place, devices), _launcher_group(devices)
        if shown is not None and group is None:
            # Children cannot get the choice from the environment. They find it by its claim, which must exist.
            group = secrets.token_hex(8)
    else:
        decide, group = functools.partial(_check, devices), _launcher_group(len(devices))
    return pick(request._replace(group=group, among=shown), decide)


def how_many(request: Request) -> int:
    """Return the number of GPUs for "all", from the job, the mask, or the launcher; otherwise all that qualify.

    The result is at least 1, because a request for 1 GPU reports the reasons if none qualifies.
    """
    return pick(request._replace(claim=False, wait=None), _how_many)


def count_devices() -> int:
    """Return the number of CUDA devices that torch can use, once it is imported.

    Unlike ``torch.cuda.is_available()``, this does not start CUDA.
    """
    torch = sys.modules["torch"]
    mask = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if not mask.startswith("MIG-") or torch.version.cuda is None or cuda.is_initialized():
        return int(torch.cuda.device_count())  # by NVML, but not under a mask of MIG instances
    try:
        return min(1, len(cuda.visible_gpus(list_gpus(), mask)))
    except NvmlUnavailableError:
        return 0


def _place(devices: int, attempt: Attempt) -> list[int]:
    own = _earlier_choice(devices, attempt)
    if own:
        return _use(own, attempt)
    uuids = attempt.visible_uuids
    count = _how_many(attempt) if devices == -1 else devices
    attempt.request = attempt.request._replace(count=count)
    # CUDA shows a process only one MIG instance, so several visible instances are not several devices.
    divided = count > 1 and any(uuid.startswith("MIG-") for uuid in uuids)
    is_granted = len(uuids) == count or (len(uuids) < count and _launcher_group(devices) is not None)
    if "CUDA_VISIBLE_DEVICES" in os.environ and is_granted and not divided:
        log().info("CUDA_VISIBLE_DEVICES already lists %d GPUs (requested: %d) and is not changed.", len(uuids), count)
        _claim_granted(attempt)
        return list(range(count))  # Lightning reports which of them do not exist
    started = " CUDA had already started, so they are selected by number."
    return _use(_choose(attempt, "" if attempt.request.among is None else started), attempt)


def log() -> logging.Logger:
    """Return a child of the imported Lightning package's logger, which shows INFO messages."""
    names = ("lightning.pytorch", "pytorch_lightning", "lightning.fabric", "lightning_fabric")
    return logging.getLogger(f"{next((name for name in names if name in sys.modules), names[0])}.lightning_gpu_tools")


def _use(chosen: Sequence[str], attempt: Attempt) -> list[int]:
    among = attempt.request.among
    if among is not None:  # ascending, because Trainer.device_ids is wrong otherwise
        return sorted(among.index(uuid) for uuid in chosen)
    if tuple(chosen) != attempt.visible_uuids:  # do not change what a scheduler set
        show_gpus(chosen)
    return list(range(len(chosen)))


def _check(devices: Sequence[int], attempt: Attempt) -> list[int]:
    wanted = [uuid for index, uuid in enumerate(attempt.visible_uuids) if index in devices]
    attempt.request = attempt.request._replace(count=len(devices), among=wanted)
    if not _earlier_choice(len(devices), attempt):
        _choose(attempt, " They were requested by number.")
    return list(devices)


def _choose(attempt: Attempt, remark: str) -> tuple[str, ...]:
    choice = attempt.choose()
    choice.adopt()
    if choice.reason:
        log().info("%s%s", choice.reason, remark)
    return choice.uuids


def _how_many(attempt: Attempt) -> int:
    own = _earlier_choice(-1, attempt)
    if own:
        return len(own)
    divided = any(uuid.startswith("MIG-") for uuid in attempt.visible_uuids)
    if "CUDA_VISIBLE_DEVICES" in os.environ and attempt.visible_uuids and not divided:
        return len(attempt.visible_uuids)
    launch = _launch()
    if launch and launch.processes:
        return launch.processes
    # With several, MIG instances do not qualify, because they cannot be combined.
    several = attempt.request._replace(count=2)
    return max(1, len(attempt.rank(several).candidates))


def _launch() -> Launch | None:
    """Return the launcher that started this process together with others of the same training."""
    launch, started = find_launch(os.environ), find_launch(os.environ, of_lightning=False)
    if launch is None and started is not None and started.processes != 1:
        remedy = "put SLURM_JOB_NAME=train before srun" if started.program == "srun" else "install mpi4py"
        claims.warn_once(
            f"{started.program} started {started.processes} processes on this machine, but Lightning trains in each of "
            f"them separately, on separate GPUs. To train in all of them together, {remedy}."
        )
    return launch


def _launcher_group(devices: int) -> str | None:
    """Return a name for the processes that a launcher started here for this training; ``None`` for a single process."""
    launch = _launch()
    if launch is None or (launch.processes or devices) == 1:
        return None
    return launch.group(devices)


def _claim_granted(attempt: Attempt) -> None:
    """Claim GPUs that a scheduler or the user assigned. Conflicts cause only warnings."""
    if not attempt.request.claim:
        return
    uuids, ledger = attempt.visible_uuids, attempt.ledger
    try:
        rivals = ledger.rivals(uuids, "exclusive" if attempt.request.exclusive else "whole", claims.own_jobs())
        if rivals:
            taken = [uuid for uuid in uuids if any(claim.is_on(uuid) for claim in rivals)]
            claims.warn_once(
                f"CUDA_VISIBLE_DEVICES gives this job {', '.join(sorted(taken))}, which "
                f"{', '.join(folded_claims(rivals, str))} has claimed. Both jobs now use it. To avoid this, pick the "
                "GPUs with this package."
            )
        claims.adopt_job(attempt.take(uuids, share=bool(rivals)).job)
    except ClaimsError as error:
        claims.warn_once(f"{error} The GPUs of this job are not claimed.")


def _earlier_choice(devices: int, attempt: Attempt) -> tuple[str, ...]:
    """Return the GPUs of this job's latest claim on this number of visible GPUs (-1: any number), and hold it, too."""
    for claim in reversed(attempt.ledger.claims()):
        is_own = claims.is_of_own_job(claim) or attempt.is_choice_of_job(claim)
        if is_own and devices in (-1, len(claim.uuids)) and {*claim.uuids} <= {*attempt.visible_uuids}:
            claims.adopt_job(claim.job)
            try:
                if attempt.ledger.takes_claims or attempt.ledger.problem:
                    attempt.ledger.join(claim)
            except ClaimsError as error:
                claims.warn_once(f"{error} The claim of this job ends with the process that made it.")
            return claim.uuids
    return ()
