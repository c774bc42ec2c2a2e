"""The differences between the weights of two checkpoint files."""

from __future__ import annotations

import contextlib
import math
import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lightning_gpu_tools.checkpoints.content import shown_shape
from lightning_gpu_tools.checkpoints.key_renaming import ModelKeys, RenamePlan, plan_renaming
from lightning_gpu_tools.checkpoints.key_tree import MAX_NAME, counted, group_keys, list_groups
from lightning_gpu_tools.checkpoints.reading import read_weights
from lightning_gpu_tools.checkpoints.state_dicts import (
    check_numbers,
    check_repetition,
    choose_weights,
    errors_about,
    is_packed,
    name_of,
    shape_of,
    weights_in,
)
from lightning_gpu_tools.checkpoints.structure import Opaque, Progress, no_progress
from lightning_gpu_tools.checkpoints.summary import prose, table
from lightning_gpu_tools.checkpoints.unsafe_globals import describe_unread
from lightning_gpu_tools.errors import CheckpointMismatchError
from lightning_gpu_tools.units import printable, printable_path

# 128 MiB at a time, as float64.
_VALUES_AT_ONCE = 1 << 24
_LONGEST_TABLE = 40


@dataclass(frozen=True)
class Difference:
    """The difference of one key between two files."""

    key: str  # name in the second file
    what: str  # "shape", "dtype" or "values"
    detail: str  # both sides, or the size of the difference
    largest: float | None = None  # absolute difference between two values; None if they cannot be subtracted
    share: float | None = None  # fraction of values that differ


@dataclass(frozen=True, kw_only=True)
class CheckpointComparison:
    """The differences between two files."""

    renamed: str  # how the keys of the first file were renamed
    only_in_first: tuple[str, ...]
    only_in_second: tuple[str, ...]
    differences: tuple[Difference, ...]
    same: int
    not_compared: tuple[str, ...]  # weights in both files that only running code could open
    unread_in_first: tuple[str, ...]  # classes and functions in the file that were not opened
    unread_in_second: tuple[str, ...]

    @property
    def is_same(self) -> bool:
        """Whether the weights do not differ, except in their names."""
        return not (self.only_in_first or self.only_in_second or self.differences)


def compare(
    first: str, second: str, progress: Progress = no_progress, *, entry: str | None = None
) -> CheckpointComparison:
    """Compare the weights of two files by key, after removing wrappers and one root from the keys of the first.

    ``entry`` names the set of weights to use in each file that has several.
    """
    (one, unread_in_first), (two, unread_in_second) = (_weights(path, entry) for path in (first, second))
    plan = RenamePlan(renames={})
    with (
        contextlib.suppress(CheckpointMismatchError),  # nothing in common
        errors_about(f"{printable_path(first)} and {printable_path(second)}"),
    ):
        plan = plan_renaming(dict.fromkeys(one), ModelKeys(shapes=dict.fromkeys(two)), strict=False)
    check_repetition(first, {old: one[old] for old in plan.renames})
    check_repetition(second, {new: two[new] for new in plan.renames.values()})
    differences: list[Difference] = []
    taken = {*plan.renames.values()}
    sizes = {new: two[new].numel() * two[new].element_size() for new in taken if isinstance(two[new], torch.Tensor)}
    advance = progress(sum(sizes.values()))
    not_compared: list[str] = []
    for old, new in plan.renames.items():
        if isinstance(one[old], Opaque) and isinstance(two[new], Opaque):
            not_compared.append(new)
        else:
            differences += _differences(new, one[old], two[new])
        advance(sizes.get(new, 0))
    return CheckpointComparison(
        renamed=plan.describe(),
        only_in_first=tuple(key for key in one if key not in plan.renames),
        only_in_second=tuple(key for key in two if key not in taken),
        differences=tuple(differences),
        same=len(plan.renames) - len(not_compared) - len({difference.key for difference in differences}),
        not_compared=tuple(not_compared),
        unread_in_first=unread_in_first,
        unread_in_second=unread_in_second,
    )


def _weights(path: str, entry: str | None) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """Return the weights of a file, and the classes and functions that were left unread."""
    content, unread = read_weights(path)
    entries = weights_in(content, path)
    name, weights = choose_weights(path, entries, None if len(entries) == 1 else entry)
    check_numbers(path, weights)
    unopened = {key: Opaque(kind=kind) for key, kind in unread.values.get(name, {}).items()}
    return {**weights, **unopened}, unread.classes


def _differences(key: str, one: Any, two: Any) -> Iterable[Difference]:
    if not (_has_own_numbers(one) and _has_own_numbers(two)):
        sides = zip((one, two), ("first", "second"), strict=True)
        unopened = [f"{printable(side.kind)} in the {which}" for side, which in sides if isinstance(side, Opaque)]
        if unopened:
            yield Difference(key, "values", f"not opened: {unopened[0]}")
        elif not _same(one, two):
            yield Difference(key, "values", "different (not plain tensors)")
        return
    if one.shape != two.shape:
        yield Difference(key, "shape", f"{shown_shape(one.shape)} and {shown_shape(two.shape)}")
        return
    if one.dtype != two.dtype:
        yield Difference(key, "dtype", f"{name_of(one.dtype)} and {name_of(two.dtype)}")
    if one.is_meta or two.is_meta:  # in an extra state
        yield Difference(key, "values", "no values (meta device)")
        return
    # Compare bits first, because equal numbers are the common case, and a NaN equals itself.
    is_dense = one.layout is two.layout is torch.strided and not (one.is_quantized or two.is_quantized)
    if not one.numel() or (is_dense and one.dtype == two.dtype and torch.equal(_bits(one), _bits(two))):
        return
    try:
        unequal, largest = _unequal_values(one, two)
    except NotImplementedError:  # torch can store numbers of this type, but not compute with them
        yield Difference(key, "values", "different bits")
        return
    if unequal:
        share, is_finite = unequal / one.numel(), math.isfinite(largest)
        size = f"max. difference {largest:.3g}" if is_finite else "not finite"
        detail = f"{size}; {100 * share:.3g}% of elements differ"
        yield Difference(key, "values", detail, largest if is_finite else None, share)


