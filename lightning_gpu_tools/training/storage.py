"""The file systems that a dataset is read from and that checkpoints are written to, and places to copy it to."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from lightning_gpu_tools.host import read_host_budget
from lightning_gpu_tools.mounts import (
    DISK_FILE_SYSTEMS,
    MEMORY_FILE_SYSTEMS,
    Mount,
    is_network,
    mount_of,
    read_mounts,
)
from lightning_gpu_tools.training.run_measurements import Place, Storage

# Our defaults.
_INTERVAL_S = 1.0
_MAX_POLLS = 30
_MAX_WORKERS = 4  # in each sample
_MIN_FREE_BYTES = 10 * 2**30  # for data of unknown size
_MEMORY_SHARE = 0.5  # of free memory, for a copy of the data
_MAX_PATH = 4096  # PATH_MAX of linux/limits.h
# Usual names of attributes for the place of the data, such as torchvision's root and numpy's filename.
_NAMES = ("root", "path", "data_dir", "data_path", "root_dir", "folder", "directory", "filename", "file_path")
_PARTS = ("dataset", "datasets", "data")  # Subset, ConcatDataset, an array in a file
_MAX_DEPTH = 4  # of datasets in datasets
_CODE = (".py", ".pyc", ".so")
_SHARED_MEMORY = "/dev/shm"


class StorageWatch:
    """A sampler of the files that a loader's workers have open, for a background thread."""

    def __init__(
        self,
        worker_pids: Callable[[], Sequence[int]],
        dataset: Callable[[], object],
        checkpoint_folder: Callable[[], str | None],
    ) -> None:
        self.data: Storage | None = None
        self.checkpoints: Storage | None = None
        self._worker_pids, self._dataset, self._checkpoint_folder = worker_pids, dataset, checkpoint_folder
        self._polls = 0
        self._read: Counter[str] = Counter()  # files, by how often a worker had them open
        self._named: tuple[int, dict[str, int | None]] = (0, {})  # the dataset's identity, and its paths with sizes
        self._written: tuple[str | None, str] = (None, "")  # the folder of checkpoints, and its real path

    def poll(self) -> float:
        """Sample some workers, and return the seconds until the next sample."""
        self._polls += 1
        pids = self._worker_pids()
        own = _open_files("self") if pids else set()
        for i in range(min(_MAX_WORKERS, len(pids))):
            self._read.update(_open_files(pids[(self._polls + i) % len(pids)]) - own)
        # Paths are resolved once: later, a file server may hang.
        dataset, folder = self._dataset(), self._checkpoint_folder()
        if self._named[0] != id(dataset):
            paths = named_paths(dataset)
            self._named = id(dataset), {one: os.path.getsize(one) if os.path.isfile(one) else None for one in paths}
        if folder is not None and self._written[0] != folder:
            self._written = folder, "" if "://" in folder else os.path.realpath(folder)
        mounts, named = read_mounts(), self._named[1]
        sizes = [named.get(file) for file in self._read]
        size_bytes = sum(filter(None, sizes)) if sizes and None not in sizes else None
        self.data = _storage(path_of_data(self._read, list(named), mounts), mounts, size_bytes)
        self.checkpoints = _storage(self._written[1], mounts, None)
        return _INTERVAL_S if self._polls < _MAX_POLLS else math.inf


def path_of_data(read: Mapping[str, int], named: Sequence[str], mounts: Mapping[str, Mount]) -> str | None:
    """Return the file or folder that a dataset reads; ``None`` if unknown.

    ``read`` has the files that workers had open, and how often. Without any, the dataset's own paths decide, if they
    are on one file system.
    """
    if not read:
        return named[0] if len({mount_of(path, mounts) for path in named}) == 1 else None
    on_mounts: dict[Mount | None, list[str]] = {}
    for file in read:
        on_mounts.setdefault(mount_of(file, mounts), []).append(file)
    files = max(on_mounts.values(), key=lambda some: sum(read[file] for file in some))
    known = (path for path in named if any(_contains(path, file) for file in files))
    return next(known, None) or os.path.commonpath(files)


