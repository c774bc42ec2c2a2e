"""Thousands of parameter names in a few lines: ``layers.{0…11}.attn.bias``."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

from lightning_gpu_tools.units import printable

MAX_NAME = 300  # no real model is known whose parameters have longer names
# Longer digit strings are hashes or dates, and int() of a hostile name's million digits would be slow.
_INDEX = re.compile(r"(?<![^.])[0-9]{1,7}(?![^.])")


def group_keys(keys: Iterable[str]) -> list[str]:
    """Return one line for all keys that differ in their numbers only, in order of first appearance.

    ``a.0.w, a.1.w, a.2.w`` becomes ``a.{0…2}.w``. Where the numbers are not a full grid, the line ends in the count.
    """
    groups: dict[tuple[str, ...], list[tuple[int, ...]]] = {}
    for key in keys:
        groups.setdefault(tuple(_INDEX.split(key)), []).append(tuple(map(int, _INDEX.findall(key))))
    return [_line(texts, indices) for texts, indices in groups.items()]


def list_groups(keys: Iterable[str], limit: int = 6) -> str:
    """Return the groups on one line; all beyond ``limit`` are counted."""
    return shortened(group_keys(keys), limit)


def listed(names: Sequence[object], limit: int = 40) -> str:
    """Return names on one line, printable; all beyond ``limit`` are counted."""
    return shortened([*map(printable, names)], limit)


def shortened(texts: Sequence[str], limit: int = 4) -> str:
    """Return texts on one line; all beyond ``limit`` are counted."""
    hidden = len(texts) - limit
    return ", ".join(texts[:limit]) + (f", … and {hidden} more" if hidden > 0 else "")


def _line(texts: Sequence[str], indices: Sequence[tuple[int, ...]]) -> str:
    columns = [sorted(set(column)) for column in zip(*indices, strict=True)]
    name = texts[0] + "".join(_range(numbers) + text for numbers, text in zip(columns, texts[1:], strict=True))
    is_grid = math.prod(map(len, columns)) == len(indices)
    return printable(name, MAX_NAME) + ("" if is_grid else f" ({len(indices)} keys)")


def _range(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return str(numbers[0])
    if numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{{{numbers[0]}…{numbers[-1]}}}"
    shown = [*map(str, numbers[:4]), *["…"] * (len(numbers) > 4)]
    return "{" + ",".join(shown) + "}"
