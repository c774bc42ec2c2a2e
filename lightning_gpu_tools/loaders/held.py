"""What a dataset holds, and the DataLoaders in what a loop iterates: walks through attributes, lists and dictionaries.

Only attributes and items are read. No code of the dataset runs.
"""

import io
import itertools
import mmap
import random
import sys
import types
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

# Our defaults: the walk takes 10 ms at most. All items of a long list are usually alike.
_MAX_THINGS = 5000
_MAX_ITEMS = 64
_MAX_ELEMENTS = 4096  # of a tensor or an array
_MAX_TEXT = 100
_MAX_DEPTH = 5  # of loaders: tqdm around a loader of the program's own around a dictionary
_ATOMS = (str, bytes, bytearray, int, float, complex, type(None), type, types.ModuleType)
_CONTAINERS: tuple[Any, ...] = (list, tuple, set, frozenset, deque, dict)
# Their parts are not searched. A logger is found by its name in every process.
_CLOSED_PACKAGES = {"torch", "numpy", "pandas", "logging", "enum", "re"}
_STANDARD_STREAMS = 2  # the highest descriptor of stdin, stdout and stderr
GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
_PACKAGES = ("site-packages", "dist-packages")


class Held(NamedTuple):
    """A thing that a dataset holds, and how to reach it."""

    name: str  # "Photos.file"; a part of a library's object has the name of that: of the archive, not of its file
    thing: Any
    owner: type | None = None  # class of the object, of the program or a dataset, that has this attribute


def held_by(root: object) -> list[Held]:
    """Return a dataset and what it holds, each object once, from the outside to the inside."""
    found, seen = [Held(name_of(root), root)], {id(root)}
    for item in found:  # which grows
        thing, (name, _, owner) = item.thing, item
        is_named = isinstance(thing, Dataset) or not is_of_library(type(thing))
        for label, part in _parts(thing):
            if len(found) >= _MAX_THINGS:
                return found
            if id(part) not in seen and not isinstance(part, _ATOMS):
                seen.add(id(part))
                kind = type(part)
                is_sequence = hasattr(kind, "__getitem__") or hasattr(kind, "__iter__")
                if isinstance(part, Dataset) or (is_sequence and not is_of_library(kind)):
                    found.append(Held(name_of(part), part))  # its attributes are named after it
                elif is_named:
                    found.append(Held(name + label, part, type(thing)))
                else:
                    found.append(Held(name, part, owner))
    return found


def name_of(thing: object) -> str:
    """Return the name of a function, or of the class of any other object."""
    named = thing if isinstance(thing, types.FunctionType) else type(thing)
    return str(named.__name__)


def is_of_library(named: Any) -> bool:
    """Return whether a class, function or module is not the program's own."""
    module = named.__name__ if isinstance(named, types.ModuleType) else named.__module__ or "builtins"
    package = module.partition(".")[0]
    file = getattr(sys.modules.get(package), "__file__", None) or ""
    return package in sys.stdlib_module_names - {"__main__"} or any(part in file for part in _PACKAGES)


