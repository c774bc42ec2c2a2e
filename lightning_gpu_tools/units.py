"""Text and arguments: sizes and durations (``"8GiB"``), wrapping, escaping of foreign text, checks of arguments."""

from __future__ import annotations

import functools
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from itertools import groupby
from numbers import Integral, Real
from typing import Any, ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")

# Powers of 1024 for KiB/MiB/GiB/TiB and of 1000 for kB/MB/GB/TB: IEC 80000-13 and SI. K/M/G/T are powers of 1024, as in
# SLURM (--mem=8G, str_to_mbytes() in its src/common/proc_args.c) and Docker (-m 8g).
_BYTES_PER_UNIT = {"": 1, "b": 1}
for _power, _prefix in enumerate("kmgt", start=1):
    _BYTES_PER_UNIT[f"{_prefix}b"] = 1000**_power
    for _unit in (f"{_prefix}ib", f"{_prefix}i", _prefix):
        _BYTES_PER_UNIT[_unit] = 1024**_power
_SECONDS_PER_UNIT = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
MAX_BYTES = 2**64  # NVML counts bytes in 64 bits
_MAX_WIDTH, _MIN_WIDTH = 100, 60  # our defaults; a row of a tree with a short label has 60 columns
_MAX_RANGES = 8  # with numbers of up to 5 digits, they fit in a line of 100 columns
_QUANTITY = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(size: int | str, name: str = "size") -> int:
    """Return a size like ``"8GiB"`` or ``1048576`` in bytes; raise a ``ValueError`` about ``name`` if invalid."""
    size_bytes = math.nan if isinstance(size, float) else _parse(size, _BYTES_PER_UNIT)
    if not 0 <= size_bytes < MAX_BYTES:
        raise ValueError(f'{name} must be a number of bytes or a size like "8GiB" or "500MB", got {size!r}.')
    return round(size_bytes)


def parse_duration(duration: float | str, name: str = "duration") -> float:
    """Return a duration like ``"90s"``, ``"1.5h"`` or ``600`` in seconds; raise ``ValueError`` if invalid."""
    seconds = _parse(duration, _SECONDS_PER_UNIT)
    if not 0 <= seconds < math.inf:
        raise ValueError(f'{name} must be a number of seconds or a duration like "90s" or "10m", got {duration!r}.')
    return float(seconds)


def _parse(quantity: object, per_unit: Mapping[str, float]) -> float:
    """Return a number unchanged, or parse text with a unit; NaN if invalid."""
    if isinstance(quantity, (int, float)) and not isinstance(quantity, bool):
        return quantity
    match = _QUANTITY.fullmatch(quantity) if isinstance(quantity, str) else None
    return float(match[1]) * per_unit.get(match[2].lower(), math.nan) if match else math.nan


def format_bytes(size_bytes: float) -> str:
    """Return a size with three significant digits: ``"71.3 GiB"``."""
    unit = "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size_bytes) < 1000 or unit == "TiB":
            break
        size_bytes /= 1024
    digits = 0 if unit == "B" or abs(size_bytes) >= 100 else 1 if abs(size_bytes) >= 10 else 2
    return f"{size_bytes:.{digits}f} {unit}"


def format_duration(duration_s: float) -> str:
    """Return a duration in a readable unit: ``"4.2 ms"``, ``"38 s"``, ``"2 h 05 min"``."""
    if not duration_s:
        return "0 s"
    if duration_s < 0.0009995:  # not "1000 µs"
        return f"{duration_s * 1e6:.0f} µs"
    if duration_s < 0.9995:
        return f"{duration_s * 1e3:.3g} ms"
    if duration_s < 100:
        return f"{duration_s:.3g} s"
    if duration_s < 599.5:
        return f"{round(duration_s) // 60} min {round(duration_s) % 60:02d} s"
    minutes = round(duration_s / 60)
    if minutes >= 48 * 60:
        hours = round(duration_s / 3600)
        return f"{hours // 24} days {hours % 24:02d} h"
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02d} min"


def plural(count: int, noun: str) -> str:
    """Return a count with its noun: ``"1 step"``, ``"1,200 steps"``."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def number_ranges(numbers: Iterable[int]) -> str:
    """Format numbers like ``"0, 3, 4 and 8 to 1,023"`` or ``"0, 2, 4, 6, 8, 10, 12, 14 and 504 others"``."""
    ordered = sorted(set(numbers))
    ranges: list[list[int]] = []
    for _, consecutive in groupby(enumerate(ordered), lambda item: item[1] - item[0]):
        run = [number for _, number in consecutive]
        ranges += [run] if len(run) > 2 else [[number] for number in run]
    parts = [f"{run[0]:,} to {run[-1]:,}" if len(run) > 1 else f"{run[0]:,}" for run in ranges[:_MAX_RANGES]]
    others = sum(map(len, ranges[_MAX_RANGES:]))
    if others:
        parts.append(plural(others, "other"))
    return " and ".join(filter(None, [", ".join(parts[:-1]), *parts[-1:]]))


def line_width() -> int:
    """Return the width of the terminal in columns, at most 100; 100 if the output is not a terminal."""
    return max(_MIN_WIDTH, min(shutil.get_terminal_size((_MAX_WIDTH, 24)).columns, _MAX_WIDTH))


def wrapped(text: str, first: str = "", others: str = "  ") -> str:
    """Wrap text to the width of the terminal, without breaking words."""
    import textwrap  # a pick needs none of it

    return textwrap.fill(
        text,
        line_width(),
        initial_indent=first,
        subsequent_indent=others,
        break_long_words=False,
        break_on_hyphens=False,
    )


def printable(text: object, max_length: int = 100) -> str:
    r"""Make text from a file, a driver, or another user safe to print: one line of at most ``max_length`` characters.

    Control characters, newlines, and bidirectional marks are escaped as in a Python literal (``\x1b``, ``\n``,
    ``\u202e``). Longer text is cut in the middle.
    """
    if not isinstance(text, str):
        try:
            text = str(text)
        except (RecursionError, ValueError):  # nested too deeply; or an integer with more digits than Python converts
            text = f"<{type(text).__name__}>"
    # Escaping never shortens text, so this much of each end is enough.
    ends = text if len(text) <= 2 * max_length else text[:max_length] + text[-max_length:]
    escaped = _escaped(ends)
    if len(text) == len(ends) and len(escaped) <= max_length:
        return escaped
    head = (max_length - 1) * 2 // 3
    return f"{escaped[:head]}…{escaped[head + 1 - max_length :]}"


def printable_path(path: object) -> str:
    """Make a path or URL safe to print, with a limit that is long enough for copying."""
    return printable(path, max_length=300)


def user_name(user_id: int) -> str:
    """Return a user's login name, safe to print, or ``uid 1000`` if there is none."""
    import pwd  # does not exist on Windows

    try:
        return printable(pwd.getpwuid(user_id).pw_name)
    except KeyError:  # users without a name are common in containers
        return f"uid {user_id}"


def printable_lines(text: str) -> str:
    """Escape all control characters except newlines, as a fallback for :func:`printable`.

    Untrusted text that was inserted without escaping then cannot control a terminal, but it can still forge a line.
    """
    return "\n".join(map(_escaped, text.split("\n")))


def _escaped(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


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
    defaults: dict[str, Any] = getattr(function, "__kwdefaults__")  # noqa: B009 - types do not declare it
    kinds = {name: str(function.__annotations__[name]).split(" | ") for name in defaults}

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
