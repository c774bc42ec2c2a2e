"""The command ``pick``, and the options that select GPUs, also for ``run``."""

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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments and the help."""
    parser.description = (
        "Print the UUIDs of the GPUs with the most free memory, idle ones first, on one line. `pick` claims nothing, "
        "because a claim ends with its process. To claim GPUs for a command, use `run`."
    )
    parser.epilog = (
        "Example: gpus=$(lightning-gpu-tools pick -n 2 --min-free 8GiB) && CUDA_VISIBLE_DEVICES=$gpus python train.py. "
        "Exit code: 0 done; 1 no report for --min-free last; 2 wrong usage; 3 not enough GPUs, with the reasons on "
        "stderr; 4 no NVIDIA driver. "
        f"{ABOUT_CLAIMS}"
    )
    add_requirements(parser)
    parser.add_argument(
        "--format",
        choices=("uuid", "env", "json"),
        default="uuid",
        help="uuid: comma-separated UUIDs, best first (default). env: CUDA_VISIBLE_DEVICES=UUIDS. json: an object with "
        "`cuda_visible_devices`, `uuids`, `min_free_bytes` and `gpus` (readings in bytes and percent).",
    )


def run(args: argparse.Namespace) -> int:
    """Print the selected GPUs."""
    selection = select(args, claim=False)
    if args.format == "json":
        import json

        from lightning_gpu_tools.units import parse_bytes

        gpus = [gpu.as_json() for gpu in selection.gpus]
        mask, uuids = selection.cuda_visible_devices, selection.uuids
        size = None if args.min_free is None else parse_bytes(args.min_free)
        print(json.dumps({"cuda_visible_devices": mask, "uuids": uuids, "min_free_bytes": size, "gpus": gpus}))
    else:
        print(("CUDA_VISIBLE_DEVICES=" if args.format == "env" else "") + selection.cuda_visible_devices)
    return 0


def add_requirements(parser: argparse.ArgumentParser) -> None:
    """Add ``-n`` and all options except ``claim``, which each command sets itself."""
    group = parser.add_argument_group("which GPUs")
    group.add_argument("-n", "--count", type=int, metavar="N", help="Number of GPUs. Default: 1.")
    group.add_argument("--min-free", metavar="SIZE", help=OPTIONS["min_free"])
    group.add_argument("--max-utilization", type=percent, metavar="PERCENT", help=OPTIONS["max_utilization"])
    group.add_argument("--exclusive", action="store_true", help=OPTIONS["exclusive"])
    group.add_argument("--name", metavar="PART", help=OPTIONS["name"])
    group.add_argument("--wait", metavar="TIME", help=OPTIONS["wait"])


def percent(text: str) -> float:
    """Return the number in ``"50"`` or ``"50%"``. The argparse error message includes this function's name."""
    return float(text.removesuffix("%"))


def say(text: str) -> None:
    """Print a line to stderr."""
    with contextlib.suppress(BrokenPipeError):  # the command may not need a reader
        print(f"lightning-gpu-tools: {text}", file=sys.stderr, flush=True)


def select(args: argparse.Namespace, *, claim: bool, group: str | None = None) -> GpuSelection:
    """Pick the GPUs that the options request; ``group`` as in ``Request``.

    Replaces ``--min-free last`` in ``args`` with a size.
    """
    from lightning_gpu_tools.selection.picking import Attempt, pick

    if args.min_free == LAST_RUN:
        from lightning_gpu_tools.reports.last_run import last_need

        args.min_free, origin = last_need(os.curdir, getattr(args, "command", ()))
        say(origin)
    options = {name: getattr(args, name) for name in OPTIONS if name != "claim"}
    try:
        request = Request(1 if args.count is None else args.count, claim=claim, group=group, **options).checked()
    except ValueError as error:
        args.parser.error(str(error))
    try:
        return pick(request, Attempt.choose)
    except KeyboardInterrupt:  # while waiting
        raise SystemExit(130) from None  # as for a program ended by SIGINT, POSIX "Exit Status for Commands"
