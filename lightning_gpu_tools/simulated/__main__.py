"""``python -m lightning_gpu_tools.simulated [--gpu NAME] [-n N] -- CMD``: run a program on simulated GPUs."""

import argparse
import signal
import subprocess
import sys
import tempfile

from lightning_gpu_tools.simulated import MODELS, Machine, SimulatedCudaError


def main() -> int:
    """Run the program and return its exit code; exit with 2 if the machine cannot be created."""
    parser = argparse.ArgumentParser(prog="python -m lightning_gpu_tools.simulated", description=__doc__)
    parser.add_argument(
        "--gpu",
        default="h100-80gb",
        metavar="NAME",
        help=f"{', '.join(MODELS)}, or a part of one; default: %(default)s",
    )
    parser.add_argument("-n", type=int, default=1, metavar="N", help="number of GPUs, at most 16; default: 1")
    parser.add_argument(
        "command", nargs="+", metavar="CMD", help="command after --, which must use the torch of this environment"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="simulated-cuda-") as folder:
        try:
            machine = Machine(folder, [arguments.gpu] * arguments.n)
        except (SimulatedCudaError, ValueError) as error:
            parser.error(str(error))
        try:
            program = subprocess.Popen(arguments.command, env=machine.environment())
        except OSError as error:
            parser.exit(127, f"{arguments.command[0]} cannot be started: {error.strerror}.\n")
        signal.signal(signal.SIGTERM, lambda *_: program.terminate())
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the program has it, too
        code = program.wait()
        return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
