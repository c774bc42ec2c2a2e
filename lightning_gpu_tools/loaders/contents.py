"""Whether worker processes can have copies of a dataset, and whether it has changed."""

from __future__ import annotations

import copyreg
import io
import pickle
import types
import weakref
import zlib
from contextlib import suppress
from typing import Any

import torch

# Our default: the first 16 MiB of pickle speak for the rest. A million paths have 64 MiB, which take a second.
_MAX_BYTES = 16 * 2**20
_ELEMENTS = 4096  # our default: about this many are read of a tensor or an array, spread over it
_SKIPPED = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType, weakref.ReferenceType)
_OWN_WAYS = ("__getstate__", "__reduce__", "__reduce_ex__")


def fingerprint(dataset: object) -> int:
    """Return a number that is another one when the dataset has changed.

    All that it holds is pickled, but for functions and classes, which forked workers have anyway. They also have what a
    ``__getstate__`` leaves out, such as an open file: that is searched for what cannot be copied, but does not count.

    Raises:
        Exception: Worker processes cannot have copies of it: it holds an open file, a lock, a running generator, ...
    """
    checksum = _Checksum()
    with suppress(_EnoughError):
        _Walk(checksum).dump(dataset)
    return checksum.value


class _EnoughError(Exception):
    pass


class _Checksum:
    """A file that keeps only a checksum of what is written."""

    def __init__(self) -> None:
        self.value = self._size = 0

    def write(self, data: Any) -> None:
        self.value = zlib.crc32(data, self.value)
        self._size += len(data)
        if self._size > _MAX_BYTES:
            raise _EnoughError

    def add(self, buffer: pickle.PickleBuffer) -> None:
        with buffer.raw() as data:
            self.value = zlib.crc32(data[:: data.nbytes // _ELEMENTS | 1].tobytes(), self.value)


class _Walk(pickle.Pickler):
    def __init__(self, checksum: _Checksum) -> None:
        super().__init__(checksum, protocol=5, buffer_callback=checksum.add)
        self._left_out: dict[str, _LeftOut] = {}

    def reducer_override(self, thing: Any) -> Any:
        if isinstance(thing, _SKIPPED):
            return NotImplemented if getattr(thing, "__module__", None) == "builtins" else (int, ())
        if isinstance(thing, io.IOBase):
            raise TypeError("it holds an open file")
        if isinstance(thing, torch.Tensor):
            flat = thing.detach().reshape(-1)[:: max(1, thing.numel() // _ELEMENTS)] if thing.is_contiguous() else None
            values = [] if flat is None or flat.device.type != "cpu" else flat[: 2 * _ELEMENTS].tolist()
            return tuple, ((str(thing.dtype), tuple(thing.shape), repr(values)),)
        if _has_own_way(thing):
            package = _package(thing)
            self._left_out.setdefault(package, _LeftOut(package)).search(vars(thing))
            return object, (), thing.__reduce_ex__(5)
        return NotImplemented


class _LeftOut(_Walk):
    """Searches what objects of one package leave out when they are pickled, each once.

    What the package's own types refuse does not matter: a cache of pandas is made anew wherever it is missing.
    """

    def __init__(self, package: str) -> None:
        super().__init__(_Checksum())
        self._package = package

    def search(self, attributes: dict[str, Any]) -> None:
        with suppress(_EnoughError):
            self.dump(attributes)

    def reducer_override(self, thing: Any) -> Any:
        if isinstance(thing, (torch.Tensor, io.IOBase, *_SKIPPED)) or type(thing) in copyreg.dispatch_table:
            return super().reducer_override(thing)
        has_own_way = _has_own_way(thing)
        try:
            reduced = thing.__reduce_ex__(5)
        except Exception:  # anybody's class may refuse in any way
            if _package(thing) != self._package:
                raise
            return (object, (), vars(thing)) if has_own_way else (int, ())
        return (object, (), (vars(thing), reduced)) if has_own_way else reduced


def _package(thing: object) -> str:
    return type(thing).__module__.partition(".")[0]


def _has_own_way(thing: object) -> bool:
    """Return whether an object's class, written in Python, decides itself what is pickled."""
    own = any(isinstance(getattr(type(thing), name, None), types.FunctionType) for name in _OWN_WAYS)
    return own and hasattr(thing, "__dict__")
