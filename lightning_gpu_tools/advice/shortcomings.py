"""What would end a training later, by what its first step has shown. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lightning_gpu_tools.units import format_bytes, printable, printable_path

# Where a new checkpoint is complete before the one that it replaces is removed, both are there.
_CHECKPOINTS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Surroundings:
    """What a training needs of its machine, and what there is; ``None`` = unknown, or not needed.

    Attributes:
        folder: Where checkpoints go.
        is_writable: Whether files can be made there.
        disk_free_bytes: Free space there.
        checkpoint_bytes: Weights and optimizer states.
        prefetched_bytes: Batches that the workers of all ranks of this machine keep ready.
        shm_bytes: Size of ``/dev/shm``, through which they pass them.
        workers: Of all ranks of this machine.
        cores: That the job may use.
        claims: What others have claimed of the GPUs that are trained on: the GPU, who, how much (0 = all of it).
    """

    folder: str | None = None
    is_writable: bool = True
    disk_free_bytes: int | None = None
    checkpoint_bytes: int | None = None
    prefetched_bytes: int | None = None
    shm_bytes: int | None = None
    workers: int = 0
    cores: float | None = None
    claims: tuple[tuple[str, str, int], ...] = ()


def shortcomings(found: Surroundings) -> Iterator[str]:
    """Give what would end the training, or slow it down, each with what to do."""
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
    if found.shm_bytes is not None and found.prefetched_bytes is not None and found.prefetched_bytes > found.shm_bytes:
        yield (
            f"The DataLoader's workers keep up to {format_bytes(found.prefetched_bytes)} of batches ready, and "
            f"/dev/shm has {format_bytes(found.shm_bytes)}. Start the container with --ipc=host or --shm-size, or use "
            "fewer workers (num_workers) or a smaller prefetch_factor."
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
