"""Phrases and evidence about the storage of a dataset or of checkpoints. Pure."""

from __future__ import annotations

from lightning_gpu_tools.advice.findings import Evidence
from lightning_gpu_tools.training.storage import Storage
from lightning_gpu_tools.units import printable, printable_path


def storage_sentence(storage: Storage | None, subject: str = "") -> str:
    """Return a sentence after a space: ``" /data is on nfs4, a network file system."``; empty if it is unknown."""
    if storage is None:
        return ""
    kind = ", a network file system" if storage.is_network else ", which is memory" if storage.is_memory else ""
    return f" {subject}{printable_path(storage.path)} is on {printable(storage.file_system)}{kind}."


def may_be_remote(storage: Storage | None) -> bool:
    """Return whether a copy on a local disk may be faster."""
    return storage is None or storage.is_network


def evidence_of(storage: Storage | None) -> Evidence:
    """Return a storage as evidence."""
    if storage is None:
        return {}
    return {"storage_path": printable_path(storage.path), "file_system": printable(storage.file_system)}
