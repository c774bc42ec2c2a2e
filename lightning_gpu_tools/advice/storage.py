"""Phrases and evidence about the storage of a dataset or of checkpoints. Pure."""

from __future__ import annotations

from lightning_gpu_tools.advice.findings import Evidence
from lightning_gpu_tools.training.run_measurements import Storage
from lightning_gpu_tools.units import format_bytes, printable, printable_path


def described(storage: Storage) -> str:
    """Return a phrase about a storage: ``"/data is on nfs4, a network file system"``."""
    kind = ", a network file system" if storage.is_network else ", which is memory" if storage.is_memory else ""
    return f"{printable_path(storage.path)} is on {printable(storage.file_system)}{kind}"


def elsewhere(storage: Storage | None) -> str | None:
    """Return a phrase for a better place for the contents; ``None`` if there is none."""
    if storage is None or (storage.elsewhere is None and storage.is_network is not False):
        return "a local disk"
    if (place := storage.elsewhere) is None:
        return None
    return f"{printable_path(place.path)} ({printable(place.file_system)}, {format_bytes(place.free_bytes)} free)"


def evidence_of(storage: Storage | None) -> Evidence:
    """Return a storage as evidence."""
    if storage is None:
        return {}
    return {
        "storage_path": printable_path(storage.path),
        "file_system": printable(storage.file_system),
        "io_pressure_percent": storage.io_pressure_percent,
    }
