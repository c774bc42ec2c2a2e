"""What the attributes of a dataset tell: what grows in it while its samples are loaded, and where its files are."""

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
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


_PATHS = ("root", "path", "data_dir", "data_path", "root_dir", "folder", "filename")  # usual names of attributes


def path_of_data(dataset: object) -> str | None:
    """Return the path in an attribute of a dataset, or of the one inside a Subset; ``None`` without one."""
    attributes = getattr(dataset, "__dict__", {})
    found = (attributes[name] for name in _PATHS if isinstance(attributes.get(name), (str, os.PathLike)))
    inner = attributes.get("dataset")
    return next(map(str, found), None if inner is None else path_of_data(inner))


def storage_of(path: str | None) -> str:
    """Return where a file or folder is: ``"/data/set is on nfs4"``; empty if unknown, or if it is a URL."""
    if path is None or "://" in path or not os.path.exists(path):
        return ""
    real = os.path.realpath(path)
    mount = mount_of(real, read_mounts())
    return "" if mount is None else f"{real} is on {mount.file_system}"
