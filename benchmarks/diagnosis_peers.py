"""The same runs diagnosed by this package and by TraceML: does each name the cause?

    python benchmarks/diagnosis_peers.py [--seconds 6] [--only a b] [--output results.json]

Requires traceml-ai in the same environment. Each run of benchmarks/toys.py trains on the CPU three times: under
``traceml run``, as TraceML's docs recommend, where TraceML adds its callback itself; under ``traceml run`` with that
callback in the script; and with this package's advisor.

TraceML "names" a cause if its verdict has a word for it. RESIDUAL-HEAVY counts as a hint at a callback, a logger, a
checkpoint, validation, the start of an epoch, a transfer, or host work inside the step, because its advice lists such
work. The sums leave out runs to which TraceML did not attach.
"""

import json
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diagnosis_suite import answer, answer_in_a_process
from harness import be_quiet, load_average, make_parser, traceml, write_result
from toys import TOYS

# TraceML's verdicts that name a cause, by the expected answer or its first word.
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
}
WHO = ("ours", "traceml", "traceml_callback")


def traceml_says(script: str, arguments: Sequence[str], folder: Path, *, processes: int = 1) -> dict[str, Any]:
    """Run a script of this folder under TraceML, and return TraceML's verdict and measurements."""
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
    """Return how TraceML's verdict compares with the expected answer, as one of the table's outcomes."""
    cause = known.split()[0]
    if verdict.startswith(NAMES.get(known, NAMES.get(cause, ()))):
        return "names"
    if verdict.startswith(("INSUFFICIENT", "no verdict")):
        return "no verdict"
    if cause in ("healthy", "too_short"):
        return "false alarm"
    return "hints" if cause in HINTED.get(verdict, ()) else "misses"


def judge_ours(known: str, said: str) -> str:
    """Return the same for this package. As for TraceML, the kind of slow data loading does not count."""
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
            f"{name}: expected {toy.known}; this package: {ours}; TraceML: {theirs['verdict']} ({row['traceml_is']}), "
            f"with its callback: {by_callback['verdict']} ({row['traceml_callback_is']}). {theirs['why']}",
            flush=True,
        )
        found.append(row)
    return found


def main() -> None:
    parser = make_parser(__doc__, seconds=6.0)
    parser.add_argument("--only", nargs="+", choices=TOYS, default=list(TOYS), help="only these runs")
    args = parser.parse_args()
    if traceml() is None:
        parser.error("TraceML is not installed in this Python environment. Run `pip install traceml-ai`.")
    be_quiet()
    load = load_average()
    found = rows(args.only, args.seconds)
    both = [row for row in found if row["traceml_is"] != "did not attach"]
    sums = {who: dict(Counter(row[f"{who}_is"] for row in both)) for who in WHO}
    print(f"{len(both)} runs to which both attached: {sums}")
    more = {"load_average_before": load, "seconds": args.seconds, "both": len(both)}
    write_result(args.output, "diagnosis_peers", "traceml-ai", **more, **sums, trainings=found)


if __name__ == "__main__":
    main()
