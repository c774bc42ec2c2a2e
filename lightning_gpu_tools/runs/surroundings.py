"""Warnings about shortages that would end a run later, slow it down, or make it wrong; and claims on its GPUs."""

import os
import shutil
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from torch.utils.data import DataLoader

from lightning_gpu_tools import files
from lightning_gpu_tools.advice.workers import OPEN_IN_WORKER, named
from lightning_gpu_tools.errors import ClaimsError
from lightning_gpu_tools.gpus.readings import GpuClaim, folded_claims
from lightning_gpu_tools.loaders.facts import read_loader_facts
from lightning_gpu_tools.runs.ending import copies_per_weight
from lightning_gpu_tools.runs.run import Run
from lightning_gpu_tools.runs.run_gpus import gpu_readings
from lightning_gpu_tools.selection import claims
from lightning_gpu_tools.units import format_bytes, printable, printable_path


def shortcomings(run: Run) -> list[str]:
    """Return a message for each shortage, with what to do; for rank 0, after the first step."""
    return [*_of_checkpoints(run), *_of_loaders(run), *_claims_of_others(run)]


def _of_checkpoints(run: Run) -> Iterator[str]:
    folder = run.checkpoint_folder
    if folder is None or "://" in folder:
        return
    try:
        files.check_writable(folder)
    except OSError as error:
        yield (
            f"Checkpoints cannot be written to {printable_path(folder)}: {error.strerror or error}. "
            "Choose another folder: ModelCheckpoint(dirpath=...), or Trainer(default_root_dir=...)."
        )
        return
    if run.module is None or (run.place.world_size > 1 and not run.is_plain_ddp):  # its size is unknown
        return
    weights = [*run.module.parameters(), *run.module.buffers()]
    trained = sum(weight.nbytes for weight in weights if weight.requires_grad)
    size = sum(weight.nbytes for weight in weights) + copies_per_weight(run.optimizers) * trained
    path = Path(folder).absolute()
    place = next(parent for parent in (path, *path.parents) if parent.exists())
    # A new checkpoint is complete before the old one is removed, so both exist at the same time.
    free, needed = shutil.disk_usage(place).free, 2 * size
    if free < needed:
        yield (
            f"The disk of {printable_path(folder)} has {format_bytes(free)} left, but two checkpoints need "
            f"{format_bytes(needed)}. Free disk space, or choose another folder for checkpoints."
        )


def _of_loaders(run: Run) -> Iterator[str]:
    loaders = [one.loader for one in run.loaders if isinstance(one.loader, DataLoader)]
    facts = [read_loader_facts(loader) for loader in loaders if loader.num_workers]
    shared_files = tuple(file for one in facts for file in one.open_files)
    if shared_files:
        yield (
            f"The DataLoader's workers share {named(shared_files)}, open since before they were forked, and may "
            f"read each other's data. {OPEN_IN_WORKER}"
        )


def _claims_of_others(run: Run) -> Iterator[str]:
    gpus = {gpu.uuid: str(gpu.index) for gpu in gpu_readings(run.gpus)}
    others = [claim for claim in _claims_on(gpus) if not claims.is_of_own_job(claim) and claim.pid != os.getpid()]

    def describe(claim: GpuClaim) -> str:
        return f"{format_bytes(claim.memory_bytes) if claim.memory_bytes else 'all'} by {claim}"

    for uuid, gpu in gpus.items():
        if here := [claim for claim in others if claim.is_on(uuid)]:
            yield (
                f"Other jobs have claimed memory of GPU {gpu}, and may use it at any time: "
                f"{printable(', '.join(folded_claims(here, describe)), 500)}. "
                "Claim GPUs as well: choose them with this package, or with `lightning-gpu-tools run`."
            )


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
