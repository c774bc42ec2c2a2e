"""What a dataset holds: whether worker processes can have copies of it, and whether it has changed."""

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

# A dataset of a million paths is about 64 MiB of pickle and takes about a second to go through. Our default: the first
# 16 MiB have to speak for the rest.
_MAX_BYTES = 16 * 2**20
# Our default: at most this many elements of a tensor or an array are read, spread over it.
_ELEMENTS = 4096
# What a worker process gets as it is, and what says nothing about whether that may be done.
_SKIPPED = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType, weakref.ReferenceType)
_OWN_WAYS = ("__getstate__", "__reduce__", "__reduce_ex__")


class NotCopyableError(Exception):
    """A dataset holds what worker processes would share or could not have."""


def fingerprint(dataset: object) -> int:
    """Return a number that is another one when the dataset has changed.

    Every object that the dataset holds is gone through as pickle does. Functions and classes are skipped: they need not
    be pickled where workers are forked. A forked worker also gets what a ``__getstate__`` leaves out, such as an open
    file: that is searched for what cannot be copied, but a change of it is none of the dataset.

    Raises:
        NotCopyableError: It holds an open file, a lock, a running generator, ...
    """
    checksum = _Checksum()
    try:
        _Walk(checksum).dump(dataset)
    except _EnoughError:
        pass
    except Exception as error:  # anybody's class may refuse in any way
        raise NotCopyableError(f"{type(error).__name__}: {error}") from error
    return checksum.value


class _EnoughError(Exception):
    """The rest is not walked through."""


class _Checksum:
    """A file that keeps nothing of what is written but a checksum."""

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
        if _has_own_way(type(thing)) and hasattr(thing, "__dict__"):
            package = _package(thing)
            self._left_out.setdefault(package, _LeftOut(package)).search(vars(thing))
            return object, (), thing.__reduce_ex__(5)
        return NotImplemented


class _LeftOut(_Walk):
    """Searches what classes of one package leave out when they are pickled, each object once.

    What the package's own types refuse is its own affair: a cache of pandas holds what cannot be pickled, and is made
    anew wherever it is missing.
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
        has_own_way = _has_own_way(type(thing)) and hasattr(thing, "__dict__")
        try:
            reduced = thing.__reduce_ex__(5)
        except Exception:  # anybody's class may refuse in any way
            if _package(thing) != self._package:
                raise
            return (object, (), vars(thing)) if has_own_way else (int, ())
        return (object, (), (vars(thing), reduced)) if has_own_way else reduced


def _package(thing: object) -> str:
    return type(thing).__module__.partition(".")[0]


def _has_own_way(kind: type) -> bool:
    """Return whether a class written in Python decides itself what is pickled of its objects."""
    return any(isinstance(getattr(kind, name, None), types.FunctionType) for name in _OWN_WAYS)
