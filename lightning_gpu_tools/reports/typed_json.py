"""Parsed JSON, checked against the types of dataclasses and converted to them."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from lightning_gpu_tools.units import printable

# Far more than any list or object of a report: a timeline has 2000 points, and a job of 1,024 ranks as many entries.
_MAX_ITEMS = 20_000
# NVML counts bytes in 64 bits; nothing else is as large. Smaller numbers cannot overflow in a sum or a product.
_MAX_NUMBER = 2**64
# Values of settings and evidence are numbers, strings and lists of them.
_MAX_DEPTH = 8
# Times and rates, by the unit in the field's name, are never negative.
_OF_TIMES = re.compile(r"_s(_|$)|^seconds$")
_WORDS = {NoneType: "null", bool: "true or false", int: "an integer", float: "a number", str: "a string"}


class _WrongValueError(ValueError):
    """A value has the wrong type or size.

    Attributes:
        place: Its path: names and item numbers, the outermost last.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.place: list[str] = []

    def __str__(self) -> str:
        place = "".join(reversed(self.place)).removeprefix(".")
        return f"{printable(place, 200)} {super().__str__()}"


def read(kind: Any, value: Any, kinds: Mapping[str, Any], *, is_time: bool = False) -> Any:
    """Return a value of parsed JSON as an object of this type. Unknown fields are ignored.

    Args:
        kind: A type: a dataclass, a named tuple (a list in JSON), ``Mapping[str, X]``, ``tuple[X, ...]``,
            ``Sequence[X]``, ``Literal``, a union, ``str``, ``int``, ``float``, ``bool``, or ``Any`` for anything not
            nested deeply and without numbers out of range.
        value: What ``json.loads`` returned.
        kinds: Types that replace the declared ones of dataclass fields, by the field's name.
        is_time: Whether numbers in it must not be negative.

    Raises:
        ValueError: The value has another type, a number is not finite, too large or a negative time, or there are too
            many items. The message names the place and the value.
    """
    if kind is Any:
        _check_plain(value, _MAX_DEPTH)
        return value
    for option, in_json in _options(kind):
        if isinstance(value, in_json) and (option is bool or not isinstance(value, bool)):
            return _read(option, value, kinds, is_time)
    raise _wrong(f"must be {' or '.join(_in_words(option) for option, _ in _options(kind))}", value)


def _read(kind: Any, value: Any, kinds: Mapping[str, Any], is_time: bool) -> Any:
    if isinstance(value, (int, float)):
        _check_number(value, is_time)
        return value
    if get_origin(kind) is Literal and value not in get_args(kind):
        raise _wrong(f"must be one of {', '.join(get_args(kind))}", value)
    if not isinstance(value, (list, dict)):
        return value
    if len(value) > _MAX_ITEMS:
        raise _WrongValueError(f"has {len(value):,} items; at most {_MAX_ITEMS:,} are allowed")
    if dataclasses.is_dataclass(kind):
        return _read_fields(kind, value, kinds)
    if isinstance(value, dict):
        inner = get_args(kind)[1]
        return {key: _at(f".{key}", inner, one, kinds, is_time) for key, one in value.items()}
    if hasattr(kind, "_fields"):
        if len(value) != len(kind._fields):
            raise _WrongValueError(f"must be a list of {', '.join(kind._fields)}, got {len(value)} items")
        fields = zip(kind._fields, value, strict=True)
        return kind(*(_at(f".{name}", _hints(kind)[name], one, kinds, _is_time(name)) for name, one in fields))
    inner = get_args(kind)[0]
    items = [_at(i, inner, one, kinds, is_time) for i, one in enumerate(value)]
    return tuple(items) if get_origin(kind) is tuple else items


def _read_fields(kind: Any, value: Any, kinds: Mapping[str, Any]) -> Any:
    found = {}
    for field in dataclasses.fields(kind):
        name = field.name
        if name in value:
            inner = kinds.get(name, _hints(kind)[name])
            found[name] = _at(f".{name}", inner, value[name], kinds, _is_time(name))
        elif field.default is field.default_factory is dataclasses.MISSING:
            raise _WrongValueError(f"has no {name!r}")
    return kind(**found)


def _at(place: str | int, kind: Any, value: Any, kinds: Mapping[str, Any], is_time: bool) -> Any:
    try:
        return read(kind, value, kinds, is_time=is_time)
    except _WrongValueError as error:
        error.place.append(f"[{place}]" if isinstance(place, int) else place)
        raise


def _is_time(name: str) -> bool:
    return _OF_TIMES.search(name) is not None


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


@functools.cache
def _options(kind: Any) -> tuple[tuple[Any, type | tuple[type, ...]], ...]:
    """Return the types that a value may have, each with what ``json.loads`` returns for it."""
    return tuple((one, _in_json(one)) for one in (get_args(kind) if get_origin(kind) in (Union, UnionType) else [kind]))


def _in_json(kind: Any) -> type | tuple[type, ...]:
    if kind is float:
        return (int, float)
    if kind in _WORDS:
        return kind  # type: ignore[no-any-return]
    if get_origin(kind) is Literal:
        return str
    return dict if dataclasses.is_dataclass(kind) or kind is dict or get_origin(kind) is Mapping else list


def _in_words(kind: Any) -> str:
    in_json = _in_json(kind)
    return _WORDS.get(kind) or ("an object" if in_json is dict else "a list" if in_json is list else "a string")


def _check_number(value: float, is_time: bool) -> None:
    if not abs(value) <= _MAX_NUMBER:  # NaN is not either
        raise _wrong("must be a finite number of at most 2^64", value)
    if value < 0 and (is_time or isinstance(value, int)):
        raise _wrong("must not be negative", value)


def _check_plain(value: Any, depth: int) -> None:
    if isinstance(value, (list, dict)):
        if depth == 0 or len(value) > _MAX_ITEMS:
            raise _WrongValueError(f"is nested deeper than {_MAX_DEPTH} levels, or has more than {_MAX_ITEMS:,} items")
        for one in value if isinstance(value, list) else value.values():
            _check_plain(one, depth - 1)
    elif isinstance(value, (int, float)) and not abs(value) <= _MAX_NUMBER:
        raise _wrong("must hold finite numbers of at most 2^64", value)


def _wrong(must: str, value: Any) -> ValueError:
    shown = _in_words(type(value)) if isinstance(value, (list, dict)) else printable(json.dumps(value))
    return _WrongValueError(f"{must}, got {shown}")
