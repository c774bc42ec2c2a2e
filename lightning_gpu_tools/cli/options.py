"""The options that select GPUs, for ``pick`` and ``run``."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from typing import TYPE_CHECKING

from lightning_gpu_tools.selection.ranking import LAST_RUN, OPTIONS, Request

if TYPE_CHECKING:
    from lightning_gpu_tools.selection.picking import GpuSelection

ABOUT_CLAIMS = (
    "Claims are files in /tmp/lightning-gpu-tools, or in the folder set by LIGHTNING_GPU_TOOLS_CLAIMS_DIR. Jobs with a "
    "private /tmp (containers, SLURM's job_container/tmpfs) do not see each other's claims. To share them, an "
    "administrator mounts one host folder in all jobs (install -d -m 1777 /run/lightning-gpu-tools) and sets the "
    "variable."
)


def add_requirements(parser: argparse.ArgumentParser) -> None:
    """Add ``-n`` and all options except ``claim``, which each command sets itself."""
    group = parser.add_argument_group("which GPUs")
    group.add_argument("-n", "--count", type=int, metavar="N", help="Number of GPUs. Default: 1.")
    group.add_argument("--min-free", metavar="SIZE", help=OPTIONS["min_free"])
    group.add_argument("--max-utilization", type=percent, metavar="PERCENT", help=OPTIONS["max_utilization"])
    group.add_argument("--exclusive", action="store_true", help=OPTIONS["exclusive"])
    group.add_argument("--name", metavar="PART", help=OPTIONS["name"])
    group.add_argument("--wait", metavar="TIME", help=OPTIONS["wait"])
    parser.set_defaults(parser=parser)


def percent(text: str) -> float:
    """Return the number in ``"50"`` or ``"50%"``. The argparse error message includes this function's name."""
    return float(text.removesuffix("%"))


def say(text: str) -> None:
    """Print a line to stderr."""
    with contextlib.suppress(BrokenPipeError):  # the command may not need a reader
        print(f"lightning-gpu-tools: {text}", file=sys.stderr, flush=True)


def select(args: argparse.Namespace, *, claim: bool, group: str | None = None) -> GpuSelection:
    """Pick the GPUs that the options request; ``group`` as in ``picking.Attempt``.

    Replaces ``--min-free last`` in ``args`` with a size.
    """
    from lightning_gpu_tools.selection.picking import Attempt, pick

    if args.min_free == LAST_RUN:
        from lightning_gpu_tools.reports.last_run import last_need

        need = last_need(os.curdir, getattr(args, "command", ()))
        args.min_free = need.min_free_bytes
        say(need.origin)
    options = {name: getattr(args, name) for name in OPTIONS if name != "claim"}
    try:
        request = Request(1 if args.count is None else args.count, claim=claim, **options)
    except ValueError as error:
        args.parser.error(str(error))
    try:
        return pick(request, Attempt.choose, group=group)
    except KeyboardInterrupt:  # while waiting
        raise SystemExit(130) from None  # as for a program ended by SIGINT, POSIX "Exit Status for Commands"
