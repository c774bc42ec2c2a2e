"""What loading reads from, at any depth: what a fork must not share there, and whether any of it has changed."""

from __future__ import annotations

import copyreg
import ctypes
import datetime
import enum
import functools
import io
import mmap
import pathlib
import re
import sys
import types
import weakref
import zlib
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Mapping
from itertools import chain, islice
from typing import Any

import torch

# A choice: objects that are looked at; some 3 to 5 us each, and it takes 30 ms to start a worker.
MOST_OBJECTS = 10_000
# A choice: of a list or dict the first so many items come before what lies deeper, and the rest of them after all else.
_AT_FIRST = 10
# A choice: so many bytes of arrays in proportion to the objects, which are summed up in as long.
_BYTES_AN_OBJECT = 3000

# Compared by value; whoever wants another one puts it in its place.
_PLAIN = (
    *(type(None), bool, int, float, complex, str, bytes, range, slice, enum.Enum, pathlib.PurePath, re.Pattern),
    *(
        datetime.date,
        datetime.time,
        datetime.timedelta,
        torch.dtype,
        torch.device,
        torch.Size,
        torch.memory_format,
        torch.layout,
    ),
)
_MEMORY = (bytearray, memoryview, mmap.mmap, torch.UntypedStorage)
# By the modules of their classes: made to be shared with workers, or to be written to only, or the whole training.
_LEFT_OUT = ("multiprocessing.", "logging.", "lightning.pytorch.trainer.", "pytorch_lightning.trainer.")
_POINTERS = (ctypes.c_void_p, ctypes._Pointer)
_CONTAINERS = (dict, list, tuple, deque, set, frozenset)
_PICKLING = ("__reduce__", "__reduce_ex__", "__getstate__", "__getnewargs__", "__getnewargs_ex__")

# How one gets from an object to what it holds: "." and the name of an attribute, "[]" and a key or a number, ...
Step = tuple[str, Hashable]
Path = tuple[Step, ...]
# Attributes, and the like, and items.
_Held = tuple[Iterable[tuple[Step, Any]], Iterable[tuple[Step, Any]]]


class Contents:
    """What some objects hold: attributes, items, what functions are bound to; breadth first, to a bounded number.

    Args:
        roots: The objects, by the names that they get in messages.
        most: How many objects to look at.

    Attributes:
        facts: What tells each object from another: plain values by value, tensors by identity and version, arrays by
            identity and checksum, anything else by its type and what it holds, or else by identity.
        names: Of each object that holds others: the steps that lead on from it, of many items those to the first.
        complete: Whether everything was reached.
        judged: Whether each change of anything reached would change a fact.
        data: The tensors and arrays, by identity.
    """

    def __init__(self, roots: Mapping[str, Any], *, most: int = MOST_OBJECTS) -> None:
        self.facts: dict[Path, tuple[Any, ...]] = {}
        self.names: dict[Path, frozenset[Step]] = {}
        self.complete = self.judged = True
        self.data: dict[int, Any] = {}
        self._bytes_left = most * _BYTES_AN_OBJECT
        # What is compared by identity must live as long as this, or another object could get its identity.
        self._opaque: list[tuple[Path, Any]] = []
        self._alive: list[Any] = []
        try:
            self._walk(roots, most)
        except Exception:  # noqa: BLE001 - anybody's objects, which may do anything when one looks at them
            self.complete = self.judged = False

    def unshareable(self) -> dict[Path, str]:
        """Return what two processes must not both have after a fork, and what it is: a file, a thread pool, ..."""
        found = ((path, _why_unshareable(value)) for path, value in self._opaque)
        return {path: why for path, why in found if why is not None}

    def first_difference(self, before: Contents) -> Path | None:
        """Return where something is not as it was before; ``None`` if no change is seen."""
        if self.facts == before.facts:
            return None
        return next(path for path in chain(before.facts, self.facts) if self.facts.get(path) != before.facts.get(path))

    def _walk(self, roots: Mapping[str, Any], most: int) -> None:
        near: deque[tuple[Path, Any]] = deque(((("[]", name),), value) for name, value in roots.items())
        rest: deque[Iterator[tuple[Path, Any]]] = deque()
        seen: dict[int, int] = {}
        while near or rest:
            if not near:
                near.extend(islice(rest[0], _AT_FIRST))
                if not near:
                    rest.popleft()
                continue
            if len(self.facts) >= most:
                self.complete = self.judged = False
                return
            path, value = near.popleft()
            if isinstance(value, _PLAIN):
                self.facts[path] = (type(value), value)
                continue
            if id(value) in seen:
                self.facts[path] = ("again", seen[id(value)])
                continue
            seen[id(value)] = len(seen)
            self.facts[path], steps = self._look_at(path, value)
            if steps is not None:
                attributes, items = steps
                following = iter(items)
                first = [*attributes, *islice(following, _AT_FIRST)]
                self.names[path] = frozenset(step for step, _ in first)
                near.extend(_beyond(path, first))
                rest.append(_beyond(path, following))

    def _look_at(self, path: Path, value: Any) -> tuple[tuple[Any, ...], _Held | None]:
        """Return what there is to say of an object by itself, and what it holds; ``None`` if there is nothing in it."""
        kind = type(value)
        if isinstance(value, (type, types.ModuleType, weakref.ref)) or kind is object:
            return self._by_identity(value), None
        if isinstance(value, torch.Tensor):
            self.data[id(value)] = value
            return self._by_identity(value, None if value.is_inference() else value._version), None
        if isinstance(value, _array_types()):
            self.data[id(value)] = value
            return self._by_identity(value, self._checksum(value)), None
        if isinstance(value, _MEMORY) or f"{kind.__module__}.".startswith(_LEFT_OUT):
            return self._by_identity(value, None), None
        steps = None if _is_file(value) or isinstance(value, _POINTERS) else _steps(value)
        if steps is None:
            self._opaque.append((path, value))
            return self._by_identity(value, None), None
        if isinstance(value, (types.FunctionType, types.BuiltinFunctionType)):
            return self._by_identity(value), steps
        if isinstance(value, _CONTAINERS):
            return (kind, len(value)), steps
        self._opaque.append((path, value))
        # Who writes a way to be pickled by may hold more than what attributes show.
        self.judged &= not _has_own(kind, "__reduce__", "__reduce_ex__")
        return (kind,), steps

    def _by_identity(self, value: Any, version: int | None = 0) -> tuple[Any, ...]:
        self._alive.append(value)
        if version is None:
            self.judged = False
        return (id(value), version)

    def _checksum(self, array: Any) -> int | None:
        self._bytes_left -= array.nbytes
        return None if self._bytes_left < 0 or array.dtype.hasobject else zlib.crc32(array.tobytes())


