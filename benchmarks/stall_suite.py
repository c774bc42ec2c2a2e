"""Runs that hang for one known reason each: is the cause reported, and how soon? Healthy runs must get no warning.

    python benchmarks/stall_suite.py [--stall-after 10] [--output results.json]

Each case of benchmarks/stall_cases.py is one or more real processes on the CPU, connected by gloo. A hanging case is
killed once its report names a stall. Each healthy case exceeds one of the package's thresholds, which are shortened
from 60 and 450 seconds to 1.5 and 6 seconds.
"""

import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from harness import TESTS, exit_code, make_parser, print_answer, write_result
from stall_cases import HEALTHY, STALLS, StallAfter, scale

sys.path.append(str(TESTS))

from rank_processes import start_ranks

from lightning_gpu_tools import load_report
from lightning_gpu_tools.advice.stalls import Stall
from lightning_gpu_tools.errors import ReportError

CASES = STALLS | HEALTHY
_TIMEOUT_S = 120.0
MAX_LATE_S = 10.0  # after ``stall_after_s``, a report must name the cause within this time


def train(folder: Path, rank: int, name: str, stall_after_s: StallAfter) -> None:
    """Train one rank of a case."""
    if stall_after_s == "auto":
        scale()
    CASES[name].train(folder, rank, stall_after_s)


def stalls_of(folder: Path) -> tuple[Stall, ...]:
    with suppress(ReportError):
        return load_report(folder).stalls
    return ()


def run(name: str, stall_after_s: float) -> dict[str, Any]:
    """Run a case until it ends or a stall is reported, and return the answer."""
    case = CASES[name]
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        options = {"name": name, "stall_after_s": "auto" if case.cause is None else stall_after_s}
        processes = start_ranks(folder, train, ranks=case.ranks, options=options)
        until_s = time.monotonic() + _TIMEOUT_S
        while time.monotonic() < until_s and any(process.is_alive() for process in processes):
            if case.cause is not None and stalls_of(folder):
                break
            time.sleep(0.1)
        has_ended = all(process.exitcode == 0 for process in processes)
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                for one in psutil.Process(process.pid).children(recursive=True):
                    one.kill()
            process.kill()
            process.join()
        outputs = [(folder / f"stderr{rank}").read_text() for rank in range(case.ranks)]
        stalls = stalls_of(folder)
    row: dict[str, Any] = {"training": name, "known": case.cause, "ranks": case.ranks}
    if case.cause is None:
        warned = sum(output.count("StalledTrainingWarning") for output in outputs)
        return row | {"said": stalls[0].cause if stalls else None, "right": has_ended and not stalls and not warned}
    if not stalls:
        return row | {"said": None, "right": False, "output": outputs[0][-2000:]}
    first = stalls[0]
    late_s = first.lasted_s - stall_after_s
    is_right = first.cause == case.cause and first.rank == case.rank and case.words in first.why
    why = first.why.replace(f"{Path(__file__).parents[1]}/", "")
    given = {"said": first.cause, "rank": first.rank, "why": why, "next": first.next_step}
    return row | given | {"late_s": round(late_s, 2), "right": is_right and late_s <= MAX_LATE_S}


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--stall-after", type=float, default=10.0, help="stall_after_s (default: %(default)s)")
    parser.add_argument("--only", nargs="+", choices=CASES, default=[*CASES], help="only these cases")
    args = parser.parse_args()
    rows = []
    for name in args.only:
        rows.append(run(name, args.stall_after))
        print_answer(rows[-1], rows[-1].get("why"), rows[-1].get("output"))
    write_result(args.output, "stall_suite", stall_after_s=args.stall_after, answers=rows)
    return exit_code(rows)


if __name__ == "__main__":
    sys.exit(main())
