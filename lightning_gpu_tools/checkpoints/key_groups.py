"""Thousands of parameter names in a few lines: ``layers.{0…11}.attn.bias``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lightning_gpu_tools.units import printable

MAX_NAME = 300  # no real model is known whose parameters have longer names


def group_keys(keys: Iterable[str]) -> list[str]:
    """Return one line for all keys that differ in their numbers only, in order of first appearance.

    ``a.0.w, a.1.w, a.2.w`` becomes ``a.{0…2}.w``. Where the numbers are not a full grid, the line ends in the count.
    """
    groups: dict[tuple[str | None, ...], list[tuple[int, ...]]] = {}
    for key in keys:
        segments = key.split(".")
        shape = tuple(None if _is_index(segment) else segment for segment in segments)
        groups.setdefault(shape, []).append(tuple(int(segment) for segment in segments if _is_index(segment)))
    return [_line(shape, indices) for shape, indices in groups.items()]


def list_groups(keys: Iterable[str], limit: int = 6) -> str:
    """Return the groups on one line, separated by commas; ``…`` and a count stand for all beyond ``limit``."""
    groups = group_keys(keys)
    hidden = len(groups) - limit
    return ", ".join(groups[:limit]) + (f", … and {hidden} more" if hidden > 0 else "")


def listed(names: Sequence[object], limit: int = 40) -> str:
    """Return names, printable and separated by commas, and how many there are beyond ``limit``."""
    hidden = len(names) - limit
    return ", ".join(map(printable, names[:limit])) + (f" and {hidden} more" if hidden > 0 else "")


def _is_index(segment: str) -> bool:
    # Longer digit strings are hashes or dates, and int() of a hostile name's million digits would be slow.
    return segment.isascii() and segment.isdigit() and len(segment) < 8


def _line(shape: Sequence[str | None], indices: Sequence[tuple[int, ...]]) -> str:
    columns = iter([sorted(set(column)) for column in zip(*indices, strict=True)])
    grid = 1
    segments = []
    for segment in shape:
        if segment is None:
            numbers = next(columns)
            grid *= len(numbers)
            segment = _range(numbers)
        segments.append(segment)
    return printable(".".join(segments), MAX_NAME) + (f" ({len(indices)} keys)" if grid != len(indices) else "")


def _range(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return str(numbers[0])
    if numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{{{numbers[0]}…{numbers[-1]}}}"
    shown = [str(number) for number in numbers[:4]] + (["…"] if len(numbers) > 4 else [])
    return "{" + ",".join(shown) + "}"
