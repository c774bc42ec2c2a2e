"""The command ``run``."""

import argparse
import os
import signal
import sys

from lightning_gpu_tools.cli.pick import ABOUT_CLAIMS, add_requirements, say, select
from lightning_gpu_tools.processes import become
from lightning_gpu_tools.selection.claims import pass_claims_on
from lightning_gpu_tools.selection.placement import find_launch
from lightning_gpu_tools.units import printable_path

_SRUN_INSIDE = (
    "SLURM removes CUDA_VISIBLE_DEVICES from tasks without --gres, so they see all GPUs. Run this instead: srun ... "
    "lightning-gpu-tools run ... -- CMD"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments and the help."""
    parser.description = (
        "Claim the GPUs with the most free memory, idle ones first, and run a command that sees only these GPUs. The "
        "claim lasts until the command and its children end, even if they are killed. Under srun, torchrun or mpirun, "
        "all processes on one machine share the same N GPUs if N is at least the number of processes; otherwise each "
        "process picks its own. With SLURM, use `srun ... lightning-gpu-tools run ... -- CMD`, because the tasks of "
        "`run -- srun CMD` see all GPUs."
    )
    parser.epilog = (
        "Example: lightning-gpu-tools run -n 2 --min-free 8GiB -- python train.py. Exit code: that of the command; 1 "
        "no report for --min-free last; 2 wrong usage; 3 not enough GPUs; 4 no NVIDIA driver; 126 the command cannot "
        "be run; 127 it was not found. "
        f"{ABOUT_CLAIMS}"
    )
    add_requirements(parser)
    parser.add_argument(
        "--advise",
        action="store_true",
        help="Add the monitor and the advisor to every Lightning Trainer in CMD. With no other option, claim no GPU. "
        "With --min-free, their report says whether SIZE was enough, or far too much. "
        "A shell command in LIGHTNING_GPU_TOOLS_NOTIFY runs when training ends, fails or hangs.",
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- CMD", help="The command and its arguments.")


def run(args: argparse.Namespace) -> int:
    """Claim GPUs and execute the command. Return only if it cannot be started."""
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        args.parser.error("no command given: put it last, after --")
    if args.advise:
        os.environ["LIGHTNING_GPU_TOOLS"] = "advise"
    values = (args.count, args.min_free, args.max_utilization, args.name, args.wait)
    asked = args.exclusive or any(value is not None for value in values)
    if asked or not args.advise:
        count, group = args.count or 1, None
        launch = find_launch(os.environ, of_lightning=False)
        if launch and 1 < (launch.processes or 1) <= count:  # each of them gets one or more of the GPUs
            group = launch.group(count)
        selection = select(args, claim=True, group=group)
        selection.apply()
        pass_claims_on()
        reason = selection.reason or f"Another process has picked {selection.cuda_visible_devices}."
        if launch and group:
            reason += f" The {launch.processes} processes that {launch.program} started on this machine share them."
        say(reason)
        if os.path.basename(command[0]) == "srun":
            say(_SRUN_INSIDE)
    try:
        for name in ("SIGPIPE", "SIGXFSZ"):  # Python ignores them, and the command would inherit that
            signal.signal(getattr(signal, name), signal.SIG_DFL)
        become(command)
    except OSError as error:
        print(f"lightning-gpu-tools: {printable_path(command[0])}: {error.strerror}", file=sys.stderr)
        return 127 if isinstance(error, FileNotFoundError) else 126  # as in a shell, POSIX "Exit Status for Commands"
