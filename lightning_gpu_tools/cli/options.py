"""The options with which one asks for GPUs, shared by the commands that pick some."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from lightning_gpu_tools.units import parse_bytes, parse_duration

if TYPE_CHECKING:
    from lightning_gpu_tools.selection.picking import GpuSelection

_T = TypeVar("_T")

# For the help of every command that reads or makes claims.
ABOUT_CLAIMS = (
    "Claims are files in /tmp/lightning-gpu-tools, or in the folder that LIGHTNING_GPU_TOOLS_CLAIMS_DIR names. Jobs "
    "with a /tmp of their own (containers, SLURM's job_container/tmpfs) do not see each other's. For these an "
    "administrator creates a folder on the host (install -d -m 1777 /run/lightning-gpu-tools), mounts it in every "
    "container, and sets that variable for all users."
)


def add_requirements(parser: argparse.ArgumentParser) -> None:
    """Add ``-n``, ``--min-free``, ``--max-utilization``, ``--exclusive`` and ``--wait``."""
    group = parser.add_argument_group("which GPUs")
    group.add_argument("-n", "--count", type=_checked(_count), metavar="N", help="how many GPUs (1)")
    group.add_argument(
        "--min-free",
        type=_checked(lambda text: parse_bytes(text, "the size")),
        metavar="SIZE",
        help="memory that each must have free, beyond what others have claimed, such as 8GiB or 500MB",
    )
    group.add_argument(
        "--max-utilization", type=_checked(_percent), metavar="PERCENT", help="highest utilization each may have"
    )
    group.add_argument("--exclusive", action="store_true", help="nobody else on them, and no claim of others")
    group.add_argument(
        "--wait",
        type=_checked(lambda text: parse_duration(text, "the duration")),
        metavar="TIME",
        help="wait that long for them, such as 90s, 10m or 2h; first come, first served",
    )


def select(args: argparse.Namespace, *, claim: bool, uuids_only: bool = False) -> GpuSelection:
    """Pick what the options ask for."""
    from lightning_gpu_tools.selection.picking import Request, pick

    count = 1 if args.count is None else args.count
    request = Request.parse(count, args.min_free, args.max_utilization, args.exclusive, args.wait, claim)
    try:
        return pick(request._replace(uuids_only=uuids_only))
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
