"""Shortages that would end training later, or slow it down: of disk, shared memory, cores, GPUs; and shared files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lightning_gpu_tools.advice.failures import SHARED_MEMORY
from lightning_gpu_tools.advice.workers_allowed import OPEN_IN_WORKER, named
from lightning_gpu_tools.units import format_bytes, printable, printable_path

# A new checkpoint is complete before the old one is removed, so both exist at the same time.
_CHECKPOINTS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Surroundings:
    """The resources that training needs, and those of its machine; ``None`` = unknown, or not needed."""

    folder: str | None = None  # of checkpoints
    why_not_writable: str = ""  # empty if it is, or will be
    disk_free_bytes: int | None = None
    checkpoint_bytes: int | None = None
    prefetched_bytes: int | None = None  # batches that the workers of all ranks of this machine keep ready
    shm_bytes: int | None = None  # size of /dev/shm, through which workers pass batches
    workers: int = 0  # of all ranks of this machine
    cores: float | None = None  # that the job may use
    claims: tuple[tuple[str, str, int], ...] = ()  # of others: GPU, owner, bytes (0 = all of it)
    shared_files: tuple[str, ...] = ()  # that a dataset had open when its workers were forked


def shortcomings(found: Surroundings) -> Iterator[str]:
    """Yield a message for each shortage that would end training, slow it down, or make it wrong, with what to do."""
    if found.folder is not None and found.why_not_writable:
        yield (
            f"Checkpoints cannot be written to {printable_path(found.folder)}: {found.why_not_writable}. "
            "Choose another folder: ModelCheckpoint(dirpath=...), or Trainer(default_root_dir=...)."
        )
    elif found.disk_free_bytes is not None and found.checkpoint_bytes is not None:
        needed = _CHECKPOINTS * found.checkpoint_bytes
        if found.disk_free_bytes < needed:
            yield (
                f"The disk of {printable_path(found.folder)} has {format_bytes(found.disk_free_bytes)} left, but two "
                f"checkpoints need {format_bytes(needed)}. Free disk space, or choose another folder for checkpoints."
            )
    if found.shm_bytes is not None and (found.prefetched_bytes or 0) > found.shm_bytes:
        yield (
            f"The DataLoader's workers prefetch up to {format_bytes(found.prefetched_bytes or 0)} of batches, but "
            f"/dev/shm has only {format_bytes(found.shm_bytes)}. {SHARED_MEMORY}"
        )
    if found.cores is not None and found.workers > found.cores:
        yield (
            f"The ranks on this machine have {found.workers} DataLoader workers in total, but only {found.cores:g} "
            f"CPU core{'s' * (found.cores != 1)}. Lower num_workers, or request more cores."
        )
    if found.shared_files:
        yield (
            f"The DataLoader's workers share {named(found.shared_files)}, open since before they were forked, and may "
            f"read each other's data. {OPEN_IN_WORKER}"
        )
    for gpu, who, size in found.claims:
        much = format_bytes(size) if size else "all"
        yield (
            f"{printable(who)} has claimed {much} of the memory of GPU {gpu}, and may use it at any time. "
            "Claim GPUs as well: choose them with this package, or with `lightning-gpu-tools run`."
        )
