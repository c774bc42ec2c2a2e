"""Reading and writing checkpoint files with torch: safely, to the CPU, and with errors that say what is the matter."""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import os
import pickle
import re
import shlex
import sys
import warnings
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, BinaryIO, NamedTuple

import torch

from lightning_gpu_tools.checkpoints.content import Opaque, StorageInfo, TensorInfo, all_state_dicts, put_weights
from lightning_gpu_tools.checkpoints.describing import describe
from lightning_gpu_tools.checkpoints.faults import RESTORE, Fault, comes_from_contents, faults_of
from lightning_gpu_tools.checkpoints.file_tensors import (
    dtype_of,
    mapped_bytes,
    moved,
    name_of_open_file,
    needs_newer_torch,
)
from lightning_gpu_tools.checkpoints.formats import safetensors
from lightning_gpu_tools.checkpoints.formats.torch_distributed import Place
from lightning_gpu_tools.checkpoints.key_tree import list_groups
from lightning_gpu_tools.checkpoints.shards import SplitTensorInfo
from lightning_gpu_tools.checkpoints.sources import opened_source
from lightning_gpu_tools.checkpoints.split_tensors import joined, put_in_place
from lightning_gpu_tools.checkpoints.structure import (
    Assembly,
    Structure,
    compare_with_checksums,
)
from lightning_gpu_tools.checkpoints.unsafe_globals import beyond_plain_data, explain_blocked
from lightning_gpu_tools.errors import UnsafeCheckpointError
from lightning_gpu_tools.files import writing
from lightning_gpu_tools.units import printable, printable_path


def read_checkpoint(
    path: str | os.PathLike[str], *, map_location: Any = "cpu", weights_only: bool = True, verify: bool = False
) -> Any:
    """Return what a checkpoint file, or a folder with the shards of one, holds.

    Tensors are mapped: they take no memory until they are used, and change with the file.
    A tensor of several parts is put together for each operation, and takes memory only meanwhile.

    ``weights_only`` refuses all but plain data with an ``UnsafeCheckpointError``; ``verify`` compares checksums first.
    Other errors are those of ``read_structure``.
    """

    def load(structure: Structure) -> Any:
        try:
            return _load(structure, map_location, weights_only)
        except UnsafeCheckpointError as error:
            values = [value for weights in structure.entries.values() for value in weights.values()]
            is_shard = structure.path != os.fspath(path)  # and the weights are elsewhere
            if is_shard or (values and all(_is_plain(value) or not _holds_tensors(value) for value in values)):
                shown = printable_path(path)
                error.args = (
                    f"{error}\n  To take only the weights, without opening the rest: "
                    f"lightning_gpu_tools.load_weights(model, {shown!r}), "
                    f"or: lightning-gpu-tools checkpoint convert {shlex.quote(shown)} weights.pt --weights",
                )
            raise

    return _read(path, load, verify, map_location)


class Unread(NamedTuple):
    """What was left unread of a checkpoint because only running code could open it."""

    classes: tuple[str, ...]  # classes and functions that the file names
    values: Mapping[str, Mapping[str, str]]  # entry -> key -> class, of objects among the weights


def read_weights(path: str | os.PathLike[str], *, weights_only: bool = True) -> tuple[Any, Unread]:
    """Return the weights of a file or a folder of shards among descriptions of the rest, and what was left unread.

    A weight that is no block of plain numbers is an ``UnsafeCheckpointError``. If not ``weights_only``, everything is
    opened instead, and may run code.
    """
    classes: set[str] = set()
    values: defaultdict[str, dict[str, str]] = defaultdict(dict)

    def load(structure: Structure) -> Any:
        if not weights_only or structure.format == "safetensors":
            return _load(structure, "cpu", weights_only)
        content, left_out = _described_weights(structure)
        refusal = _refusal(structure)
        if left_out and refusal is None:
            try:
                return _load(structure, "cpu", weights_only)
            except UnsafeCheckpointError as error:
                refusal = error
        weights = {
            key: kind
            for entry, kinds in left_out.items()
            for key, kind in kinds.items()
            if _holds_tensors(structure.entries[entry][key]) and not key.endswith("_extra_state")
        }
        if weights:
            kinds = ", ".join(sorted({*weights.values()}))
            raise UnsafeCheckpointError(
                f"{refusal}\n  Some of its weights are more than numbers, so they cannot be taken without opening it "
                f"({kinds}): {list_groups(weights)}."
            )
        classes.update(beyond_plain_data(structure.globals))
        for entry, unopened in left_out.items():
            values[entry].update(unopened)
        return content

    content = _read(path, load)
    for entry, weights in all_state_dicts(content).items() if classes else ():
        objects = {key: value.kind for key, value in weights.items() if isinstance(value, Opaque)}
        if objects:  # of a folder by torch.distributed.checkpoint, where each is a file of its own
            values[entry].update(objects)
            rest = OrderedDict((key, value) for key, value in weights.items() if key not in objects)
            content = put_weights(content, {entry: rest})
    return content, Unread(tuple(sorted(classes)), values)


