"""Which CUDA devices a training uses, decided once for all its processes on this machine.

Every process of a distributed job builds its own ``Trainer`` and asks here. The first one picks and claims; the others
find that claim, by the name that it left in their environment or by what their launcher calls the job, and claim the
same for the same job. So they agree without talking to each other, and the claim lives as long as the last of them.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace

from lightning_gpu_tools.errors import ClaimsError
from lightning_gpu_tools.gpus.readings import GpuClaim
from lightning_gpu_tools.selection import claims, cuda, picking
from lightning_gpu_tools.selection.ranking import rank_gpus

# Lightning shows what its own loggers say from INFO on; other loggers are silent unless the user configures them.
_log = logging.getLogger("lightning.pytorch.lightning_gpu_tools")


def place(
    devices: int | Sequence[int], request: picking.Request, cuda_uuids: Callable[[], list[str]]
) -> list[int] | None:
    """Return the numbers of the CUDA devices to use, in ascending order, and claim the GPUs behind them.

    As long as CUDA has not started in this process, ``CUDA_VISIBLE_DEVICES`` is set to the GPUs picked, the best first,
    so that they become the devices 0, 1, ... here and in every child. Afterwards it cannot be changed any more, and the
    devices are picked by number among those that are visible.

    Args:
        devices: How many, ``-1`` for all that qualify; or the numbers of the ones to take, which are then only checked.
        request: What is asked of them; its ``count`` plays no role.
        cuda_uuids: Returns the UUIDs of the visible devices in CUDA's order; only called after CUDA has started.

    Returns:
        The numbers; ``None`` to do as if nothing had been asked here, because a scheduler has made the choice.

    Raises:
        NotEnoughGpusError: There are not as many that qualify.
    """
    started = cuda.is_initialized()
    uuids = cuda_uuids() if started else [str(gpu.uuid) for gpu in picking.visible()]
    if not isinstance(devices, int):
        return _check(list(devices), uuids, request)
    own = _own_choice(devices, uuids)
    if own:
        _join(own)
        return _use(list(own.uuids), uuids, started)
    count = how_many(request) if devices == -1 else devices
    group = _launcher_group(devices)
    if _is_granted(count, uuids) or (group and _is_masked() and len(uuids) < count):
        _log.info("CUDA_VISIBLE_DEVICES has been set to %d GPUs, %d are asked for: left as it is.", len(uuids), count)
        _claim_granted(uuids, request._replace(group=group))
        return None
    choice = picking.pick(
        request._replace(
            requirements=replace(request.requirements, count=count),
            # What cannot be put into the environment is found by its claim in children, so there has to be one.
            group=group or (secrets.token_hex(8) if started else None),
            among=tuple(uuids) if started else None,
        )
    )
    choice.adopt()
    if choice.reason:
        _log.info("%s%s", choice.reason, " CUDA had started, so they are used by their numbers." if started else "")
    return _use(list(choice.uuids), uuids, started)


def how_many(request: picking.Request) -> int:
    """Return how many GPUs "all" are: those the job has, what the mask or the launcher says, else all that qualify.

    At least 1: to ask for one where none qualifies is what brings the reasons to light.
    """
    gpus = picking.visible()
    own = _own_choice(-1, [str(gpu.uuid) for gpu in gpus])
    if own:
        return len(own.uuids)
    divided = any(str(gpu.uuid).startswith("MIG-") for gpu in gpus)
    if _is_masked() and gpus and not divided:
        return len(gpus)
    ranks = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("SLURM_NTASKS_PER_NODE")
    if ranks and _launcher_group(-1):
        return int(ranks)
    others = [claim for claim in picking.known_claims() if not picking.is_of_own_job(claim)]
    # Several, because MIG instances do not qualify then: they cannot be combined.
    several = replace(request.requirements, count=2)
    return max(1, len(rank_gpus(gpus, others, several, {os.getpid()}).candidates))


def _launcher_group(devices: int) -> str | None:
    """Return a name for the processes of one job that a launcher started on this machine, ``None`` if it started one.

    Restarted processes get a new name: they make a new choice.
    """
    if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > 1 and "TORCHELASTIC_RUN_ID" in os.environ:
        names = ["TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK", "TORCHELASTIC_RESTART_COUNT"]
        # <folder of this start>/<rank>/error.json: an earlier start may have left ranks behind, with all else the same.
        start = os.path.dirname(os.path.dirname(os.environ.get("TORCHELASTIC_ERROR_FILE", "")))
    elif (
        int(os.environ.get("SLURM_NTASKS", "1")) > 1
        and "SLURM_STEP_ID" in os.environ
        and os.environ.get("SLURM_JOB_NAME") not in ("bash", "interactive")  # to Lightning, too, a shell for any jobs
    ):
        names = ["SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_NODEID", "SLURM_RESTART_COUNT"]
        start = ""
    else:
        return None
    # The host's name, because containers that share the claims may use the same port.
    values = [socket.gethostname(), start, *(os.environ.get(name, "") for name in names)]
    return " ".join([*values, f"devices={devices}"])


def _is_masked() -> bool:
    return os.environ.get("CUDA_VISIBLE_DEVICES") is not None


def _is_granted(count: int, uuids: Sequence[str]) -> bool:
    """Return whether a scheduler, or the user, has given exactly what is asked for; then it is left alone."""
    # CUDA shows a process only one MIG instance, so that several are no grant of several.
    divided = count > 1 and any(uuid.startswith("MIG-") for uuid in uuids)
    return _is_masked() and len(uuids) == count and not divided


def _claim_granted(uuids: Sequence[str], request: picking.Request) -> None:
    """Claim GPUs that a scheduler or the user has given to this job, so that other jobs see that they are in use.

    That choice is not questioned: what speaks against it is logged as a warning.
    """
    if not request.claim:
        return
    try:
        with claims.open_ledger(claims.directory()) as ledger:
            here = [claim for claim in ledger.claims() if not set(claim.uuids).isdisjoint(uuids)]
            for claim in here:
                if picking.is_choice_of_job(claim, request) and set(claim.uuids) == set(uuids):
                    ledger.join(claim)
                    picking.adopt_job(claim.job)
                    return
            others = [claim for claim in here if not picking.is_of_own_job(claim)]
            kind, memory_bytes = picking.what_to_claim(request)
            for claim in others:
                if kind == "exclusive" or claim.kind == "exclusive":
                    claims.warn_once(
                        f"CUDA_VISIBLE_DEVICES gives this job {', '.join(sorted({*claim.uuids} & {*uuids}))}, which "
                        f"{claim.user} (pid {claim.pid}) has claimed{' exclusively' * (claim.kind == 'exclusive')}. "
                        "Both use it now; pick the GPUs with this package to avoid that."
                    )
                    kind = "whole"  # two exclusive claims of one GPU would both be untrue
            picking.adopt_job(ledger.take(uuids, kind, memory_bytes, group=request.group).name)
    except ClaimsError as error:
        claims.warn_once(f"{error} The GPUs of this job are not claimed.")


def _own_claims() -> list[GpuClaim]:
    """Return the claims that this process, or the one that started it, has made; the latest first."""
    if not picking.own_jobs():
        return []
    return [claim for claim in reversed(picking.known_claims()) if picking.is_of_own_job(claim)]


def _own_choice(devices: int, uuids: Sequence[str]) -> GpuClaim | None:
    """Return the latest own claim on that many of the visible GPUs, ``-1`` for any number."""
    fitting = (claim for claim in _own_claims() if set(claim.uuids) <= set(uuids))
    return next((claim for claim in fitting if devices in (-1, len(claim.uuids))), None)


def _join(claim: GpuClaim) -> None:
    """Hold an own claim, too, so that it does not end with the process that made it."""
    try:
        with claims.open_ledger(claims.directory()) as ledger:
            ledger.join(claim)
    except ClaimsError as error:
        claims.warn_once(f"{error} The claim of this job ends with the process {claim.pid} that made it.")


def _use(chosen: list[str], uuids: list[str], started: bool) -> list[int]:
    """Make the chosen GPUs this process's devices and return their numbers."""
    if started:
        return sorted(uuids.index(uuid) for uuid in chosen)
    if chosen != uuids:  # what a scheduler has written stays as it is
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(chosen)
    return list(range(len(chosen)))


def _check(devices: list[int], uuids: list[str], request: picking.Request) -> list[int]:
    """Claim the devices that the user named, if they qualify, and leave their numbers as they are."""
    wanted = [uuids[index] for index in devices if 0 <= index < len(uuids)]
    if len(wanted) < len(devices):
        return devices  # Lightning says which of them do not exist
    for claim in _own_claims():
        if set(claim.uuids) == set(wanted):
            _join(claim)
            return devices
    requirements = replace(request.requirements, count=len(devices))
    group = _launcher_group(len(devices))
    choice = picking.pick(request._replace(requirements=requirements, among=tuple(wanted), group=group))
    choice.adopt()
    if choice.reason:
        _log.info("%s They were asked for by number.", choice.reason)
    return devices
