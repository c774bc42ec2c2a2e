"""Shortages that would end a training later, or slow it down: of disk, shared memory, cores, unclaimed GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lightning_gpu_tools.advice.failures import SHARED_MEMORY
from lightning_gpu_tools.units import format_bytes, printable, printable_path

# If a new checkpoint is complete before the old one is removed, both exist at the same time.
_CHECKPOINTS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Surroundings:
    """The needs of a training, and what its machine has; ``None`` = unknown, or not needed."""

    folder: str | None = None  # of checkpoints
    is_writable: bool = True
    disk_free_bytes: int | None = None
    checkpoint_bytes: int | None = None
    prefetched_bytes: int | None = None  # batches that the workers of all ranks of this machine keep ready
    shm_bytes: int | None = None  # size of /dev/shm, through which workers pass batches
    workers: int = 0  # of all ranks of this machine
    cores: float | None = None  # that the job may use
    claims: tuple[tuple[str, str, int], ...] = ()  # of others: GPU, owner, bytes (0 = all of it)


def shortcomings(found: Surroundings) -> Iterator[str]:
    """Yield each shortage that would end the training, or slow it down, with what to do."""
    if found.folder is not None and not found.is_writable:
        yield (
            f"Checkpoints cannot be written to {printable_path(found.folder)}: permission is denied. "
            "Choose another folder: dirpath of ModelCheckpoint, or default_root_dir of the Trainer."
        )
    elif found.disk_free_bytes is not None and found.checkpoint_bytes is not None:
        needed = _CHECKPOINTS * found.checkpoint_bytes
        if found.disk_free_bytes < needed:
            yield (
                f"The disk of {printable_path(found.folder)} has {format_bytes(found.disk_free_bytes)} left, and two "
                f"checkpoints need {format_bytes(needed)}. Free some, or choose another folder for checkpoints."
            )
    if found.shm_bytes is not None and (found.prefetched_bytes or 0) > found.shm_bytes:
        yield (
            f"The DataLoader's workers keep up to {format_bytes(found.prefetched_bytes or 0)} of batches ready, and "
            f"/dev/shm has {format_bytes(found.shm_bytes)}. {SHARED_MEMORY}"
        )
    if found.cores is not None and found.workers > found.cores:
        yield (
            f"The ranks of this machine have {found.workers} DataLoader workers in all, for {found.cores:g} CPU cores. "
            "Use fewer (num_workers), or ask for more cores."
        )
    for gpu, who, size in found.claims:
        much = format_bytes(size) if size else "all"
        yield (
            f"{printable(who)} has claimed {much} of the memory of GPU {gpu}, and may take it at any time. "
            "Claim it as well: choose GPUs with this package, or `lightning-gpu-tools run`."
        )
