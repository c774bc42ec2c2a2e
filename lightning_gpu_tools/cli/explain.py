"""The command ``explain``."""

import argparse
import ast
import inspect
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any, NamedTuple

from lightning_gpu_tools.advice.causes import MEMORY_CAUSES, STALL_CAUSES, TIME_CAUSES
from lightning_gpu_tools.advice.findings import Cause
from lightning_gpu_tools.units import wrapped

SITE = "https://lightning-gpu-tools.github.io/lightning_gpu_tools"


class Group(NamedTuple):
    """Causes of the same kind, in a folder of ``advice/causes``."""

    title: str
    place: str  # in gpu_report.json
    folder: str
    causes: Mapping[str, Cause[Any]]
    page: str  # of docs/
    heading: str  # of the table in it


_FINDINGS, _STALLS = "diagnosis.findings[].cause", "stalls[].cause"
GROUPS = (
    Group("slow training", _FINDINGS, "time", TIME_CAUSES, "causes_of_slow_training.md", "causes-of-slow-training"),
    Group("out of memory", _FINDINGS, "memory", MEMORY_CAUSES, "out_of_memory.md", "causes-and-fixes"),
    Group("no progress", _STALLS, "stalls", STALL_CAUSES, "hanging_training.md", "causes-and-fixes"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments and the help."""
    parser.description = (
        "Explain a cause in a report: what it means, how it is measured, what to change, and its thresholds, as in "
        "its source file. Works without a GPU."
    )
    parser.epilog = "Exit code: 0 explained; 2 wrong usage, or no cause has that name."
    parser.add_argument(
        "cause",
        metavar="CAUSE",
        nargs="?",
        help="cause or kind from gpu_report.json, such as data_loading or io_bound (default: list all causes)",
    )


def run(args: argparse.Namespace) -> int:
    """Print the causes with the given name, or list all causes."""
    if args.cause is None:
        print("\n".join(_list()))
        return 0
    found = [
        "\n".join(_lines(group, name))
        for group in GROUPS
        for name, cause in group.causes.items()
        if args.cause in (name, *(variant.kind for variant in cause.variants))
    ]
    if not found:
        args.parser.error(f'no cause is named "{args.cause}". Run explain without an argument to list all causes.')
    print("\n\n\n".join(found))
    return 0


def _list() -> Iterator[str]:
    for group in GROUPS:
        yield f"{group.title.capitalize()} ({group.place} in gpu_report.json)"
        for name in sorted(group.causes):
            meaning = _docstring(group, name).partition("\n\n")[0].partition(": ")[2]
            yield wrapped(" ".join(meaning.split()), f"  {name:24}", " " * 26)
        yield ""
    yield "For details: lightning-gpu-tools explain CAUSE"


def _lines(group: Group, name: str) -> Iterator[str]:
    cause = group.causes[name]
    yield "\n\n".join(wrapped(" ".join(part.split()), others="") for part in _docstring(group, name).split("\n\n"))
    yield ""
    yield wrapped(f"{group.title.capitalize()} ({group.place} in gpu_report.json); found on: {cause.verified_on}")
    yield "\nWhat you see, and what to change:"
    for variant in cause.variants:
        yield wrapped(f"{variant.kind}: {variant.says}" if variant.kind else variant.says, "  ", "  ")
        yield wrapped(variant.change, "    -> ", "       ")
    yield f"\nMore: {SITE}/{group.page.removesuffix('.md')}/#{group.heading}"
    constants = _constants(group, name)
    if constants:
        yield f"\nConstants in its file:\n{constants}"


def _docstring(group: Group, name: str) -> str:
    return inspect.getdoc(import_module(f"lightning_gpu_tools.advice.causes.{group.folder}.{name}")) or ""


def _constants(group: Group, name: str) -> str:
    """Return the lines of a cause's file between its imports and its first function, with their comments."""
    source = inspect.getsource(import_module(f"lightning_gpu_tools.advice.causes.{group.folder}.{name}"))
    body = ast.parse(source).body
    imports = [node.end_lineno or 0 for node in body if isinstance(node, (ast.Import, ast.ImportFrom))]
    functions = [node.lineno for node in body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    return "\n".join(source.splitlines()[max(imports) : functions[0] - 1]).strip()
