"""The same real trainings diagnosed by this package and by TraceML: who names the cause?

    python benchmarks/diagnosis_peers.py [--seconds 6] [--only a b] [--output results.json]

Needs traceml-ai in the same environment. Each training of benchmarks/toys.py, on the CPU and slowed down in one known
place, runs under ``traceml run``, as TraceML's own docs recommend, once as it is, so that TraceML adds its callback,
and once with that callback in the script; and then with this package's advisor. TraceML "names" a cause if its verdict
has a word for it. It "hints" at a callback, a logger, a checkpoint, validation, the start of an epoch or a transfer
or work of the host inside the step
with RESIDUAL-HEAVY, whose advice lists such work among other things, and at backward and the optimizer with
COMPUTE-BOUND. A training to which it did not attach is left out of the sums.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diagnosis_suite import answer, answer_in_a_process
from machine import describe_machine
from rich.console import Console
from rich.table import Table
from toys import TOYS

# TraceML's verdicts that name a known cause, by the cause or its first word.
NAMES = {
    "data_loading": ("INPUT-BOUND",),
    "straggler data_loading": ("INPUT STRAGGLER", "STRAGGLER"),
    "straggler": ("COMPUTE STRAGGLER", "STRAGGLER"),
    "host_to_device_copy": ("H2D-BOUND",),
    "healthy": ("NO CLEAR BOTTLENECK", "COMPUTE-BOUND", "BALANCED"),
    "too_short": ("NO CLEAR BOTTLENECK", "COMPUTE-BOUND", "BALANCED", "INSUFFICIENT", "no verdict"),
}
HINTED = {
    "RESIDUAL-HEAVY": (
        *("callback", "logging", "checkpoint", "validation", "epoch_start", "host_to_device_copy", "host_work"),
    ),
    "COMPUTE-BOUND": ("backward", "optimizer"),
}
WHO = ("ours", "traceml", "traceml_callback")


def traceml() -> Path | None:
    """Return TraceML's command, if it is installed beside this Python."""
    found = shutil.which("traceml", path=str(Path(sys.executable).parent))
    return None if found is None else Path(found)


def traceml_says(script: str, arguments: Sequence[str], folder: Path, *, processes: int = 1) -> dict[str, Any]:
    """Run a script of this folder under TraceML and return its verdict, with its reason and what it saw."""
    folder.mkdir()
    command = [str(traceml()), "run", str(Path(__file__).with_name(script)), "--nproc-per-node", str(processes)]
    run = subprocess.run(
        [*command, "--run-name", "training", "--args", *arguments],
        cwd=folder, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    summary = folder / "logs" / "training" / "final_summary.json"
    found = json.loads(summary.read_text()) if summary.exists() else {"primary_diagnosis": {}, "step_time": {}}
    primary, average = found["primary_diagnosis"], (found["step_time"].get("global") or {}).get("average") or {}
    return {
        "verdict": primary.get("status") or "no verdict",
        "why": primary.get("summary"),
        "steps": (primary.get("evidence") or {}).get("steps_analyzed"),
        "forward_ms": average.get("forward_ms"),
        "attached": "callback added automatically" in re.sub(r"\s+", " ", run.stdout + run.stderr),
        "exit_code": run.returncode,
    }


def judge(known: str, verdict: str) -> str:
    """Return whether TraceML's verdict names the known cause, hints at it, is another one, none, or a false alarm."""
    cause = known.split()[0]
    if verdict.startswith(NAMES.get(known, NAMES.get(cause, ()))):
        return "names"
    if verdict.startswith(("INSUFFICIENT", "no verdict")):
        return "no verdict"
    if cause in ("healthy", "too_short"):
        return "false alarm"
    return "hints" if cause in HINTED.get(verdict, ()) else "misses"


def judge_ours(known: str, said: str) -> str:
    """Return the same of this package: as TraceML's, its answer need not tell one kind of slow loading from another."""
    depth = 1 if known.startswith("data_loading") else None
    if known.split()[:depth] == said.split()[:depth]:
        return "names"
    return "false alarm" if known in ("healthy", "too_short") else "misses"


def rows(names: list[str], seconds: float) -> list[dict[str, Any]]:
    found = []
    for name in names:
        toy = TOYS[name]
        with tempfile.TemporaryDirectory() as folder:
            arguments, processes = [name, "--seconds", str(seconds)], toy.options.get("devices", 1)
            theirs = traceml_says("toys.py", arguments, Path(folder, "zero-code"), processes=processes)
            arguments.append("--traceml")
            by_callback = traceml_says("toys.py", arguments, Path(folder, "callback"), processes=processes)
            by_callback["attached"] = True
            ask = answer_in_a_process if toy.needs_a_process else answer
            ours = ask(name, seconds, folder)["said"]
        row = {"training": name, "known": toy.known, "ours": ours, "traceml": theirs, "traceml_callback": by_callback}
        row["ours_is"] = judge_ours(toy.known, ours)
        for who in ("traceml", "traceml_callback"):
            row[f"{who}_is"] = judge(toy.known, row[who]["verdict"]) if row[who]["attached"] else "did not attach"
        print(
            f"{name}: {toy.known}; ours: {ours}; TraceML: {theirs['verdict']} ({row['traceml_is']}), "
            f"by its callback {by_callback['verdict']} ({row['traceml_callback_is']})",
            flush=True,
        )
        found.append(row)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=6.0, help="of each training (default: %(default)s)")
    parser.add_argument("--only", nargs="+", choices=TOYS, default=list(TOYS), help="these trainings alone")
    parser.add_argument("--output", type=Path, help="also write the result as JSON")
    args = parser.parse_args()
    if traceml() is None:
        parser.error("TraceML is not installed beside this Python: pip install traceml-ai")
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    load = os.getloadavg()[0]
    found = rows(args.only, args.seconds)

    table = Table("training", "known cause", "this package", "TraceML", "by its callback", "TraceML's reason")
    for row in found:
        verdicts = [f"{row[who]['verdict']} ({row[f'{who}_is']})" for who in ("traceml", "traceml_callback")]
        ours = f"{row['ours']} ({row['ours_is']})"
        table.add_row(row["training"], row["known"], ours, *verdicts, row["traceml"]["why"])
    Console(width=180).print(table)
    both = [row for row in found if row["traceml_is"] != "did not attach"]
    sums = {who: dict(Counter(row[f"{who}_is"] for row in both)) for who in WHO}
    print(f"Of {len(both)} trainings that both ran on: {sums}")
    if args.output:
        versions = {"traceml-ai": importlib.metadata.version("traceml-ai")}
        result = {
            "benchmark": "diagnosis_peers",
            "machine": {**describe_machine(), **versions},
            "load_average_before": round(load, 2),
            "seconds": args.seconds,
            "both": len(both),
            **sums,
            "trainings": found,
        }
        args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