def write_checkpoint(content: Any, path: str | os.PathLike[str]) -> None:
    """Replace a file in one step, without a second copy of the weights in memory."""
    with writing(path) as file, watched(file) as watched_file:
        torch.save(content, watched_file)


def _read(
    path: str | os.PathLike[str], load: Callable[[Structure], Any], verify: bool = False, map_location: Any = "cpu"
) -> Any:
    with opened_source(path) as structure, faults_of(path):
        if structure.part is not None:
            raise structure.part
        for file in structure.files if verify else ():
            compare_with_checksums(file)
        if structure.assembly is None:
            return load(structure)
        return _load_shards(structure.assembly, load, map_location)


def _load_shards(assembly: Assembly, load: Callable[[Structure], Any], map_location: Any) -> Any:
    shards = assembly.shards
    contents = {name: load(shards[name]) for name in assembly.loaded}
    numbers: dict[str, torch.UntypedStorage] = {}

    def made(leaf: Any) -> Any:
        if isinstance(leaf, SplitTensorInfo):
            for part in leaf.parts:
                if part.file not in numbers and 0 not in part.shape:
                    numbers[part.file] = mapped_bytes(shards[part.file].file).untyped_storage()
            return moved(joined(leaf, numbers), map_location)
        if isinstance(leaf, Place):
            shard = shards[leaf.file]
            return load(describe(io.BytesIO(leaf.read_from(shard.file)), shard.path))
        return leaf

    return put_in_place(assembly.assemble(contents), made)


def _load(structure: Structure, map_location: Any, weights_only: bool) -> Any:
    if structure.format == "safetensors":
        return safetensors.load(structure, map_location)
    refusal = _refusal(structure) if weights_only else None
    if refusal is not None and any(name.endswith("(...)") for name in structure.globals):  # torch lets it pass
        raise refusal
    if weights_only:
        _warn_of_old_torch()
        if refusal is None and map_location == "cpu":
            with contextlib.suppress(NotPlainError):
                return _Builder(structure).build(structure.content)
    file = structure.file
    name = name_of_open_file(file) if structure.format == "zip" else None
    file.seek(0)
    try:
        with torch.sparse.check_sparse_tensor_invariants():  # type: ignore[no-untyped-call] # torch's default is not to
            return torch.load(name or file, map_location=map_location, weights_only=weights_only, mmap=name is not None)
    except Exception as error:  # damaged or hostile bytes make torch raise anything
        explained = refusal or _explained(structure, error, weights_only, map_location)
        if explained is None:
            raise
        with faults_of(structure.path):
            raise explained from None


@functools.cache
def _warn_of_old_torch() -> None:
    if torch.__version__ < "2.10":  # this compares versions, not text
        warnings.warn(
            f"torch {torch.__version__} has known holes in weights_only=True (CVE-2026-24747). Each file is checked "
            "before torch opens it, but update to torch 2.10 or later.",
            stacklevel=2,
        )


def _described_weights(structure: Structure) -> tuple[Any, dict[str, dict[str, str]]]:
    """Return the content with tensors for weights, and entry -> key -> kind of the values left out."""
    build = _Builder(structure, weights_alone=True).build
    sets: dict[str, OrderedDict[str, Any]] = {}
    left_out: defaultdict[str, dict[str, str]] = defaultdict(dict)
    for entry, weights in structure.entries.items():
        sets[entry] = OrderedDict()
        for key, value in weights.items():
            try:
                sets[entry][key] = build(value)
            except NotPlainError as error:  # noqa: PERF203 - costs nothing since Python 3.11
                left_out[entry][key] = printable(error)
        with contextlib.suppress(AttributeError, NotPlainError):
            sets[entry]._metadata = build(weights._metadata)  # type: ignore[attr-defined]
    return put_weights(structure.content, sets), left_out


class _Builder:
    """Makes of a description what torch would load, in half the time, with tensors mapped to the file.

    Raises :class:`NotPlainError` for all but plain data and tensors. ``weights_alone`` takes parameters as tensors.
    """

    def __init__(self, structure: Structure, *, weights_alone: bool = False) -> None:
        self._storage = _storages(structure)
        self._weights_alone = weights_alone
        self._made: dict[int, Any] = {}  # what was one object stays one

    def build(self, value: Any) -> Any:
        kind = type(value)
        if kind in _ATOMS:
            return value
        if id(value) in self._made:
            return self._made[id(value)]
        built: Any
        if isinstance(value, TensorInfo):
            if not _is_plain(value) or (value.is_parameter and not self._weights_alone):
                raise NotPlainError(value.kind or value.dtype)
            empty: Any = torch.empty(0, dtype=dtype_of(value.dtype), device="cpu")
            built = empty.set_(self._storage(value.storage), value.offset, value.shape, value.strides)
        elif kind in (dict, OrderedDict, Counter):
            built = kind()
            for key, item in value.items():
                built[self.build(key)] = self.build(item)
            if attributes := getattr(value, "__dict__", None):
                vars(built).update(self.build(attributes))
        elif kind in (list, tuple):
            built = kind(map(self.build, value))
        else:
            raise NotPlainError(value.kind if isinstance(value, Opaque) else kind.__name__)
        self._made[id(value)] = built
        return built