def named_paths(dataset: object) -> list[str]:
    """Return the real paths in attributes of a dataset and its parts, likely ones first, without running its code."""
    texts = sorted(_texts(dataset, 0), key=lambda one: one[0] not in _NAMES)
    likely = (text for name, text in texts if (name in _NAMES or os.sep in text) and len(text) < _MAX_PATH)
    return list(dict.fromkeys(os.path.realpath(text) for text in likely if os.path.exists(text)))


def _texts(thing: object, depth: int) -> Iterator[tuple[str, str]]:
    """Yield names and values of attributes that may be paths; of a list of files, the folder of the first."""
    try:
        attributes = list(vars(thing).items())
    except TypeError:  # it has none
        return
    for name, value in attributes:
        first = value
        for _ in range(2):  # samples and imgs of torchvision are lists of tuples
            first = first[0] if type(first) in (list, tuple) and first else first
        if isinstance(first, (str, Path)):
            yield name, str(first) if first is value else os.path.dirname(first)
        elif name in _PARTS and depth < _MAX_DEPTH:
            yield from _texts(first, depth + 1)


def _open_files(pid: object) -> set[str]:
    """Return the files that a process has open for reading only; empty if it has ended or is hidden."""
    folder, links = f"/proc/{pid}/fd", []
    with suppress(OSError):
        links = os.listdir(folder)
    found = set()
    for link in links:
        with suppress(OSError):  # closed since the line above
            is_written = os.lstat(f"{folder}/{link}").st_mode & 0o200  # of the link itself, without disk access
            target = os.readlink(f"{folder}/{link}")
            if not is_written and _is_file(target):
                found.add(target)
    return found


def _is_file(target: str) -> bool:
    is_kernels = target.startswith(("/dev/", "/proc/", "/sys/")) and not _contains(_SHARED_MEMORY, target)
    return target.startswith("/") and not is_kernels and not target.endswith((" (deleted)", *_CODE))


def _contains(path: str, file: str) -> bool:
    return path == file or file.startswith(f"{path.rstrip('/')}/")


def _storage(path: str | None, mounts: Mapping[str, Mount], size_bytes: int | None) -> Storage | None:
    mount = mount_of(path, mounts) if path else None
    if path is None or mount is None:
        return None
    of_others = is_network(mount.file_system)
    return Storage(
        path=path,
        file_system=mount.file_system,
        is_network=of_others,
        elsewhere=(None if of_others is False else _disk(mounts, size_bytes))
        or (None if mount.file_system in MEMORY_FILE_SYSTEMS else _memory(mounts, size_bytes)),
    )


def _disk(mounts: Mapping[str, Mount], size_bytes: int | None) -> Place | None:
    """Return the folder on the local disk with the most free space; ``None`` if no disk has enough."""
    temporary = os.path.realpath(tempfile.gettempdir())
    folders: dict[str, tuple[str, Mount]] = {}  # by device
    for folder, mount in ((temporary, mount_of(temporary, mounts)), *mounts.items()):
        is_disk = mount is not None and mount.file_system in DISK_FILE_SYSTEMS  # others may hang
        if mount is not None and is_disk and os.path.isdir(folder) and os.access(folder, os.W_OK):
            folders.setdefault(mount.device, (folder, mount))
    best = max((_place(*one) for one in folders.values()), key=lambda one: one.free_bytes, default=None)
    needed = _MIN_FREE_BYTES if size_bytes is None else size_bytes
    return best if best is not None and best.free_bytes > needed else None


def _memory(mounts: Mapping[str, Mount], size_bytes: int | None) -> Place | None:
    """Return ``/dev/shm`` if the data is known to fit."""
    mount = mount_of(_SHARED_MEMORY, mounts)
    if size_bytes is None or mount is None or mount.file_system not in MEMORY_FILE_SYSTEMS:
        return None
    place = _place(_SHARED_MEMORY, mount)
    free_bytes = min(place.free_bytes, read_host_budget().memory_available_bytes)
    return place if size_bytes < _MEMORY_SHARE * free_bytes and os.access(_SHARED_MEMORY, os.W_OK) else None


def _place(folder: str, mount: Mount) -> Place:
    return Place(path=folder, file_system=mount.file_system, free_bytes=shutil.disk_usage(folder).free)
