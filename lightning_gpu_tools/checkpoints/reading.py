"""Safe reading of checkpoints of any format to the CPU, with errors that explain the problem.

Plain content is built from its description with mapped tensors, and torch loads the rest. Tensors in several parts are
joined when they are used.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import os
import pickle
import shlex
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, BinaryIO

import torch
from torch.utils._pytree import tree_map_only

from lightning_gpu_tools.checkpoints.content import (
    Entries,
    all_state_dicts,
    check_contents,
    check_training_state,
    describe_content,
    parts_of,
    put_weights,
)
from lightning_gpu_tools.checkpoints.formats import opened_source
from lightning_gpu_tools.checkpoints.inert_pickle import Opaque, beyond_plain_data, explain_blocked
from lightning_gpu_tools.checkpoints.key_tree import list_groups, quoted
from lightning_gpu_tools.checkpoints.state_dicts import weights_in, whole_weights
from lightning_gpu_tools.checkpoints.structure import (
    MAX_DEPTH,
    Fault,
    Part,
    StorageInfo,
    Structure,
    TensorInfo,
    comes_from_contents,
    compare_with_checksums,
    damaged,
    faults_of,
)
from lightning_gpu_tools.errors import BrokenCheckpointError, CheckpointError, UnsafeCheckpointError
from lightning_gpu_tools.units import printable, printable_path


def read_checkpoint(
    path: str | os.PathLike[str],
    *,
    map_location: Any = "cpu",
    weights_only: bool = True,
    verify: bool = False,
    opened: Structure | None = None,
) -> Any:
    """Return the contents of a checkpoint file or a folder of shards.

    Tensors are mapped: they take no memory until they are used, and change with the file. A tensor in several parts is
    joined for each operation, and takes memory only during it.

    With ``weights_only``, raises ``UnsafeCheckpointError`` for anything but plain data. With ``verify``, compares
    checksums first. Other errors are as in ``read_structure``. ``opened`` is the checkpoint, if it is already open.
    """
    with _opened(path, opened) as structure:
        if verify:
            compare_with_checksums(structure)
        try:
            return _loaded(structure, lambda file: _load_file(file, map_location, weights_only), map_location)
        except UnsafeCheckpointError as error:
            with contextlib.suppress(CheckpointError):
                weights_in(read_weights(path, opened=structure)[0], path)
                shown = printable_path(path)
                error.args = (
                    f"{error}\n  To load only the weights, without opening the rest, use "
                    f"lightning_gpu_tools.load_weights(model, {shown!r}), "
                    f"or: lightning-gpu-tools checkpoint convert {shlex.quote(shown)} weights.pt --weights",
                )
            raise


def read_weights(path: str | os.PathLike[str], *, opened: Structure | None = None) -> tuple[Any, tuple[str, ...]]:
    """Return the weights of a file or folder, with the rest only described, and the classes in the rest.

    Raises ``UnsafeCheckpointError`` for a weight that is not a block of plain numbers.
    """
    classes: set[str] = set()

    def load(structure: Structure) -> Any:
        entries = check_contents(structure.content, structure.path)
        content, odd = _described_weights(structure, entries)
        if odd:
            try:
                return _load_file(structure, "cpu", weights_only=True)
            except UnsafeCheckpointError as refusal:
                if weights := {key: kind for key, kind in odd.items() if kind}:
                    shown = ", ".join(sorted({*weights.values()}))
                    raise UnsafeCheckpointError(
                        f"{refusal}\n  Some of its weights are not plain tensors, so they cannot be loaded without "
                        f"opening it ({shown}): {list_groups(weights)}."
                    ) from None
        classes.update(beyond_plain_data(structure.globals))
        return content

    with _opened(path, opened) as structure:
        content = _loaded(structure, load, "cpu")
    for entry, weights in all_state_dicts(content).items() if classes else ():
        # In a folder by torch.distributed.checkpoint, each object is loaded like a file of its own.
        plain = {key: value for key, value in weights.items() if not isinstance(value, (Opaque, TensorInfo))}
        if len(plain) < len(weights):
            content = put_weights(content, {entry: OrderedDict(plain)})
    return content, tuple(sorted(classes))


def verify_checkpoint(path: str | os.PathLike[str]) -> tuple[Structure, tuple[str, ...]]:
    """Compare each whole file with its checksums, then load everything, or only the weights next to foreign classes.

    Returns the description, and the classes of what was not read. A checkpoint without an error here can be loaded.
    """
    with opened_source(path) as structure:
        compare_with_checksums(structure)
        classes: tuple[str, ...] = ()
        try:
            content = read_checkpoint(path, opened=structure)
        except UnsafeCheckpointError:
            content, classes = read_weights(path, opened=structure)
        for weights in weights_in(content, path).values():
            whole_weights(str(path), weights)
            for key, value in weights.items():
                # Without a dot, it may be the name of an architecture, beside the weights.
                if isinstance(value, (str, bytes, Mapping)) and "." in key and not key.endswith("_extra_state"):
                    raise BrokenCheckpointError(
                        f"{printable_path(path)}: the weight {quoted(key)} is {describe_content(value)}. Save a "
                        "module's state_dict."
                    )
        check_training_state(content, path)
        return structure, classes


@contextlib.contextmanager
def _opened(path: str | os.PathLike[str], opened: Structure | None) -> Iterator[Structure]:
    with contextlib.nullcontext(opened) if opened else opened_source(path) as structure, faults_of(path):
        yield structure


def _loaded(structure: Structure, load: Callable[[Structure], Any], map_location: Any) -> Any:
    """Return the contents of an open file or folder; ``load`` returns those of a file by torch."""
    if structure.assemble is None:
        return load(structure)
    shards = structure.shards
    numbers: dict[str, torch.UntypedStorage] = {}

    def replaced(leaf: Any) -> Any:
        if isinstance(leaf, Structure):  # an object in a folder by torch.distributed.checkpoint
            return load(leaf)
        if not isinstance(leaf, TensorInfo) or not leaf.parts:
            return leaf
        for part in leaf.parts:
            if part.file not in numbers and 0 not in part.shape:
                numbers[part.file] = _mapped_bytes(shards.get(part.file, structure).file)
        tensor = _joined(leaf, numbers)
        is_device = isinstance(map_location, (str, torch.device)) and str(map_location) != "cpu"
        return tensor.to(map_location) if is_device else tensor

    contents = {name: _loaded(shards[name], load, map_location) for name in structure.loaded}
    return _rebuilt(structure.assemble(contents), replaced, {})


def _load_file(structure: Structure, map_location: Any, weights_only: bool) -> Any:
    """Return the contents of an open file by torch; its numbers are mapped where possible.

    Raises:
        UnsafeCheckpointError: The file holds more than plain data, and ``weights_only`` is true.
        BrokenCheckpointError: Torch cannot rebuild the contents.
    """
    if weights_only:
        _refuse_code(structure)
        _warn_of_old_torch()
        if map_location == "cpu":
            with contextlib.suppress(_NotPlainError):
                return _rebuilt(structure.content, _mapped(structure), {})
    file = structure.file
    mapped = bool(structure.records) and not isinstance(file, io.BytesIO)  # torch maps only zip files
    file.seek(0)
    try:
        with torch.sparse.check_sparse_tensor_invariants():  # type: ignore[no-untyped-call] # off by default in torch
            source = _path_of(file) if mapped else file
            return torch.load(source, map_location=map_location, weights_only=weights_only, mmap=mapped)
    except Exception as error:  # damaged or hostile bytes can cause any error in torch
        if weights_only and isinstance(error, pickle.UnpicklingError):
            names = beyond_plain_data(structure.globals) or ["what torch does not allow"]
            raise UnsafeCheckpointError(f"{explain_blocked(structure.path, names)} Save only plain data.") from None
        asked_for = not weights_only or map_location != "cpu"  # the caller's class or device may be the cause
        if asked_for or isinstance(error, MemoryError) or not comes_from_contents(error):
            raise
        with faults_of(structure.path):
            raise damaged(f"its contents cannot be rebuilt ({type(error).__name__})") from None


@functools.cache
def _warn_of_old_torch() -> None:
    if torch.__version__ < "2.10":  # compares versions, not text
        warnings.warn(
            f"torch {torch.__version__} has known vulnerabilities in weights_only=True (CVE-2026-24747). Each file is "
            "checked before torch opens it, but please update to torch 2.10 or later.",
            stacklevel=2,
        )


def _described_weights(structure: Structure, entries: Entries) -> tuple[Any, dict[str, str]]:
    """Return the content with tensors as weights, and the keys left out -> their kind; ``""`` if it is no weight."""
    make, made = _mapped(structure, weights_alone=True), dict[int, Any]()
    sets: dict[str, OrderedDict[str, Any]] = {}
    left_out: dict[str, str] = {}
    for entry, weights in entries.items():
        sets[entry] = OrderedDict()
        for key, value in weights.items():
            try:
                sets[entry][key] = _rebuilt(value, make, made)
            except _NotPlainError as error:  # noqa: PERF203 - costs nothing since Python 3.11
                holds_tensors = any(isinstance(part, (TensorInfo, StorageInfo)) for part in parts_of(value))
                # Without a dot, it may be an argument beside the weights.
                is_weight = (holds_tensors or "." in key) and not key.endswith("_extra_state")
                left_out[key] = printable(error) if is_weight else ""
        with contextlib.suppress(AttributeError, _NotPlainError):
            sets[entry]._metadata = _rebuilt(weights._metadata, make, made)  # type: ignore[attr-defined]
    return put_weights(structure.content, sets), left_out


def _mapped(structure: Structure, *, weights_alone: bool = False) -> Callable[[Any], Any]:
    """Return a function that maps a described tensor, in half of torch's time.

    The function raises :class:`_NotPlainError` for anything but a plain tensor, and makes parameters
    tensors if ``weights_alone``.
    """
    file: Any = _mapped_bytes(structure.file)
    storages: dict[str, Any] = {}

    def make(leaf: Any) -> torch.Tensor:
        if not isinstance(leaf, TensorInfo):
            raise _NotPlainError(leaf.kind if isinstance(leaf, Opaque) else type(leaf).__name__)
        is_plain = not leaf.kind and leaf.strides is not None and not leaf.dtype.startswith("q")
        if not is_plain or (leaf.is_parameter and not weights_alone):
            raise _NotPlainError(leaf.kind or leaf.dtype)
        storage: Any = leaf.storage
        if storage.key not in storages:  # its numbers are a part of the mapped file
            start = structure.places[storage.key]
            storages[storage.key] = file[start : start + storage.size_bytes]
        empty = torch.empty(0, dtype=_dtype_of(leaf.dtype), device="cpu")
        return empty.set_(storages[storage.key], leaf.offset, leaf.shape, leaf.strides)  # type: ignore[arg-type]

    return make


def _rebuilt(value: Any, make: Callable[[Any], Any], made: dict[int, Any], depth: int = 0) -> Any:
    """Copy dictionaries, lists and tuples, with ``make(leaf)`` in place of other parts. What is shared stays shared."""
    kind = type(value)
    if kind in _ATOMS:
        return value
    if depth > MAX_DEPTH:
        raise RecursionError
    if id(value) in made:
        return made[id(value)]
    built: Any
    if kind in (dict, OrderedDict, Counter):
        built = kind()
        for key, item in value.items():
            built[_rebuilt(key, make, made, depth + 1)] = _rebuilt(item, make, made, depth + 1)
        if attributes := getattr(value, "__dict__", None):  # the _metadata of a state_dict
            vars(built).update(_rebuilt(attributes, make, made, depth + 1))
    elif kind in (list, tuple):
        built = kind(_rebuilt(item, make, made, depth + 1) for item in value)
    else:
        built = make(value)
    made[id(value)] = built
    return built


_ATOMS = frozenset({str, int, float, bool, bytes, bytearray, type(None)})


class _NotPlainError(Exception):
    """The error for a value that is more than plain data and plain tensors. The message is its kind."""


def _refuse_code(structure: Structure) -> None:
    """Raise if the description shows that ``weights_only=True`` refuses a file."""
    if any(name.startswith("torch.distributed.") for name in structure.globals):
        importlib.import_module("torch.distributed.tensor")  # torch treats its classes as plain data only then
    foreign = beyond_plain_data(structure.globals)
    calls = [name for name in foreign if name.endswith("(...)")]
    items = torch.serialization.get_safe_globals()
    allowed = {item[1] if isinstance(item, tuple) else f"{item.__module__}.{item.__qualname__}" for item in items}
    if blocked := calls or [name for name in foreign if name not in allowed]:
        raise UnsafeCheckpointError(
            f"{explain_blocked(structure.path, blocked)} To allow classes that you trust, call "
            "torch.serialization.add_safe_globals."
        )


def _path_of(file: BinaryIO) -> str:
    """Return a path of an open file, even if another file is now at its old path."""
    return f"/proc/self/fd/{file.fileno()}"


def _mapped_bytes(file: BinaryIO) -> torch.UntypedStorage:
    """Return all bytes of an open file, mapped unless they are in memory."""
    if isinstance(file, io.BytesIO):
        return torch.frombuffer(file.getbuffer(), dtype=torch.uint8).untyped_storage()
    size_bytes = file.seek(0, os.SEEK_END)
    return torch.from_file(_path_of(file), shared=False, size=size_bytes, dtype=torch.uint8).untyped_storage()


def _dtype_of(name: str) -> torch.dtype:
    """Return the dtype with this name; raise a :class:`Fault` if only a newer torch has it."""
    dtype: torch.dtype | None = getattr(torch, name, None)
    if dtype is None:
        what = f"holds torch.{printable(name)}, which torch {torch.__version__} does not have"
        raise Fault(what, "Update torch.")
    return dtype


class LazyTensor(torch.Tensor):
    """A tensor that is rebuilt for each operation, so that it takes no memory in between.

    Results of operations, copies and saved tensors are ordinary tensors.
    """

    _make: Callable[[], torch.Tensor]

    @staticmethod
    def __new__(cls, shape: tuple[int, ...], dtype: torch.dtype, make: Callable[[], torch.Tensor]) -> LazyTensor:  # noqa: D102
        lazy: LazyTensor = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype)
        lazy._make = make
        return lazy

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = tree_map_only(LazyTensor, lambda lazy: lazy._make(), (args, kwargs or {}))
        return func(*args, **kwargs)

    def data_ptr(self) -> int:
        """Return a unique number: this tensor has no address in memory."""
        return id(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copied: torch.Tensor = memo.setdefault(id(self), self._make())
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._make().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def _joined(info: TensorInfo, numbers: Mapping[str, torch.UntypedStorage]) -> torch.Tensor:
    """Return a mapped tensor if its numbers are in one place; otherwise one that is rebuilt for each use."""
    dtype, shape = _dtype_of(info.dtype), info.shape or ()
    if len(info.parts) == 1:
        return _block(info.parts[0], dtype, numbers).reshape(shape)

    def join() -> torch.Tensor:
        whole = torch.empty(info.laid_out, dtype=dtype, device="cpu")
        for part in info.parts:
            place = whole[tuple(slice(at, at + size) for at, size in zip(part.offsets, part.shape, strict=True))]
            place.copy_(_block(part, dtype, numbers))
        return whole.view(shape)

    return LazyTensor(shape, dtype, join)


def _block(part: Part, dtype: torch.dtype, numbers: Mapping[str, torch.UntypedStorage]) -> torch.Tensor:
    if 0 in part.shape:
        return torch.empty(part.shape, dtype=dtype, device="cpu")
    last = sum((size - 1) * stride for size, stride in zip(part.shape, part.strides, strict=True))
    block = numbers[part.file][part.start : part.start + (last + 1) * dtype.itemsize]
    return torch.empty(0, dtype=dtype, device="cpu").set_(block, 0, part.shape, part.strides)
