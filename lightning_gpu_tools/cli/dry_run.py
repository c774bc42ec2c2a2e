"""The command ``dry-run``."""

import argparse
import dataclasses
import json
import shlex
import subprocess
from collections.abc import Iterator

from lightning_gpu_tools.advice.memory_account import CACHE, PARTS
from lightning_gpu_tools.cli.pick import say
from lightning_gpu_tools.dry_run import launch
from lightning_gpu_tools.dry_run.result import EXIT_CODES, DryRun, Judgment, judge, next_trial, result
from lightning_gpu_tools.reports.text import line_label
from lightning_gpu_tools.simulated import MODELS, SimulatedCudaError, find_model
from lightning_gpu_tools.simulated.build import libraries, torch_folder
from lightning_gpu_tools.units import format_bytes, line_width, printable, wrapped

_MORE_MEMORY = 16  # our default: factor for the second run, which measures a command that does not fit
_MAX_LINES = 4
_MIN_SHARE = 0.005  # of the needed memory; smaller parts and lines are not shown
_NOT_SURE = {"perhaps": "perhaps", "no": "not"}
_TITLES = {"fits": "Fits", "perhaps": "Perhaps", "does_not_fit": "Does not fit", "cannot_be_told": "Unknown"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments and the help."""
    parser.description = (
        "Run the first training steps of an unmodified command on simulated GPUs. Print whether they fit, what uses "
        "the memory, and which other GPUs they fit on. Needs Linux, gcc and torch's CUDA build, but no GPU. Memory is "
        "managed by torch's own allocator; kernels compute nothing. The command is stopped after these steps."
    )
    parser.epilog = (
        'Example: lightning-gpu-tools dry-run --gpu a100-40gb --vary "--batch-size {}" -- python train.py. '
        "Exit code: 0 fits; 1 does not fit; 2 wrong usage; 3 perhaps, near the limit, or unknown: the simulation or "
        "the recording failed, the command used no GPU, or it failed for another reason and its traceback is shown."
    )
    parser.add_argument(
        "--gpu",
        required=True,
        metavar="NAME",
        help=f"GPU model to simulate: {', '.join(MODELS)}, or a part of its name such as h100.",
    )
    parser.add_argument("-n", "--count", type=int, default=1, metavar="N", help="Number of GPUs, up to 16. Default: 1.")
    parser.add_argument("--steps", type=int, default=3, metavar="K", help="Stop after K optimizer steps. Default: 3.")
    parser.add_argument(
        "--vary",
        metavar="TEXT",
        help="Find the largest number that fits by more dry runs: append TEXT to the command, with a number in place "
        'of {}. Example: "--batch-size {}".',
    )
    parser.add_argument("--format", choices=("text", "json"), default="text", help="Output format. Default: text.")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- CMD", help="The command and its arguments.")


def run(args: argparse.Namespace) -> int:
    """Run the command on simulated GPUs and print the result."""
    args.command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not args.command:
        args.parser.error("no command given: put it last, after --")
    if args.steps < 1:
        args.parser.error(f"--steps must be at least 1, got {args.steps}")
    if not 1 <= args.count <= 16:
        args.parser.error(f"-n must be from 1 to 16, got {args.count}")
    if args.vary is not None and "{}" not in args.vary:
        args.parser.error(f"--vary needs {{}} in place of the number, got {args.vary!r}")
    try:
        args.gpu = find_model(args.gpu)
    except ValueError as error:
        args.parser.error(f"argument --gpu: {error}")
    try:
        libraries()  # its error says what is missing
        judgment, needs = _trial(args, args.command, is_quiet=False), None
        if judgment.verdict == "does_not_fit":
            say(f"The run does not fit. Measuring it again on simulated GPUs with {_MORE_MEMORY} times the memory.")
            again = _trial(args, args.command, times_memory=_MORE_MEMORY)
            needs = again.record if again.verdict == "fits" else None
        found = result(judgment, args.gpu, args.steps, needs)
        if args.vary is not None and found.needed_bytes is not None:
            found = dataclasses.replace(found, trials=_vary(args, found))
    except (SimulatedCudaError, OSError) as error:
        why = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)
        found = result(Judgment("cannot_be_told", None, why), args.gpu, args.steps)
    except KeyboardInterrupt:
        return 130  # as for a program ended by SIGINT, POSIX "Exit Status for Commands"
    lines = [json.dumps(dataclasses.asdict(found), indent=2)] if args.format == "json" else render(found)
    print("\n".join(lines))
    return EXIT_CODES[found.verdict]


def _vary(args: argparse.Namespace, found: DryRun) -> dict[int, bool]:
    tried: dict[int, bool] = {}
    batches: set[int | None] = set()
    while (number := next_trial(tried, found.largest_batch or found.batch_size or 1)) is not None:
        command = [*args.command, *shlex.split(args.vary.replace("{}", str(number)))]
        judgment = _trial(args, command)
        if judgment.record is None:
            say(f"With {number}: unknown. {judgment.why_not}")
            break
        tried[number] = judgment.verdict == "fits"
        say(f"With {number}: {judgment.verdict.replace('_', ' ')}.")
        if tried[number]:
            if judgment.record.batch_size in batches:
                say(f"The command ignores the number: its batch size stays {judgment.record.batch_size}. Check --vary.")
                return {}
            batches.add(judgment.record.batch_size)
    return tried


def _trial(args: argparse.Namespace, command: list[str], *, times_memory: int = 1, is_quiet: bool = True) -> Judgment:
    shown = 2 if args.format == "json" else None  # stdout has only the JSON
    code, records = launch.run(
        command,
        args.gpu,
        args.count,
        steps=args.steps,
        times_memory=times_memory,
        stdout=subprocess.DEVNULL if is_quiet else shown,
        stderr=subprocess.DEVNULL if is_quiet else None,
    )
    return judge(code, records, str(torch_folder()), args.gpu if times_memory == 1 else None)


def render(run: DryRun) -> Iterator[str]:
    """Yield about 25 lines that tell the result, the verdict first."""
    yield _wrapped(f"{_TITLES[run.verdict]}: {run.reason}", 1000)
    needed = run.needed_bytes
    if needed:
        yield f"Memory by use ({format_bytes(needed)})"
        for name, label in PARTS.items():
            size = run.parts_bytes.get(name, 0)
            if size >= _MIN_SHARE * needed:
                shown = f"{label} (allocator cache)" if name in CACHE else label
                yield f"  {format_bytes(size):>8}  {100 * size / needed:3.0f}%  {shown}"
        lines = [line for line in run.lines if line.bytes >= _MIN_SHARE * needed][:_MAX_LINES]
        if lines:
            yield "Lines that allocated the most"
            room = line_width() - 15
            yield from (f"  {format_bytes(line.bytes):>8}  {printable(line_label(line), room)}" for line in lines)
    if run.batch_size and (run.largest_batch is not None or run.trials):
        shown = f"{run.largest_batch}, predicted from the allocations of this batch of {run.batch_size}."
        if run.trials:
            tried = [f"{number} {'fits' if fits else 'does not fit'}" for number, fits in sorted(run.trials.items())]
            largest = max((number for number, fits in run.trials.items() if fits), default="none")
            shown = f"{largest} by dry runs with --vary ({', '.join(tried)})."
        yield _wrapped(f"Largest batch: {shown}")
    if run.fits_on:
        those: dict[str, list[str]] = {"yes": [], "perhaps": [], "no": []}
        for model, fits in run.fits_on.items():
            those[fits].append(model)
        texts = [", ".join(those["yes"]) or "none"]
        texts += [f"{word} on {', '.join(those[fits])}" for fits, word in _NOT_SURE.items() if those[fits]]
        yield _wrapped(f"Fits on: {'; '.join(texts)}.")
    if run.min_free_bytes:
        yield _wrapped(f"Value for --min-free: {run.min_free_bytes / 2**30:.1f}GiB.")
    if run.unknown:
        yield _wrapped(" ".join(run.unknown), 1000)


def _wrapped(text: str, max_length: int = 500) -> str:
    return wrapped(printable(text, max_length))