def _beyond(path: Path, steps: Iterable[tuple[Step, Any]]) -> Iterator[tuple[Path, Any]]:
    return (((*path, step), held) for step, held in steps)


def words(path: Path) -> str:
    """Return how one gets somewhere, as one would write it in Python: ``dataset.readers[0].file``."""
    (_, root), *steps = path
    return str(root) + "".join(f"[{key!r}]" if kind == "[]" else f".{key}" for kind, key in steps)


def _steps(value: Any) -> _Held | None:
    """Return what an object holds, and how one gets to it; ``None`` if nobody can look into it."""
    if isinstance(value, types.FunctionType):
        cells = [cell for cell in value.__closure__ or () if not _is_empty(cell)]
        closure = zip(value.__code__.co_freevars, (cell.cell_contents for cell in cells), strict=False)
        defaults = enumerate(value.__defaults__ or ())
        return (
            *((("closure", name), held) for name, held in closure),
            *((("defaults", i), held) for i, held in defaults),
            *_named(value.__kwdefaults__ or {}),
            *_named(vars(value)),
        ), ()
    if isinstance(value, (types.MethodType, types.BuiltinFunctionType)):
        return _named({name: getattr(value, name, None) for name in ("__self__", "__func__")}), ()
    if isinstance(value, functools.partial):
        return _named({"func": value.func, "args": value.args, "keywords": value.keywords, **vars(value)}), ()
    slots = [name for kind in type(value).__mro__ for name in _slots(kind) if hasattr(value, name)]
    attributes = _named({**getattr(value, "__dict__", {}), **{name: getattr(value, name) for name in slots}})
    if isinstance(value, dict):
        return attributes, ((("[]", key), held) for key, held in value.items())
    if isinstance(value, _CONTAINERS):
        # Sets have an order of their own, which stays as long as nobody changes them.
        return attributes, ((("[]", i), held) for i, held in enumerate(value))
    return (attributes, ()) if slots or hasattr(value, "__dict__") else None


def _named(attributes: Mapping[str, Any]) -> list[tuple[Step, Any]]:
    return [((".", name), held) for name, held in attributes.items()]


def _slots(kind: type) -> Iterable[str]:
    slots = vars(kind).get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else slots
    return (name for name in names if name not in ("__dict__", "__weakref__"))


def _is_empty(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - it is the reading that fails
    except ValueError:
        return True
    return False


def _array_types() -> tuple[type, ...]:
    numpy = sys.modules.get("numpy")  # who has not imported it has none
    return () if numpy is None else (numpy.ndarray, numpy.generic)


def _is_file(value: Any) -> bool:
    return callable(getattr(type(value), "fileno", None))


def _why_unshareable(value: Any) -> str | None:
    if _is_file(value):
        try:
            # What is only written to gives nobody a wrong sample.
            is_read = value.fileno() >= 0 and not (isinstance(value, io.IOBase) and not value.readable())
        except Exception:  # noqa: BLE001 - it is closed, or only looks like a file, as io.BytesIO does
            return None
        return "an open file" if is_read else None
    if _refuses_to_be_pickled(value):
        kind = type(value)
        return f"a {kind.__module__}.{kind.__qualname__}, which belongs to one process"
    return None


def _has_own(kind: type, *methods: str) -> bool:
    return any(getattr(kind, name, None) is not getattr(object, name, None) for name in methods)


def _refuses_to_be_pickled(value: Any) -> bool:
    kind = type(value)
    # Somebody's own way may write gigabytes; the one that Cython makes does not.
    if kind in copyreg.dispatch_table or (_has_own(kind, *_PICKLING) and not hasattr(kind, "__reduce_cython__")):
        return isinstance(value, _POINTERS)
    try:
        value.__reduce_ex__(4)
    except Exception:  # noqa: BLE001 - whatever it says, it is a no
        return True
    return False