def _parts(thing: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a thing, each with the end of its name."""
    container = next((kind for kind in _CONTAINERS if isinstance(thing, kind)), None)
    if container is not None:  # by its own methods, because a subclass may have others
        values = dict.values(thing) if container is dict else container.__iter__(thing)
        step = container.__len__(thing) // _MAX_ITEMS + 1
        yield from [("", value) for value in itertools.islice(values, 0, None, step)]
    elif isinstance(thing, Dataset) or type(thing).__module__.partition(".")[0] not in _CLOSED_PACKAGES:
        yield from ((f".{name}", value) for name, value in attributes(thing).items())


def attributes(thing: object) -> dict[str, Any]:
    """Return the attributes in an object's dictionary, without running code of its class."""
    try:
        return dict(object.__getattribute__(thing, "__dict__"))  # without a class's own way
    except AttributeError:
        return {}


# Handles of C libraries, and whether one is open. They share a descriptor or a lock with a forked process.
_HANDLES: Mapping[str, Callable[[Any], bool]] = {
    "h5py._hl.base.HLObject": bool,
    "sqlite3.Connection": lambda connection: connection.total_changes >= 0,  # raises if it is closed
    "lmdb.Environment": lambda environment: bool(environment.path()),  # raises if it is closed
    "cv2.VideoCapture": lambda video: bool(video.isOpened()),
    "socket.socket": lambda connection: connection.fileno() >= 0,
}


def is_open(thing: object) -> bool:
    """Return whether a thing is an open file, archive, database or connection that workers must not share."""
    kind = type(thing)
    try:
        if isinstance(thing, io.IOBase):
            if isinstance(thing, (io.BytesIO, io.StringIO)) or not thing.readable():
                return False
            with suppress(OSError):  # it has no descriptor: a connection, or a member of an archive
                return thing.fileno() > _STANDARD_STREAMS
            return True
        for name, is_open_now in _HANDLES.items():
            module, _, handle = name.rpartition(".")
            if isinstance(thing, getattr(sys.modules.get(module), handle, ())):  # of a package that is imported
                return is_open_now(thing)
        # Other libraries tell by an attribute. Processes may share a memory map.
        if is_of_library(kind) and hasattr(kind, "close") and not isinstance(thing, (mmap.mmap, Dataset)):
            return getattr(kind, "closed", None) is not None and getattr(thing, "closed", None) in (False, 0)
    except Exception:  # noqa: BLE001 - a handle that is closed, or unlike all others, may raise anything
        return False
    return False


def contents_of(found: list[Held]) -> int:
    """Return a number that changes when numbers, texts, sizes or generators among these things change."""
    checksum = 0
    for item in found:
        for label, part in (("", item.thing), *_parts(item.thing)):
            seen = f"{item.name}{label} {type(part).__name__} {_state(part)}"
            checksum = zlib.crc32(seen.encode(errors="replace"), checksum)
    return checksum


def _state(thing: Any) -> object:
    if isinstance(thing, (str, bytes, bytearray)):
        return len(thing), thing[:_MAX_TEXT]
    if isinstance(thing, (int, float, complex)):
        return repr(thing)[:_MAX_TEXT]
    for container in _CONTAINERS:
        if isinstance(thing, container):
            return container.__len__(thing)
    if isinstance(thing, torch.Generator):
        return thing.get_state().tolist() if thing.device.type == "cpu" else None  # a GPU would have to be waited for
    if isinstance(thing, GENERATORS):
        return state_of(thing)
    if type(thing) in (torch.Tensor, torch.nn.Parameter):
        is_on_cpu = thing.device.type == "cpu" and thing.layout is torch.strided
        if not is_on_cpu or thing.is_quantized or not thing.is_contiguous():
            return None
        few = thing.detach().reshape(-1)[:: thing.numel() // _MAX_ELEMENTS + 1]
        return tuple(thing.shape), zlib.crc32(few.clone().view(torch.uint8).numpy().tobytes())
    if type(thing) is np.ndarray and thing.flags.c_contiguous and not thing.dtype.hasobject:  # not one on a disk
        return thing.shape, zlib.crc32(thing.reshape(-1)[:: thing.size // _MAX_ELEMENTS + 1].tobytes())
    return None


# Random generators


def state_of(thing: Any) -> Any:
    """Return the state of one of :data:`GENERATORS`, in types that ``weights_only=True`` reads, or anything else."""
    if isinstance(thing, torch.Generator):
        return thing.get_state()
    if isinstance(thing, random.Random):
        return thing.getstate()
    if isinstance(thing, np.random.Generator):
        return state_of(thing.bit_generator.state)
    if isinstance(thing, np.random.RandomState):
        return state_of(thing.get_state(legacy=False))
    if isinstance(thing, dict):  # a state of NumPy, which takes lists for its arrays
        return {name: state_of(value) for name, value in thing.items()}
    return thing.tolist() if isinstance(thing, np.ndarray) else thing


def with_state(thing: Any, state: Any) -> Any:
    """Set one of :data:`GENERATORS` to a state of :func:`state_of`, and return it; return anything else's state."""
    if isinstance(thing, random.Random):
        thing.setstate(state)
    elif isinstance(thing, np.random.Generator):
        thing.bit_generator.state = state
    elif isinstance(thing, (torch.Generator, np.random.RandomState)):
        thing.set_state(state)
    return thing if isinstance(thing, GENERATORS) else state


# Loaders


class Inside(NamedTuple):
    """A loader that a loop gets batches from."""

    name: str  # its key in quotes, or its number; empty if it is the only one
    loader: object  # a DataLoader, or whatever has none inside
    within: str = ""  # class of the object that it was found in, unless that is a dictionary, list or tuple


def loaders_in(given: object) -> list[Inside]:
    """Return the loaders inside an object, each once: at least one, which may be the object itself."""
    found = [*_inside(given, "", "", set(), _MAX_DEPTH)] or [Inside("", given)]
    if len(found) == 1:
        return [found[0]._replace(name="")]
    return [one._replace(name=one.name or f"number {place}") for place, one in enumerate(found, 1)]


def _inside(thing: Any, name: str, within: str, seen: set[int], depth: int) -> Iterator[Inside]:
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, DataLoader):
        yield Inside(name, thing, within)
    elif depth and isinstance(thing, (dict, list, tuple)):
        keyed = [*thing.items()] if isinstance(thing, dict) else [(None, one) for one in thing[:_MAX_ITEMS]]
        named = [(name if key is None else f'"{key}"', one) for key, one in keyed[:_MAX_ITEMS]]
        found = [(key, value, [*_inside(value, key, within, seen, depth - 1)]) for key, value in named]
        is_of_loaders = any(inside for _, _, inside in found)  # not of batches
        for key, value, inside in found:
            yield from inside or ([Inside(key, value)] if is_of_loaders and not within else [])
    elif depth and _is_iterated(thing):
        parts: list[Any] = []
        for part in attributes(thing).values():
            if isinstance(part, (list, tuple)):
                parts += part[:_MAX_ITEMS]
            elif not isinstance(part, (str, bytes, dict, types.ModuleType)):
                parts.append(part)
        for part in filter(_is_iterated, parts):
            yield from _inside(part, name, within or type(thing).__qualname__, seen, depth - 1)


def _is_iterated(thing: object) -> bool:
    kind = type(thing)
    return (hasattr(kind, "__iter__") or hasattr(kind, "__next__")) and kind.__module__ != "torch"
