"""Checks of the arguments of public functions: an error names the argument and its value."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any, ParamSpec, TypeVar

from lightning_gpu_tools.units import printable

_P = ParamSpec("_P")
_R = TypeVar("_R")

# The annotations that `checked` knows, with the types that fit and their name in its message.
_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "bool": ((bool,), "True or False"),
    "int": ((Integral,), "an integer"),
    "float": ((Real,), "a number"),
    "str": ((str,), "text"),
    "os.PathLike[str]": ((os.PathLike,), "a path"),
    "None": ((type(None),), "None"),
}


def checked(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Make a function raise a ``TypeError`` with the name and value of a keyword-only argument of a wrong type.

    Other annotations than those in ``_KINDS`` fit every value.
    """
    code: Any = getattr(function, "__code__")  # noqa: B009 - types do not declare it
    names = code.co_varnames[code.co_argcount : code.co_argcount + code.co_kwonlyargcount]
    kinds = {name: str(function.__annotations__[name]).split(" | ") for name in names}

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        for name in kinds.keys() & kwargs.keys():
            value = kwargs[name]
            is_flag = isinstance(value, bool) and "bool" not in kinds[name]  # to Python, True is an integer
            expected = [_KINDS.get(kind, ((object,), "")) for kind in kinds[name]]
            if is_flag or not any(isinstance(value, types) for types, _ in expected):
                words = " or ".join(words for _, words in expected)
                raise TypeError(f"{name} must be {words}, got {printable(repr(value))}.")
        return function(*args, **kwargs)

    return call


def path_text(path: str | os.PathLike[str]) -> str:
    """Return a path as text; raise a ``TypeError`` with its type if it is neither."""
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"path must be a path or a URL, got {printable(type(path).__name__)}.")
    return os.fspath(path)


def check_seconds(seconds: float, name: str) -> None:
    """Raise a ``ValueError`` about ``name`` unless this is a positive number."""
    if not (isinstance(seconds, Real) and 0 < seconds < math.inf):
        raise ValueError(f"{name} must be a positive number of seconds, got {printable(repr(seconds))}.")


def check_percentage(percent: float, name: str) -> None:
    """Raise a ``ValueError`` about ``name`` unless this is 0, or from 1 to 100: a smaller number is a fraction."""
    is_number = isinstance(percent, Real) and not isinstance(percent, bool)
    if not (is_number and (percent == 0 or 1 <= percent <= 100)):
        hint = f" For {percent:.0%}, give {100 * percent:g}." if is_number and 0 < percent < 1 else ""
        raise ValueError(f"{name} must be 0, or a percentage from 1 to 100, got {printable(repr(percent))}.{hint}")
