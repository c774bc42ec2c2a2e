"""The DataLoaders inside what a loop iterates: dictionaries, lists, progress bars, loaders around other loaders."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch.utils.data import DataLoader

from lightning_gpu_tools.loaders.held import attributes

# Our defaults.
_MAX_DEPTH = 5  # tqdm around a loader of the program's own around a dictionary
_MAX_ITEMS = 64  # a longer list has batches


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
