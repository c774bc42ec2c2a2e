"""``lightning-gpu-tools report``: print a training run's report again."""

from __future__ import annotations

import argparse


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "report",
        help="print the report of a training run again",
        description="Print the report that GPUUtilizationMonitor wrote at the end of a training run.",
        epilog="Exit code: 0 printed, 1 the file is no report, 2 wrong usage.",
    )
    parser.add_argument("file", metavar="FILE", help="gpu_report.json, or the folder that holds it")
    parser.add_argument("--format", choices=["text", "json"], default="text", help="default: %(default)s")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the report."""
    from lightning_gpu_tools.report import load_report, to_json
    from lightning_gpu_tools.report_text import render_text

    report = load_report(args.file)
    print(render_text(report) if args.format == "text" else to_json(report), end="\n" if args.format == "text" else "")
    return 0
