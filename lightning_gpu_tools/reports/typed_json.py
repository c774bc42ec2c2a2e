"""Read parsed JSON as objects of typed classes, and reject forged data."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Mapping
from inspect import signature
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from lightning_gpu_tools.units import printable

# Far more than any list or object in a report: a timeline has 2,000 points.
_MAX_ITEMS = 20_000
# NVML counts bytes in 64 bits. Sums and products of smaller numbers cannot overflow.
_MAX_NUMBER = 2**64
_MAX_DEPTH = 8  # of settings and evidence, which contain numbers, strings and lists of them
# Places of times and rates, which are never negative.
_OF_TIMES = re.compile(r"_s(_|$|[.\[])|(^|\.)seconds$")
# By type: the result of json.loads for it, and its name in errors.
_IN_JSON: dict[Any, tuple[Any, str]] = {
    NoneType: (NoneType, "null"),
    bool: (bool, "true or false"),
    int: (int, "an integer"),
    float: ((int, float), "a number"),
    str: (str, "a string"),
    list: (list, "a list"),
    dict: (dict, "an object"),
}


def read(kind: Any, value: Any, kinds: Mapping[str, Any], place: str = "") -> Any:
    """Return a value of parsed JSON as an object of type ``kind``. Unknown fields are ignored.

    Args:
        kind: A dataclass, a named tuple (a list in JSON), ``Mapping[str, X]``, ``tuple[X, ...]``, ``Sequence[X]``,
            ``Literal``, a union, ``str``, ``int``, ``float``, ``bool``, or ``Any`` for plain, shallow data.
        value: The result of ``json.loads``.
        kinds: Types that replace those of dataclass fields, by field name.
        place: The path of the value, for error messages.

    Raises:
        ValueError: The value has another type or too many items, a field is missing, or a number is not finite, too
            large, a negative integer or a negative time.
    """
    options = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    option = next((one for one in options if _fits(one, value)), None)
    if option is None:
        raise _refused(place, f"must be {' or '.join(_in_json(one)[1] for one in options)}", value)
    if get_origin(option) is Literal and value not in get_args(option):
        raise _refused(place, f"must be one of {', '.join(get_args(option))}", value)
    if not _is_in_range(value, place, _MAX_DEPTH if option is Any else None):
        raise _refused(place, "is out of range", value)
    if option is Any or not isinstance(value, (list, dict)):
        return value
    if isinstance(option, type) and get_origin(option) is None:
        return _read_fields(option, value, kinds, place)
    if isinstance(value, dict):
        return {key: read(get_args(option)[1], one, kinds, _inside(place, key)) for key, one in value.items()}
    items = [read(get_args(option)[0], one, kinds, _inside(place, i)) for i, one in enumerate(value)]
    return tuple(items) if get_origin(option) is tuple else items


def _read_fields(kind: type, value: Any, kinds: Mapping[str, Any], place: str) -> Any:
    """Return an object as a dataclass, or a list as a named tuple."""
    fields = _fields(kind)
    given = dict(zip(fields, value, strict=False)) if isinstance(value, list) else value
    found = {}
    for name, (inner, is_required) in fields.items():
        if name in given:
            found[name] = read(kinds.get(name, inner), given[name], kinds, _inside(place, name))
        elif is_required:
            raise _refused(place, f"has no {name!r}")
    return kind(**found)


def _is_in_range(value: Any, place: str, depth: int | None) -> bool:
    """Return whether a value has a size that reports have; ``depth``: levels allowed in plain data, else ``None``."""
    if isinstance(value, (list, dict)):
        items = value.values() if isinstance(value, dict) else value
        is_shallow = depth is None or (depth > 0 and all(_is_in_range(one, place, depth - 1) for one in items))
        return len(value) <= _MAX_ITEMS and is_shallow
    if isinstance(value, (int, float)):
        if value < 0 and depth is None and (isinstance(value, int) or _OF_TIMES.search(place)):
            return False
        return abs(value) <= _MAX_NUMBER  # false for NaN
    return True


@functools.cache
def _fields(kind: type) -> dict[str, tuple[Any, bool]]:
    """Return the type of each field of a class, and whether it is required."""
    hints = get_type_hints(kind)
    return {name: (hints[name], one.default is one.empty) for name, one in signature(kind).parameters.items()}


def _fits(kind: Any, value: Any) -> bool:
    return kind is Any or (isinstance(value, _in_json(kind)[0]) and (kind is bool or not isinstance(value, bool)))


@functools.cache
def _in_json(kind: Any) -> tuple[Any, str]:
    plain = str if get_origin(kind) is Literal else kind
    if plain not in _IN_JSON:
        plain = dict if dataclasses.is_dataclass(kind) or get_origin(kind) is Mapping else list
    return _IN_JSON[plain]


def _inside(place: str, key: str | int) -> str:
    return f"{place}[{key}]" if isinstance(key, int) else f"{place}.{key}" if place else key


def _refused(place: str, why: str, *values: Any) -> ValueError:
    for value in values:
        has_items = isinstance(value, (list, dict))
        why += f", got {_IN_JSON[type(value)][1] if has_items else printable(json.dumps(value))}"
    return ValueError(f"{printable(place, 200)} {why}".lstrip())
