"""What the attributes of a dataset tell: what grows in it while its samples are loaded, and where its files are."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from lightning_gpu_tools.processes import mount_of, read_mounts

# Our defaults.
_EVERY_S = 5.0  # a reading takes about a millisecond
_UNTIL_KNOWN_S = 0.05  # until a worker has its dataset
_MAX_SAMPLES = 32  # entries of a container whose sizes are read
_MAX_DATASETS = 16
_MIN_GROWTH_BYTES = 2**20


class GrownAttribute(NamedTuple):
    """A list or dict of a dataset, with its bytes estimated from some of its entries."""

    name: str  # "Photos.cache"
    before_bytes: int
    now_bytes: int
    entries: int
    worker: int | None  # its number; None = the training process


class DatasetGrowth:
    """A record of what grows in a dataset in this process, from the first reading on."""

    def __init__(self, dataset: Callable[[], object]) -> None:
        """``dataset`` returns ``None`` until it is known."""
        self.grown: list[GrownAttribute] = []
        self._dataset = dataset
        self._first: dict[str, tuple[int, int]] | None = None

    def poll(self) -> float:
        """Read the sizes, and return the seconds until the next reading."""
        from torch.utils.data import get_worker_info  # not for the record alone, which reports have

        dataset, worker = self._dataset(), getattr(get_worker_info(), "id", None)
        if dataset is None:
            return _UNTIL_KNOWN_S
        with suppress(RuntimeError):  # the dataset has changed a dict meanwhile
            now = _containers(dataset)
            first = self._first = self._first or now
            grown = (GrownAttribute(name, first.get(name, (0, 0))[0], *now[name], worker) for name in now)
            self.grown = [item for item in grown if item.now_bytes - item.before_bytes >= _MIN_GROWTH_BYTES]
        return _EVERY_S


def _containers(dataset: object) -> dict[str, tuple[int, int]]:
    """Return the estimated bytes and the number of entries of each list and dict that is an attribute of a dataset."""
    from torch.utils.data import Dataset

    found, datasets = {}, [dataset]
    for owner in datasets:  # and those within it, such as in a Subset
        attributes = dict(getattr(owner, "__dict__", {}))
        for name, value in attributes.items():
            if isinstance(value, (list, dict)):
                found[f"{type(owner).__name__}.{name}"] = (_bytes_of(value), len(value))
        several = attributes.get("datasets")
        inner = [attributes.get("dataset"), *(several if isinstance(several, (list, tuple)) else ())]
        if len(datasets) < _MAX_DATASETS:
            datasets += [part for part in inner if isinstance(part, Dataset)][:_MAX_DATASETS]
    return found


def _bytes_of(value: Any, depth: int = 0) -> int:
    # Not of other classes, whose attributes may run code, nor of arrays in a file, such as those of h5py.
    if type(value).__module__.partition(".")[0] in ("numpy", "torch") and type(value).__name__ != "memmap":
        return int(getattr(value, "nbytes", 0))
    own = sys.getsizeof(value, 0)
    if depth > 1 or not isinstance(value, (list, tuple, dict)):
        return own
    if isinstance(value, dict):
        sample = [*islice(value.values(), _MAX_SAMPLES)]
    else:  # at even distances, because a list that was filled with None may be filled anywhere
        sample = [*value[:: 1 + len(value) // _MAX_SAMPLES]]
    return own + round(len(value) * fmean(_bytes_of(entry, depth + 1) for entry in sample)) if sample else own


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
