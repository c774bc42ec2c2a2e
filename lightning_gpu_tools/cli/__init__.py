"""The command ``lightning-gpu-tools``: one module a subcommand, each with ``add_arguments(parser)``.

Only the module of the command that is called is imported, and building its parser imports none of torch, lightning,
pynvml and rich, so that ``pick`` in a shell script costs little more than Python's start.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
from collections.abc import Sequence

from lightning_gpu_tools.errors import LightningGpuToolsError, NotEnoughGpusError, NvmlUnavailableError

COMMANDS = {
    "gpus": "show all GPUs, who uses them and who has claimed them",
    "pick": "print the GPUs with the most free memory",
    "run": "claim GPUs and run a command on them",
    "report": "print the report of a training run again, or compare two runs",
    "demo": "train a small network on the CPU and see what is said of it",
    "checkpoint": "inspect, verify, convert and compare checkpoint files",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code: 0 done, 1 failed, 2 wrong usage, 3 not enough GPUs, 4 no driver."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed, as by `>&-`; no claim's file must get its number
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - as long as the process lives
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # not every terminal can show every sign
    parser = argparse.ArgumentParser(
        prog="lightning-gpu-tools",
        description="Pick GPUs on a shared server, read training reports, and make checkpoints portable.",
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    arguments = sys.argv[1:] if argv is None else list(argv)
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary)
        if name in arguments[:1]:  # nothing but --help can stand before the command
            importlib.import_module(f"lightning_gpu_tools.cli.{name}").add_arguments(command)
    args = parser.parse_args(arguments)
    try:
        code = int(args.run(args))
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader has gone (`| head`). What Python would still flush at its end goes nowhere, not into a traceback.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except NvmlUnavailableError as error:
        print(f"lightning-gpu-tools: {error}", file=sys.stderr)
        return 4
    except NotEnoughGpusError as error:
        print(f"lightning-gpu-tools: {error}", file=sys.stderr)
        return 3
    except LightningGpuToolsError as error:
        print(f"lightning-gpu-tools: {error}", file=sys.stderr)
        return 1