_ATOMS = frozenset({str, int, float, bool, bytes, bytearray, type(None)})


class NotPlainError(Exception):
    """What is named is more than plain data and plain tensors."""


def _holds_tensors(value: Any) -> bool:
    stack, seen = [value], set[int]()
    while stack:
        part = stack.pop()
        if isinstance(part, (TensorInfo, StorageInfo)):
            return True
        if id(part) not in seen:
            seen.add(id(part))
            if isinstance(part, Opaque):
                stack += part.state, part.items
            elif isinstance(part, (dict, list, tuple)):
                stack += part.values() if isinstance(part, dict) else part
    return False


def _is_plain(tensor: Any) -> bool:
    if not isinstance(tensor, TensorInfo) or tensor.kind or tensor.strides is None or tensor.dtype.startswith("q"):
        return False
    return isinstance(getattr(torch, tensor.dtype, None), torch.dtype)


def _storages(structure: Structure) -> Callable[[Any], Any]:
    """Return what gives the numbers of a storage: a part of the mapped file."""
    whole: Any = mapped_bytes(structure.file).untyped_storage()

    @functools.cache
    def numbers(storage: StorageInfo) -> Any:
        start = structure.places[storage.key]
        return whole[start : start + storage.size_bytes]

    return numbers


# torch takes these for plain data only after this module is imported.
_REGISTERED_BY = {"torch.distributed.": "torch.distributed.tensor", "torch.nested._internal.": "torch._dynamo"}


def _explained(structure: Structure, error: Exception, weights_only: bool, map_location: Any) -> Exception | None:
    """Return why torch could not load a file; ``None`` if its own error says it best."""
    if weights_only:
        foreign = beyond_plain_data(structure.globals)
        if foreign and isinstance(error, pickle.UnpicklingError):  # all names are allowed, but not what is done
            reason = re.search(r"WeightsUnpickler error:\s*(.*)", str(error))
            why = reason[1] if reason else ""
            return UnsafeCheckpointError(explain_blocked(structure.path, foreign, structure.filled, why))
        unknown = re.search(r"GLOBAL (\S+) was not an allowed global", str(error))
        if unknown and not foreign:
            module, _, name = unknown[1].rpartition(".")
            if hasattr(sys.modules.get(module), name):  # torch 2.15 has nested tensors, but does not load them
                return UnsafeCheckpointError(explain_blocked(structure.path, [unknown[1]]))
            return needs_newer_torch(unknown[1])
        if "Unsupported operand" in str(error):
            return UnsafeCheckpointError(
                f"{printable_path(structure.path)} is written in a pickle protocol that can do more than plain data "
                "needs, so it was not opened. Who wrote it can save it again with torch.save's default pickle_protocol."
            )
    asked_for = not weights_only or map_location != "cpu"  # the caller's class or device may be what fails
    if asked_for or isinstance(error, MemoryError) or not comes_from_contents(error):
        return None
    return Fault(f"is damaged: its contents cannot be put together ({type(error).__name__})", RESTORE)


def _refusal(structure: Structure) -> UnsafeCheckpointError | None:
    """Return why ``weights_only=True`` refuses a file, as far as its description shows it."""
    for prefix, module in _REGISTERED_BY.items():
        if any(name.startswith(prefix) for name in structure.globals):
            importlib.import_module(module)
    foreign = beyond_plain_data(structure.globals)
    calls = [name for name in foreign if name.endswith("(...)")]
    items = torch.serialization.get_safe_globals()
    allowed = {item[1] if isinstance(item, tuple) else f"{item.__module__}.{item.__qualname__}" for item in items}
    blocked = calls or [name for name in foreign if name not in allowed]
    return UnsafeCheckpointError(explain_blocked(structure.path, blocked, structure.filled)) if blocked else None


@contextlib.contextmanager
def watched(file: BinaryIO) -> Iterator[Any]:
    """Give a file for torch to write to, and raise what made that fail; torch only says that it failed."""
    watched_file = _WatchedFile(file)
    try:
        buffered = io.BufferedWriter(watched_file, _BUFFER_BYTES)
        yield buffered
        buffered.flush()
    except Exception:  # torch's own, of any kind, instead of the disk's
        if watched_file.error is not None:
            raise watched_file.error from None
        raise


_BUFFER_BYTES = 1 << 20  # torch writes a few bytes at a time


class _WatchedFile(io.RawIOBase):
    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.error: OSError | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = self.error or error
            raise
