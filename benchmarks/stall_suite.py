"""Runs that hang for one known reason each: is the cause reported, and how soon? Healthy runs must get no warning.

    python benchmarks/stall_suite.py [--stall-after 10] [--output results.json]

Each case of benchmarks/stall_cases.py is one or more real processes on the CPU, connected by gloo. A hanging case is
killed once its report names a stall. Each healthy case exceeds one of the package's thresholds, which are shortened
from one and ten minutes to 1.5 and 6 seconds.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from harness import exit_code, free_port, make_parser, print_answer, rank_environment, write_result
from stall_cases import HEALTHY, STALLS, Case

from lightning_gpu_tools import load_report
from lightning_gpu_tools.advice.stalls import Stall
from lightning_gpu_tools.errors import ReportError

_TIMEOUT_S = 120.0
MAX_LATE_S = 10.0  # after ``stall_after_s``, a report must name the cause within this time


def start(name: str, case: Case, folder: Path, stall_after: str) -> list[subprocess.Popen[bytes]]:
    """Start all ranks of a case, as torchrun would."""
    port = free_port()
    command = [sys.executable, str(Path(__file__).with_name("stall_cases.py")), name, str(folder), stall_after]
    started = []
    for rank in range(case.ranks):
        job = rank_environment(rank, case.ranks, port) | {"TORCHELASTIC_RUN_ID": "suite"} if case.ranks > 1 else {}
        with (folder / f"output{rank}").open("wb") as output:
            started.append(subprocess.Popen(command, env=os.environ | job, stdout=output, stderr=output))
    return started


def stalls_of(folder: Path) -> tuple[Stall, ...]:
    with suppress(ReportError):
        return load_report(folder).stalls
    return ()


def run(name: str, case: Case, stall_after: str) -> dict[str, Any]:
    """Run a case until it ends or a stall is reported, and return the answer."""
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        processes = start(name, case, folder, stall_after)
        until_s = time.monotonic() + _TIMEOUT_S
        while time.monotonic() < until_s and any(process.poll() is None for process in processes):
            if case.cause is not None and stalls_of(folder):
                break
            time.sleep(0.1)
        has_ended = all(process.poll() == 0 for process in processes)
        for process in processes:
            if process.poll() is None:
                for one in [*psutil.Process(process.pid).children(recursive=True), process]:
                    one.kill()
            process.wait()
        outputs = [(folder / f"output{rank}").read_text() for rank in range(case.ranks)]
        stalls = stalls_of(folder)
    row: dict[str, Any] = {"training": name, "known": case.cause, "ranks": case.ranks}
    if case.cause is None:
        warned = sum(output.count("StalledTrainingWarning") for output in outputs)
        return row | {"said": stalls[0].cause if stalls else None, "right": has_ended and not stalls and not warned}
    if not stalls:
        return row | {"said": None, "right": False, "output": outputs[0][-2000:]}
    first = stalls[0]
    late_s = first.lasted_s - float(stall_after)
    is_right = first.cause == case.cause and first.rank == case.rank and case.words in first.why
    why = first.why.replace(f"{Path(__file__).parents[1]}/", "")
    said = {"said": first.cause, "rank": first.rank, "why": why, "next": first.next_step}
    return row | said | {"late_s": round(late_s, 2), "right": is_right and late_s <= MAX_LATE_S}


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--stall-after", type=float, default=10.0, help="stall_after_s (default: %(default)s)")
    parser.add_argument("--only", nargs="+", choices=[*STALLS, *HEALTHY], default=[*STALLS, *HEALTHY])
    args = parser.parse_args()
    rows = []
    for name in args.only:
        case = (STALLS | HEALTHY)[name]
        row = run(name, case, "auto" if case.cause is None else str(args.stall_after))
        rows.append(row)
        print_answer(row, row.get("why"), row.get("output"))
    write_result(args.output, "stall_suite", stall_after_s=args.stall_after, answers=rows)
    return exit_code(rows)


if __name__ == "__main__":
    sys.exit(main())
