"""Trainings that hang for one known reason each: what is said of them, and how soon? Healthy ones must stay unnamed.

    python benchmarks/stall_suite.py [--stall-after 10] [--output results.json]

Each case of benchmarks/stall_cases.py is real processes on the CPU, several ranks with gloo. One that hangs is ended
when its report names a stall. The healthy ones take longer in one place than a minute or ten minutes, of a package
whose minute lasts 1.5 s.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from machine import describe_machine
from stall_cases import HEALTHY, STALLS, Case

from lightning_gpu_tools import load_report
from lightning_gpu_tools.advice.stalls import Stall
from lightning_gpu_tools.errors import ReportError

_TIMEOUT_S = 120.0
# A cause has to be named so long after the training is said to have stalled, at most.
MAX_LATE_S = 10.0


def start(name: str, case: Case, folder: Path, stall_after: str) -> list[subprocess.Popen[bytes]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = []
    for rank in range(case.ranks):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": case.ranks, "MASTER_PORT": port, "GROUP_RANK": 0}
        env = {name: str(value) for name, value in place.items()} | {"MASTER_ADDR": "127.0.0.1"}
        command = [sys.executable, str(Path(__file__).with_name("stall_cases.py")), name, str(folder), stall_after]
        with (folder / f"output{rank}").open("wb") as output:
            started.append(
                subprocess.Popen(
                    command,
                    env=os.environ | (env | {"TORCHELASTIC_RUN_ID": "suite"} if case.ranks > 1 else {}),
                    stdout=output,
                    stderr=output,
                )
            )
    return started


def stalls_of(folder: Path) -> tuple[Stall, ...]:
    with suppress(ReportError):
        return load_report(folder).stalls
    return ()


def run(name: str, case: Case, stall_after: str) -> dict[str, Any]:
    """Run a case to its end, or until a stall is named, and return what was said."""
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stall-after", type=float, default=10.0, help="stall_after_s (default: %(default)s)")
    parser.add_argument("--only", nargs="+", choices=[*STALLS, *HEALTHY], default=[*STALLS, *HEALTHY])
    parser.add_argument("--output", type=Path, help="also write the result as JSON")
    args = parser.parse_args()
    rows = []
    for name in args.only:
        case = (STALLS | HEALTHY)[name]
        row = run(name, case, "auto" if case.cause is None else str(args.stall_after))
        rows.append(row)
        print(f"{'right' if row['right'] else 'WRONG'}  {name}: {row['said']}; {row.get('why', '')}", flush=True)
        if not row["right"]:
            print(row.get("output", ""))
    of_stalls, of_healthy = (
        [row["right"] for row in rows if (row["known"] is None) == healthy] for healthy in (False, True)
    )
    print(f"{sum(of_stalls)} of {len(of_stalls)} stalls named, {sum(of_healthy)} of {len(of_healthy)} healthy runs not")
    if args.output:
        result = {"benchmark": "stall_suite", "machine": describe_machine(), "stall_after_s": args.stall_after}
        args.output.write_text(json.dumps(result | {"answers": rows}, indent=1) + "\n")
    return 0 if all(row["right"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
