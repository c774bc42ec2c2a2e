"""The command ``explain``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from itertools import groupby
from typing import Any

from lightning_gpu_tools.advice.explained import Explained, Threshold, explained
from lightning_gpu_tools.units import wrapped

_VERIFIED_ON = {
    "measurements": "only with synthetic measurements so far",
    "cpu": "by training on a CPU",
    "simulated GPU": "by training on a simulated GPU",
    "hardware": "by training on a GPU",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments and the help."""
    parser.description = (
        "Explain a cause in a report: what it means, how it is measured, what to change, its thresholds and their "
        "sources, its rank among other causes, and how it was verified. Works without a GPU."
    )
    parser.epilog = "Exit code: 0 explained; 2 wrong usage, or no cause has that name."
    parser.add_argument(
        "cause",
        metavar="CAUSE",
        nargs="?",
        help="cause or kind from gpu_report.json, such as data_loading or io_bound (default: list all causes)",
    )
    parser.add_argument(
        "--format", choices=["text", "json"], default="text", help="json prints a list of causes (default: %(default)s)"
    )
    parser.set_defaults(run=run, usage_error=parser.error)


def run(args: argparse.Namespace) -> int:
    """Print the causes with the given name, or list all causes."""
    every = list(explained())
    found = [one for one in every if args.cause in (None, *_names(one))]
    if not found:
        args.usage_error(_unknown(args.cause, [name for one in every for name in _names(one)]))
    if args.format == "json":
        print(json.dumps([_as_json(one) for one in found], indent=2))
    elif args.cause is None:
        print(_list(found))
    else:
        print("\n\n\n".join("\n".join(_lines(one)) for one in found))
    return 0


def _names(one: Explained) -> set[str]:
    return {one.name, *(shape.kind for shape in one.shapes if shape.kind)}


def _unknown(name: str, known: Sequence[str]) -> str:
    near = get_close_matches(name, sorted(set(known)))
    meant = f" Did you mean {' or '.join(near)}?" if near else ""
    return f'no cause is named "{name}".{meant} Run explain without an argument to list all causes.'


def _as_json(one: Explained) -> dict[str, Any]:
    tables = ("shapes", "thresholds", "common_thresholds")
    return {**vars(one), **{name: [row._asdict() for row in getattr(one, name)] for name in tables}}


def _list(causes: Sequence[Explained]) -> str:
    parts = []
    for (group, place), some in groupby(causes, key=lambda one: (one.group, one.place)):
        lines = (_filled(one.meaning, f"  {one.name:24}", " " * 26) for one in some)
        parts.append("\n".join([f"{group.capitalize()} ({place} in gpu_report.json)", *lines]))
    return "\n\n".join([*parts, "For details: lightning-gpu-tools explain CAUSE"])


def _lines(one: Explained) -> Iterator[str]:
    yield _filled(f"{one.name}: {one.meaning}")
    group = one.group.capitalize()
    yield _filled(f"{group} ({one.place} in gpu_report.json). Verified {_VERIFIED_ON[one.verified_on]}.")
    yield "\nHow it is measured"
    yield _filled(one.measured, "  ")
    if one.needs:
        yield _filled(f"Requires: {', '.join(one.needs)}.", "  ")
    yield "\nWhat you see, and what to change"
    for shape in one.shapes:
        yield _filled(f"{shape.kind}: {shape.says}" if shape.kind else shape.says, "  ")
        yield _filled(shape.change, "    -> ", "       ")
    yield "\nThresholds"
    yield from _table(one.thresholds) if one.thresholds else ["  none of its own"]
    if one.common_thresholds:
        yield "\nThresholds of all causes of this group"
        yield from _table(one.common_thresholds)
    if one.order:
        yield "\nAmong other causes"
        yield _filled(one.order, "  ")
    yield f"\nMore: {one.more}"


def _table(thresholds: Sequence[Threshold]) -> Iterator[str]:
    for about, some in groupby(thresholds, key=lambda one: one.about):
        if about:
            yield _filled(about, "  ")
        for one in some:
            value = ".".join(map(str, one.value)) if isinstance(one.value, tuple) else f"{one.value:,.6g}"
            indent = "    " if about else "  "
            yield _filled(f"{one.name} = {value}{one.meaning and f'  {one.meaning}'}", indent, f"{indent}  ")


def _filled(text: str, first: str = "", others: str | None = None) -> str:
    return wrapped(text, first, first if others is None else others)
