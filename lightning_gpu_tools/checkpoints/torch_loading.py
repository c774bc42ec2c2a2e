"""Loading of files: plain content is built from its description, and torch loads the rest."""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import pickle
import re
import warnings
from collections import Counter, OrderedDict, defaultdict
from typing import Any

import torch

from lightning_gpu_tools.checkpoints.content import Entries, put_weights
from lightning_gpu_tools.checkpoints.faults import RESTORE, Fault, comes_from_contents, faults_of
from lightning_gpu_tools.checkpoints.file_tensors import dtype_of, mapped_bytes, moved, path_of
from lightning_gpu_tools.checkpoints.structure import MAX_DEPTH, Opaque, StorageInfo, Structure, TensorInfo
from lightning_gpu_tools.checkpoints.unsafe_globals import beyond_plain_data, explain_blocked
from lightning_gpu_tools.errors import UnsafeCheckpointError
from lightning_gpu_tools.units import printable


def load_file(structure: Structure, map_location: Any, weights_only: bool) -> Any:
    """Return the contents of an open file; its numbers are mapped where possible.

    Raises:
        UnsafeCheckpointError: The file holds more than plain data, and ``weights_only`` is true.
        BrokenCheckpointError: Torch cannot rebuild the contents.
    """
    if not structure.is_of_torch:
        for info in structure.content.values():
            dtype_of(info.dtype)  # which an older torch may lack
        weights = _Builder(structure).build(structure.content)
        return OrderedDict((name, moved(value, map_location)) for name, value in weights.items())
    if weights_only:
        if refused := refusal(structure):
            raise refused
        _warn_of_old_torch()
        if map_location == "cpu":
            with contextlib.suppress(NotPlainError):
                return _Builder(structure).build(structure.content)
    file = structure.file
    mapped = bool(structure.records) and not isinstance(file, io.BytesIO)  # torch maps only zip files
    file.seek(0)
    try:
        with torch.sparse.check_sparse_tensor_invariants():  # type: ignore[no-untyped-call] # off by default in torch
            source = path_of(file) if mapped else file
            return torch.load(source, map_location=map_location, weights_only=weights_only, mmap=mapped)
    except Exception as error:  # damaged or hostile bytes can cause any error in torch
        explained = _explained(structure, error, weights_only, map_location)
        if explained is None:
            raise
        with faults_of(structure.path):
            raise explained from None


@functools.cache
def _warn_of_old_torch() -> None:
    if torch.__version__ < "2.10":  # compares versions, not text
        warnings.warn(
            f"torch {torch.__version__} has known vulnerabilities in weights_only=True (CVE-2026-24747). Each file is "
            "checked before torch opens it, but please update to torch 2.10 or later.",
            stacklevel=2,
        )


def described_weights(structure: Structure, entries: Entries) -> tuple[Any, dict[str, dict[str, str]]]:
    """Return the content with tensors as weights, and entry -> key -> kind of the omitted values."""
    build = _Builder(structure, weights_alone=True).build
    sets: dict[str, OrderedDict[str, Any]] = {}
    left_out: defaultdict[str, dict[str, str]] = defaultdict(dict)
    for entry, weights in entries.items():
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
    """A builder of content from its description, with mapped tensors, in half of torch's time.

    Raises :class:`NotPlainError` for anything but plain data and tensors. ``weights_alone``: make parameters tensors.
    """

    def __init__(self, structure: Structure, *, weights_alone: bool = False) -> None:
        self._file: Any = mapped_bytes(structure.file).untyped_storage()
        self._places = structure.places
        self._storages: dict[str, Any] = {}
        self._weights_alone = weights_alone
        self._made: dict[int, Any] = {}  # so that shared objects stay shared

    def build(self, value: Any, depth: int = 0) -> Any:
        kind = type(value)
        if kind in _ATOMS:
            return value
        if depth > MAX_DEPTH:
            raise RecursionError
        if id(value) in self._made:
            return self._made[id(value)]
        built: Any
        if isinstance(value, TensorInfo):
            if not is_plain(value) or (value.is_parameter and not self._weights_alone):
                raise NotPlainError(value.kind or value.dtype)
            empty: Any = torch.empty(0, dtype=dtype_of(value.dtype), device="cpu")
            built = empty.set_(self._storage(value.storage), value.offset, value.shape, value.strides)
        elif kind in (dict, OrderedDict, Counter):
            built = kind()
            for key, item in value.items():
                built[self.build(key, depth + 1)] = self.build(item, depth + 1)
            if attributes := getattr(value, "__dict__", None):
                vars(built).update(self.build(attributes, depth + 1))
        elif kind in (list, tuple):
            built = kind(self.build(item, depth + 1) for item in value)
        else:
            raise NotPlainError(value.kind if isinstance(value, Opaque) else kind.__name__)
        self._made[id(value)] = built
        return built

    def _storage(self, described: Any) -> Any:
        """Return the numbers of a storage as a part of the mapped file."""
        key = described.key
        if key not in self._storages:
            start = self._places[key]
            self._storages[key] = self._file[start : start + described.size_bytes]
        return self._storages[key]


_ATOMS = frozenset({str, int, float, bool, bytes, bytearray, type(None)})


class NotPlainError(Exception):
    """The error for a value that is more than plain data and plain tensors. The message is its kind."""


def holds_tensors(value: Any) -> bool:
    """Return whether a described value is or holds a tensor."""
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


def is_plain(tensor: Any) -> bool:
    """Return whether this describes a tensor of plain numbers."""
    if not isinstance(tensor, TensorInfo) or tensor.kind or tensor.strides is None or tensor.dtype.startswith("q"):
        return False
    return isinstance(getattr(torch, tensor.dtype, None), torch.dtype)


# torch treats these as plain data only after the module on the right is imported.
_REGISTERED_BY = {"torch.distributed.": "torch.distributed.tensor", "torch.nested._internal.": "torch._dynamo"}


def _explained(structure: Structure, error: Exception, weights_only: bool, map_location: Any) -> Exception | None:
    """Return an error that explains why torch could not load a file; ``None`` if torch's error is better."""
    if weights_only and isinstance(error, pickle.UnpicklingError):
        reason = re.search(r"WeightsUnpickler error:\s*(.*)", str(error))
        foreign = beyond_plain_data(structure.globals)
        why = reason[1] if reason else type(error).__name__
        return UnsafeCheckpointError(explain_blocked(structure.path, foreign, structure.filled, why))
    asked_for = not weights_only or map_location != "cpu"  # the caller's class or device may be the cause
    if asked_for or isinstance(error, MemoryError) or not comes_from_contents(error):
        return None
    return Fault(f"is damaged: its contents cannot be rebuilt ({type(error).__name__})", RESTORE)


def refusal(structure: Structure) -> UnsafeCheckpointError | None:
    """Return the error if the description shows that ``weights_only=True`` refuses a file."""
    for prefix, module in _REGISTERED_BY.items():
        if any(name.startswith(prefix) for name in structure.globals):
            importlib.import_module(module)
    foreign = beyond_plain_data(structure.globals)
    calls = [name for name in foreign if name.endswith("(...)")]
    items = torch.serialization.get_safe_globals()
    allowed = {item[1] if isinstance(item, tuple) else f"{item.__module__}.{item.__qualname__}" for item in items}
    blocked = calls or [name for name in foreign if name not in allowed]
    return UnsafeCheckpointError(explain_blocked(structure.path, blocked, structure.filled)) if blocked else None
