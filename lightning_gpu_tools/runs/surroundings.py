"""The resources of a machine that a run will need: disk, shared memory, cores, unclaimed GPUs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path

from torch.utils.data import DataLoader

from lightning_gpu_tools.advice.shortcomings import Surroundings, shortcomings
from lightning_gpu_tools.errors import ClaimsError
from lightning_gpu_tools.gpus.readings import MAX_USERS, GpuClaim
from lightning_gpu_tools.host import affinity_cores, read_host_budget, shared_memory_bytes
from lightning_gpu_tools.loaders.facts import read_loader_facts
from lightning_gpu_tools.loaders.settings import settings_of
from lightning_gpu_tools.runs.out_of_memory import copies_per_weight
from lightning_gpu_tools.runs.run import Run
from lightning_gpu_tools.runs.run_gpus import gpu_readings
from lightning_gpu_tools.selection import claims
from lightning_gpu_tools.units import printable_path


def shortcomings_of(run: Run, batch_bytes: int | None) -> tuple[str, ...]:
    """Return a message for each shortage that would end a run, slow it down, or make it wrong; see `shortcomings`."""
    return tuple(shortcomings(read_surroundings(run, batch_bytes)))


def read_surroundings(run: Run, batch_bytes: int | None) -> Surroundings:
    """Return the needs of a run and the machine's resources; for rank 0, after the first step."""
    loader, ranks = None if run.loader is None else settings_of(run.loader), run.place.local_ranks
    workers = 0 if loader is None else loader.num_workers * ranks
    ahead = None if loader is None or batch_bytes is None else workers * (loader.prefetch_factor or 0) * batch_bytes
    cores = read_host_budget(local_ranks=ranks).cores
    # torch itself warns about more workers than cores, but ignores other ranks and quotas.
    has_warned = loader is not None and loader.num_workers > affinity_cores()
    folder = run.checkpoint_folder
    place, why_not = None, ""
    if folder is not None and "://" not in folder:
        path = Path(folder).absolute()
        place = next(one for one in (path, *path.parents) if one.exists())
        if not place.is_dir():
            why_not = f"{printable_path(place)} is not a folder"
        elif not os.access(place, os.W_OK):
            why_not = "permission denied"
    is_sharded, checkpoint_bytes = run.place.world_size > 1 and not run.is_plain_ddp, None
    if run.module is not None and not is_sharded:
        weights = [*run.module.parameters(), *run.module.buffers()]
        trained = sum(weight.nbytes for weight in weights if weight.requires_grad)
        checkpoint_bytes = sum(weight.nbytes for weight in weights) + copies_per_weight(run.optimizers) * trained
    loaders = [one.loader for one in run.loaders if isinstance(one.loader, DataLoader)]
    with_workers = [read_loader_facts(one) for one in loaders if one.num_workers]
    return Surroundings(
        folder=folder,
        why_not_writable=why_not,
        disk_free_bytes=None if place is None else shutil.disk_usage(place).free,
        checkpoint_bytes=checkpoint_bytes,
        prefetched_bytes=ahead,
        shm_bytes=shared_memory_bytes(),
        workers=0 if has_warned else workers,
        cores=cores,
        claims=tuple(_claims(run)),
        shared_files=tuple(file for one in with_workers if one.is_forked for file in one.open_files),
    )


def _claims(run: Run) -> Sequence[tuple[str, str, int]]:
    """Return the claims of other jobs on these GPUs: GPU, owner, bytes (0 = all)."""
    gpus = {gpu.uuid: str(gpu.index) for gpu in gpu_readings(run.gpus)}
    found = _claims_on(gpus)
    others = [claim for claim in found if not claims.is_of_own_job(claim) and claim.pid != os.getpid()]
    named = [*dict.fromkeys(claim.user for claim in others)][:MAX_USERS]
    of_users: dict[tuple[str, str], list[GpuClaim]] = {}  # one message per user, so that no user can flood the log
    for claim in others:
        for uuid in filter(claim.is_on, gpus):
            user = claim.user if claim.user in named else "other users"
            of_users.setdefault((gpus[uuid], user), []).append(claim)
    return [
        (
            gpu,
            str(those[0]) if len(those) == 1 and user in named else f"{user} ({len(those)} claims)",
            0 if None in (sizes := [claim.memory_bytes for claim in those]) else sum(filter(None, sizes)),
        )
        for (gpu, user), those in of_users.items()
    ]


def claimed_bytes(run: Run) -> int | None:
    """Return the memory on each of these GPUs that this job has claimed with ``min_free``; ``None`` if it has not."""
    own = filter(claims.is_of_own_job, _claims_on({gpu.uuid for gpu in gpu_readings(run.gpus)}))
    return max((claim.memory_bytes for claim in own if claim.memory_bytes is not None), default=None)


def _claims_on(uuids: Collection[str | None]) -> Sequence[GpuClaim]:
    """Return all claims on GPUs; none if they cannot be read."""
    if not uuids:
        return ()
    try:
        with claims.read_ledger(claims.directory()) as ledger:
            return [claim for claim in ledger.claims() if any(map(claim.is_on, uuids))]
    except ClaimsError:  # nobody can claim anything then
        return ()
