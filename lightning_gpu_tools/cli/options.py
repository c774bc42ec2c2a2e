"""The options of a selection on the command line, shared by ``pick`` and ``run``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from lightning_gpu_tools.selection.request import OPTIONS, Request
from lightning_gpu_tools.units import parse_bytes, parse_duration

if TYPE_CHECKING:
    from lightning_gpu_tools.selection.picking import GpuSelection

_T = TypeVar("_T")

# For the help of every command that reads or makes claims.
ABOUT_CLAIMS = (
    "Claims are files in /tmp/lightning-gpu-tools, or in the folder that LIGHTNING_GPU_TOOLS_CLAIMS_DIR names. Jobs "
    "with a /tmp of their own (containers, SLURM's job_container/tmpfs) do not see each other's claims. For these, an "
    "administrator creates a folder on the host (install -d -m 1777 /run/lightning-gpu-tools) and mounts it in every "
    "container. The variable then has to name it for all users."
)


def add_requirements(parser: argparse.ArgumentParser) -> None:
    """Add ``-n`` and the options of a selection but ``claim``, which each command decides."""
    group = parser.add_argument_group("which GPUs")
    group.add_argument("-n", "--count", type=_checked(_count), metavar="N", help="How many GPUs. Default: 1.")
    parsers: dict[str, tuple[str, Callable[[str], object]]] = {
        "min_free": ("SIZE", lambda text: parse_bytes(text, "the size")),
        "max_utilization": ("PERCENT", _percent),
        "wait": ("TIME", lambda text: parse_duration(text, "the duration")),
    }
    for name, text in OPTIONS.items():
        flag = f"--{name.replace('_', '-')}"
        if name in parsers:
            metavar, parse = parsers[name]
            group.add_argument(flag, type=_checked(parse), metavar=metavar, help=text)
        elif name != "claim":
            group.add_argument(flag, action="store_true", help=text)


def select(args: argparse.Namespace, *, claim: bool, uuids_only: bool = False) -> GpuSelection:
    """Pick what the options ask for."""
    from lightning_gpu_tools.selection.picking import Attempt, pick

    options = {name: getattr(args, name) for name in OPTIONS if name != "claim"}
    request = Request.parse(1 if args.count is None else args.count, claim=claim, **options)
    try:
        return pick(request, Attempt.choose, uuids_only=uuids_only)
    except KeyboardInterrupt:  # while waiting
        raise SystemExit(130) from None  # as of a program that SIGINT ended, POSIX "Exit Status for Commands"


def _count(text: str) -> int:
    if not (text.isdecimal() and int(text) >= 1):
        raise ValueError(f"must be an integer of at least 1, got {text!r}")
    return int(text)


def _percent(text: str) -> float:
    try:
        percent = float(text.removesuffix("%"))
    except ValueError:
        percent = -1.0
    if not 0 <= percent <= 100:
        raise ValueError(f"must be a percentage between 0 and 100, got {text!r}")
    return percent


def _checked(parse: Callable[[str], _T]) -> Callable[[str], _T]:
    """Let argparse show the message of a ``ValueError``; by itself it says just "invalid value"."""

    def parse_or_explain(text: str) -> _T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parse_or_explain
