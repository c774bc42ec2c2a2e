"""Tensors from open files, mapped instead of read. Tensors in several parts are joined when they are used."""

from __future__ import annotations

import copy
import functools
import io
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

import torch
from torch.utils._pytree import tree_map_only

from lightning_gpu_tools.checkpoints.faults import Fault
from lightning_gpu_tools.checkpoints.structure import Part, SplitTensorInfo, Structure
from lightning_gpu_tools.units import printable


def path_of(file: BinaryIO) -> str:
    """Return a path of an open file, even if another file is now at its old path."""
    folder = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"  # macOS
    return f"{folder}/{file.fileno()}"


def mapped_bytes(file: BinaryIO) -> torch.Tensor:
    """Return all bytes of an open file, mapped unless they are in memory."""
    if isinstance(file, io.BytesIO):
        return torch.frombuffer(file.getbuffer(), dtype=torch.uint8)
    size_bytes = file.seek(0, os.SEEK_END)
    return torch.from_file(path_of(file), shared=False, size=size_bytes, dtype=torch.uint8)


def moved(tensor: torch.Tensor, map_location: Any) -> torch.Tensor:
    """Return the tensor on the device ``map_location``, if that is a device or its name."""
    is_device = isinstance(map_location, (str, torch.device)) and str(map_location) != "cpu"
    return tensor.to(map_location) if is_device else tensor


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype with this name; raise a :class:`Fault` if only a newer torch has it."""
    dtype: torch.dtype | None = getattr(torch, name, None)
    if dtype is None:
        what = f"holds torch.{printable(name)}, which torch {torch.__version__} does not have"
        raise Fault(what, "Update torch.")
    return dtype


def with_numbers(
    content: Any,
    shards: Mapping[str, Structure],
    map_location: Any,
    made: Callable[[Any], Any],
) -> Any:
    """Return the content of a folder with descriptions replaced by tensors, and other leaves by ``made(leaf)``."""
    numbers: dict[str, torch.UntypedStorage] = {}

    def replaced(leaf: Any) -> Any:
        if not isinstance(leaf, SplitTensorInfo):
            return made(leaf)
        for part in leaf.parts:
            if part.file not in numbers and 0 not in part.shape:
                numbers[part.file] = mapped_bytes(shards[part.file].file).untyped_storage()
        return moved(_joined(leaf, numbers), map_location)

    return _put_in_place(content, replaced, {})


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


def _put_in_place(content: Any, made: Callable[[Any], Any], copies: dict[int, Any]) -> Any:
    """Copy dictionaries and lists, and replace each leaf by ``made(leaf)``."""
    if id(content) not in copies:
        if type(content) in (dict, OrderedDict, list):
            copies[id(content)] = container = copy.copy(content)  # with the _metadata of a state_dict
            for key, item in enumerate(content) if isinstance(content, list) else content.items():
                container[key] = _put_in_place(item, made, copies)
        else:
            copies[id(content)] = made(content)
    return copies[id(content)]


def _joined(info: SplitTensorInfo, numbers: Mapping[str, torch.UntypedStorage]) -> torch.Tensor:
    """Return a mapped tensor if its numbers are in one place; otherwise one that is rebuilt for each use."""
    dtype, shape = dtype_of(info.dtype), info.shape or ()
    if len(info.parts) == 1:
        return _block(info.parts[0], dtype, numbers).reshape(shape)
    return LazyTensor(shape, dtype, functools.partial(_join, info, dtype, numbers))


def _join(info: SplitTensorInfo, dtype: torch.dtype, numbers: Mapping[str, torch.UntypedStorage]) -> torch.Tensor:
    whole = torch.empty(info.laid_out, dtype=dtype, device="cpu")
    for part in info.parts:
        place = whole[tuple(slice(at, at + size) for at, size in zip(part.offsets, part.shape, strict=True))]
        place.copy_(_block(part, dtype, numbers))
    return whole.view(info.shape or ())


def _block(part: Part, dtype: torch.dtype, numbers: Mapping[str, torch.UntypedStorage]) -> torch.Tensor:
    if 0 in part.shape:
        return torch.empty(part.shape, dtype=dtype, device="cpu")
    last = sum((size - 1) * stride for size, stride in zip(part.shape, part.strides, strict=True))
    block = numbers[part.file][part.start : part.start + (last + 1) * dtype.itemsize]
    return torch.empty(0, dtype=dtype, device="cpu").set_(block, 0, part.shape, part.strides)