def _has_own_numbers(value: Any) -> bool:
    return shape_of(value) is not None and not is_packed(value)


def _same(one: Any, two: Any, compared: set[tuple[int, int]] | None = None) -> bool:
    """Return whether two values of any kind are bitwise identical.

    ``compared`` holds the containers already compared: a small file can hold one container in a billion places.
    """
    compared = set() if compared is None else compared
    if isinstance(one, (Mapping, list, tuple)):
        if (id(one), id(two)) in compared:
            return True  # a difference would have ended the comparison before
        compared.add((id(one), id(two)))
    if isinstance(one, Mapping) and isinstance(two, Mapping):
        return one.keys() == two.keys() and all(_same(one[key], two[key], compared) for key in one)
    if _has_own_numbers(one) and _has_own_numbers(two):
        return not any(_differences("", one, two))
    if type(one) is not type(two):
        return False
    if isinstance(one, torch.Tensor):
        return all(map(_same, _parts(one), _parts(two)))
    if isinstance(one, (list, tuple)):
        return len(one) == len(two) and all(_same(a, b, compared) for a, b in zip(one, two, strict=True))
    if isinstance(one, (set, frozenset)):
        return bool(one == two)
    return pickle.dumps(one) == pickle.dumps(two)  # a NaN equals itself


def _parts(tensor: Any) -> list[Any]:
    if tensor.is_nested:
        return [tensor.size(0), *tensor.unbind()]
    names, context = tensor.__tensor_flatten__()
    return [names, context, *(getattr(tensor, name) for name in names)]


def _unequal_values(one: torch.Tensor, two: torch.Tensor) -> tuple[int, float]:
    """Return the number of values that differ and their largest difference."""
    flat = [(t.dequantize() if t.is_quantized else t.to_dense()).detach().reshape(-1) for t in (one, two)]
    wide = torch.complex128 if one.is_complex() or two.is_complex() else torch.float64
    whole = not any(tensor.is_floating_point() or tensor.is_complex() for tensor in flat)
    unequal, largest = 0, 0.0
    for a, b in zip(*(torch.split(tensor, _VALUES_AT_ONCE) for tensor in flat), strict=True):
        x, y = a.to(wide), b.to(wide)
        # Beyond 2 ** 53, float64 cannot distinguish adjacent integers.
        different = a.to(torch.int64) != b.to(torch.int64) if whole else (x != y) & ~(x.isnan() & y.isnan())
        if different.any():
            unequal += int(different.sum())
            gap = max(float((x - y).abs()[different].max()), float(whole))
            largest = gap if math.isnan(gap) else max(largest, gap)
    return unequal, largest


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.dtype is torch.complex128:  # wider than any integer type
        plain = torch.view_as_real(plain)
    return plain.view(_INTEGER_OF_SIZE[plain.element_size()])


_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def render(found: CheckpointComparison, first: str, second: str) -> str:
    """Return a comparison as text, with the largest differences first."""
    same = f"{counted(found.same, 'weight')} {'is' if found.same == 1 else 'are'} the same"
    lines = [f"{printable_path(first)} and {printable_path(second)}: {same}"]
    if found.renamed:
        lines += prose(f"  keys of the first: {found.renamed}")
    for label, keys in (("only in the first", found.only_in_first), ("only in the second", found.only_in_second)):
        for line in group_keys(keys):
            lines += prose(f"  {label}: {line}")
    if found.not_compared:
        lines += prose(f"  in both, not compared (opening would run code): {list_groups(found.not_compared)}")
    for label, names in (("first", found.unread_in_first), ("second", found.unread_in_second)):
        if names:
            lines += prose(f"  {label}: {describe_unread(names)}")
    by_key: dict[str, dict[str, Difference]] = {}
    for difference in found.differences:
        by_key.setdefault(difference.key, {})[difference.what] = difference
    if by_key:
        ranked = sorted(by_key.items(), key=lambda item: -max(map(_importance, item[1].values())))
        columns = [what for what in ("shape", "dtype", "values") if any(what in whats for whats in by_key.values())]
        rows = [
            (printable(key, MAX_NAME), *(_cell(whats, what) for what in columns))
            for key, whats in ranked[:_LONGEST_TABLE]
        ]
        lines += table([("key", *columns), *rows])
        if len(ranked) > _LONGEST_TABLE:
            lines.append(f"  … and {len(ranked) - _LONGEST_TABLE} more; use --json to list all")
    return "\n".join(lines)


def _cell(differences: Mapping[str, Difference], what: str) -> str:
    if what in differences:
        return differences[what].detail
    return "-" if "shape" in differences else "same"  # the shapes differ, so the rest is not compared


def _importance(difference: Difference) -> float:
    if difference.what == "dtype":
        return 0.0
    return math.inf if difference.largest is None else difference.largest
