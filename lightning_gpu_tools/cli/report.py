"""The command ``report``."""

import argparse
import importlib.util
import math
import os
import sys
from dataclasses import asdict

from lightning_gpu_tools.cli.pick import percent
from lightning_gpu_tools.errors import ReportError
from lightning_gpu_tools.reports.comparison import compare, render_comparison
from lightning_gpu_tools.reports.page import render_page, svg_of
from lightning_gpu_tools.reports.report import FILE_NAME, as_json, find_report, load_report, to_json
from lightning_gpu_tools.reports.text import fenced, render_text
from lightning_gpu_tools.units import printable_path

_EXIT_CODES = {"faster": 0, "same": 0, "slower": 1, "not_comparable": 3}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments and the help."""
    parser.description = (
        "Print the report that GPUUtilizationMonitor wrote during a run. The run may still be running, or may have "
        "been killed. With --against, compare the run with another one, without the warm-up steps. Works without a GPU."
    )
    parser.epilog = (
        "The two runs may differ in settings that OLD advised to change: the comparison then measures the gain. "
        "Exit code: 0 printed, or within the limit; 1 slower than the limit and by more than the runs' noise; 2 wrong "
        "usage; 3 the runs cannot be compared, or a file is not a report. Without --against: 1 FILE is not a report. "
        "To explain a cause: lightning-gpu-tools explain CAUSE."
    )
    parser.add_argument(
        "file",
        metavar="FILE",
        nargs="?",
        default=".",
        help="gpu_report.json, its folder, or a folder of runs, whose newest report is used (default: this folder)",
    )
    parser.add_argument("--against", metavar="OLD", help="report of the run to compare with, or its folder")
    parser.add_argument(
        "--max-slowdown",
        metavar="PERCENT",
        type=percent,
        help="allowed increase of the step time over OLD, e.g. 5%% (default: 0%%)",
    )
    parser.add_argument(
        "--full",
        action="store_true",
        help="list every phase, GPU, stall, process and sampled source line",
    )
    parser.add_argument(
        "--format",
        choices=["text", "markdown", "json", "html"],
        default="text",
        help="output format; redirect html, for one report, to a file and open it in a browser (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Print the report or the comparison."""
    if args.against is not None and (args.full or args.format == "html"):
        args.parser.error("--full and --format html work only for one report")
    if args.max_slowdown is not None and args.against is None:
        args.parser.error("--max-slowdown needs --against OLD")
    max_slowdown = args.max_slowdown or 0.0
    if not 0 <= max_slowdown < math.inf:
        args.parser.error(f"--max-slowdown must be at least 0%, got {max_slowdown:g}%")
    if args.against is None:
        report = load_report(_found(args.file))
        if args.format == "html":
            print(render_page(report, svg_of(report) if importlib.util.find_spec("matplotlib") is not None else ""))
        elif args.format == "json":
            print(to_json(report))
        else:
            print(_shown(render_text(report, full=args.full), args.format))
        return 0
    try:
        new_file, old_file = _found(args.file), _found(args.against)
        if os.path.realpath(new_file) == os.path.realpath(old_file):
            raise ReportError(
                f"the newest report in {printable_path(args.file)} is OLD itself. Train again, or pass the new report."
            )
        new, old = load_report(new_file), load_report(old_file)
    except ReportError as error:
        print(f"lightning-gpu-tools: cannot compare: {error}", file=sys.stderr)
        return 3
    comparison = compare(new, old, max_slowdown / 100)
    print(as_json(asdict(comparison)) if args.format == "json" else _shown(render_comparison(comparison), args.format))
    return _EXIT_CODES[comparison.verdict]


def _found(path: str) -> str:
    file = find_report(path)
    if file not in (path, os.path.join(path, FILE_NAME)):
        shown = printable_path(file.removeprefix("./"))
        print(f"Newest report in {printable_path(path)}: {shown}", file=sys.stderr)
    return file


def _shown(text: str, form: str) -> str:
    return fenced(text) if form == "markdown" else text
