"""The command ``demo``."""

import argparse
import functools
import os
import tempfile


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments and the help."""
    parser.description = (
        "Train a small network with a slow DataLoader and print its report. Then apply the advice, train again, and "
        "print the result. Needs no GPU, downloads nothing, and takes less than a minute."
    )
    parser.add_argument(
        "--folder",
        metavar="FOLDER",
        help="where to write the reports (default: a new temporary folder, which stays)",
    )


def run(args: argparse.Namespace) -> int:
    """Train, apply the advice, and train again."""
    for name in ("LIGHTNING_GPU_TOOLS", "LIGHTNING_GPU_TOOLS_DISABLE"):  # the demo adds the callbacks itself
        os.environ.pop(name, None)
    from lightning_gpu_tools.trainer.demo import STEPS, train

    folder = args.folder or tempfile.mkdtemp(prefix="lightning_gpu_tools_demo_")
    say = functools.partial(print, flush=True)
    say(f"1. {STEPS} training steps on the CPU without workers. A batch has 16 images of 1.5 ms loading time each.")
    before = train(folder, num_workers=0)
    workers = max((int(finding.evidence.get("advised_num_workers", 0)) for finding in before.findings), default=0)
    if not workers:
        say("The report does not advise workers, because other programs keep this machine busy. Try again later.")
        return 1
    say(f"\n2. The same run with the advised num_workers={workers}.")
    after = train(folder, num_workers=workers)
    say("\nIn your own script: Trainer(callbacks=[GPUUtilizationMonitor(), GPUUtilizationAdvisor()]).")
    return 0 if before.verdict == "low" and after.verdict in ("healthy", "low") else 1
