"""``lightning-gpu-tools demo``: see what the package says of a slow training, without a GPU, in under a minute."""

from __future__ import annotations

import argparse
import os
import tempfile


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what this command takes and what its help says."""
    parser.description = (
        "Train a small network with a slow loader, print its diagnosis, train it again with the advice applied, and "
        "print what that has brought. It needs no GPU, downloads nothing, and takes under a minute."
    )
    parser.add_argument(
        "--folder", metavar="FOLDER", help="where to keep the reports (default: a temporary one, removed at the end)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run it."""
    for name in ("LIGHTNING_GPU_TOOLS", "LIGHTNING_GPU_TOOLS_DISABLE"):  # it adds the callbacks itself, and shows them
        os.environ.pop(name, None)
    import torch

    from lightning_gpu_tools.trainer.demo import run_demo

    torch.set_num_threads(1)  # several threads wait for each other where the machine has other work

    with tempfile.TemporaryDirectory(prefix="lightning-gpu-tools-demo-") as temporary:
        before, after = run_demo(args.folder or temporary, lambda line: print(line, flush=True))
        if not args.folder:
            print("The reports themselves are gone now; --folder FOLDER keeps them.")
    return 0 if before.verdict == "low" and after.verdict in ("healthy", "low") else 1
