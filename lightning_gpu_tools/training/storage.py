"""The file systems that a dataset is read from and that checkpoints are written to."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lightning_gpu_tools.processes import mount_of, read_mounts

# Usual names of attributes for the place of the data, such as torchvision's root and numpy's filename.
_NAMES = (
    "root",
    "path",
    "data_dir",
    "data_path",
    "root_dir",
    "folder",
    "directory",
    "filename",
    "file_path",
    "samples",
)
_PARTS = ("dataset", "datasets", "data")  # Subset, ConcatDataset, an array in a file
_MAX_DEPTH = 4  # our default: datasets in datasets
# File system types as in mountinfo; in user space ("fuse.gcsfuse"), they are nearly all of another machine.
_NETWORK = ("nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "afs", "wekafs", "panfs", "pvfs2")


@dataclass(frozen=True, kw_only=True, slots=True)
class Storage:
    """The storage of a dataset or of checkpoints."""

    path: str  # real path of the file or folder
    file_system: str  # type of its file system, as the kernel names it: "nfs4"

    @property
    def is_network(self) -> bool:
        """Whether it is on other machines."""
        return self.file_system in _NETWORK or self.file_system.startswith("fuse.")

    @property
    def is_memory(self) -> bool:
        """Whether it is in memory, not on a disk."""
        return self.file_system in ("tmpfs", "ramfs")


def storage_of(path: str | None) -> Storage | None:
    """Return the storage of a local file or folder, which may not exist yet; ``None`` if unknown."""
    if path is None or "://" in path:
        return None
    real = os.path.realpath(path)
    mount = mount_of(real, read_mounts())
    return None if mount is None else Storage(path=real, file_system=mount.file_system)


def path_of_data(dataset: object) -> str | None:
    """Return the path in an attribute of a dataset or of its parts, without running its code; ``None`` without one."""
    return next((path for path in _paths(dataset, 0) if "\0" not in path and os.path.exists(path)), None)


def _paths(thing: object, depth: int) -> Iterator[str]:
    """Yield values of attributes that may be paths; of a list of files, the folder of the first."""
    attributes = getattr(thing, "__dict__", {})
    for name in _NAMES:
        first = value = attributes.get(name)
        for _ in range(2):  # samples of torchvision are a list of tuples
            first = first[0] if type(first) in (list, tuple) and first else first
        if isinstance(first, (str, Path)):
            yield str(first) if first is value else os.path.dirname(first)
    for name in _PARTS:
        part = attributes.get(name)
        if depth < _MAX_DEPTH:
            yield from _paths(part[0] if type(part) in (list, tuple) and part else part, depth + 1)
