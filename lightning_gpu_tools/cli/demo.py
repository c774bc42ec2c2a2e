"""``lightning-gpu-tools demo``: a slow training, its report, and the fix, without a GPU, in under a minute."""

from __future__ import annotations

import argparse
import os
import tempfile


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command and its help."""
    parser.description = (
        "Train a small network with a slow loader and print its report. Then apply the advice, train again, and print "
        "the result. It needs no GPU, downloads nothing, and takes under a minute."
    )
    parser.add_argument(
        "--folder", metavar="FOLDER", help="where to keep the reports (default: a temporary folder, removed at the end)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run both trainings."""
    for name in ("LIGHTNING_GPU_TOOLS", "LIGHTNING_GPU_TOOLS_DISABLE"):  # the demo adds the callbacks itself
        os.environ.pop(name, None)
    import torch

    from lightning_gpu_tools.trainer.demo import run_demo

    torch.set_num_threads(1)  # several threads wait for each other on a busy machine

    with tempfile.TemporaryDirectory(prefix="lightning-gpu-tools-demo-") as temporary:
        before, after = run_demo(args.folder or temporary, lambda line: print(line, flush=True))
        if not args.folder:
            print("The reports were removed; --folder FOLDER keeps them.")
    return 0 if before.verdict == "low" and after.verdict in ("healthy", "low") else 1
