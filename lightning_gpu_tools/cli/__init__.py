"""The command ``lightning-gpu-tools``: one module per subcommand, with ``add_arguments(parser)`` and ``run(args)``.

Only the module of the called command is imported, and none imports torch, lightning, pynvml or rich before it has to.
So ``pick`` in a shell script costs little more than starting Python.
"""

import argparse
import contextlib
import importlib
import io
import os
import re
import sys
from collections.abc import Collection, Sequence
from typing import Any, NoReturn

from lightning_gpu_tools.environment import VERSION
from lightning_gpu_tools.errors import LightningGpuToolsError, NotEnoughGpusError, NvmlUnavailableError
from lightning_gpu_tools.units import printable, printable_lines, printable_path

COMMANDS = {
    "gpus": "show all GPUs, their users and their claims",
    "pick": "print the GPUs with the most free memory",
    "run": "claim GPUs and run a command on them",
    "dry-run": "run the first training steps on simulated GPUs to see whether they fit",
    "report": "print the report of a run, or compare two runs",
    "explain": "explain a cause in a report: what it means, how it is measured, what to change",
    "demo": "train with a slow DataLoader, read the report, and fix it",
    "checkpoint": "inspect, verify and convert checkpoint files",
}
_EXIT_CODES: dict[type, int] = {NotEnoughGpusError: 3, NvmlUnavailableError: 4}
_EXIT_UNEXPECTED = 70  # EX_SOFTWARE of sysexits.h: not the result of any command


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        from difflib import get_close_matches

        wrong = re.search(r"invalid choice: '([^']*)'|unrecognized arguments: (--[^\s=]+)", message)
        known = [*COMMANDS, *self._option_string_actions]
        near = get_close_matches(wrong[1] or wrong[2], known) if wrong else []
        meant = f". Did you mean {' or '.join(near)}?" if near else ""
        with contextlib.redirect_stderr(sys.__stderr__ or sys.stderr):  # argparse may color the usage
            super().error(printable(f"{message}{meant}", 1000))  # file names may be chosen by others


class _PrintableStream:
    """Stream that escapes control characters, even in logs and warnings; colored output goes to ``sys.__stdout__``."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(printable_lines(text))
        return len(text)

    def isatty(self) -> bool:
        return False  # colors would be escaped

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code.

    0: done; 1: failed; 2: wrong usage; 3: not enough GPUs; 4: no driver; 70: unexpected error. For commands such as
    ``report``, where 1 is a result, 3 means that there is no result.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed, as by `>&-`; a claim's file must not get its descriptor
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - stays open until the process ends
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # not every terminal can show every character
    arguments = sys.argv[1:] if argv is None else list(argv)
    called = set(arguments[:1]) & COMMANDS.keys()  # only --help and --version can precede the command
    args, unknown = parser(called).parse_known_args(arguments)
    if unknown:
        args.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    stdout: Any = _PrintableStream(sys.stdout)
    stderr: Any = _PrintableStream(sys.stderr)
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        return _run(args)


def script() -> NoReturn:
    """Run as a program of its own."""
    code = main()
    if sys.argv[1:2] == ["pick"]:  # it holds nothing, and Python takes a tenth of the time of a pick to end
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def parser(called: Collection[str] = tuple(COMMANDS)) -> argparse.ArgumentParser:
    """Return the parser of the ``called`` commands (default: all); without any, only their names are known."""
    made = _Parser(
        prog="lightning-gpu-tools",
        description="Pick GPUs on a shared server, read training reports, and make checkpoints portable.",
    )
    made.add_argument("--version", action="version", version=f"lightning-gpu-tools {VERSION}")
    commands = made.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name in called or COMMANDS:
        command = commands.add_parser(name, help=COMMANDS[name])
        if called:
            module = importlib.import_module(f"lightning_gpu_tools.cli.{name.replace('-', '_')}")
            module.add_arguments(command)
            command.set_defaults(parser=command, run=module.run)
    return made


def _run(args: argparse.Namespace) -> int:
    try:
        code = int(args.run(args))
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader has closed the pipe (`| head`). Discard what Python flushes at exit, to avoid a traceback.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except LightningGpuToolsError as error:
        print(f"lightning-gpu-tools: {error}", file=sys.stderr)
        return _EXIT_CODES.get(type(error), 1)
    except OSError as error:
        path = printable_path(error.filename or "the file")
        print(f"lightning-gpu-tools: {path}: {error.strerror or error}", file=sys.stderr)
        return 1
    except Exception as error:  # noqa: BLE001 - the message below has everything that a bug report needs
        import traceback

        calls = traceback.extract_tb(error.__traceback__)
        lines = " > ".join(f"{os.path.basename(call.filename)}:{call.lineno}" for call in calls)
        print(
            f"lightning-gpu-tools {VERSION} stopped on an unexpected error. Please report this line with the command: "
            f"{type(error).__name__}: {printable(error, 300)} ({printable(lines, 300)})",
            file=sys.stderr,
        )
        return _EXIT_UNEXPECTED
