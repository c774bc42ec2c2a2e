"""The command ``pick``."""

from __future__ import annotations

import argparse

from lightning_gpu_tools.cli import options


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
        f"{options.ABOUT_CLAIMS}"
    )
    options.add_requirements(parser)
    parser.add_argument(
        "--format",
        choices=("uuid", "env", "json"),
        default="uuid",
        help="uuid: comma-separated UUIDs, best first (default). env: CUDA_VISIBLE_DEVICES=UUIDS. json: an object with "
        "`cuda_visible_devices`, `uuids`, `min_free_bytes` and `gpus` (readings in bytes and percent).",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the selected GPUs."""
    selection = options.select(args, claim=False)
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
