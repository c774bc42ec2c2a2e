"""Checks of the arguments of public functions: an error names the argument and its value."""

from __future__ import annotations

import math
import os
from numbers import Real

from lightning_gpu_tools.units import printable


def path_text(path: str | os.PathLike[str]) -> str:
    """Return a path as text; raise a ``TypeError`` with its type if it is none."""
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
