"""Trainings with one known cause each: what does the advisor say of them?

    python benchmarks/diagnosis_suite.py [--seconds 5] [--output results.json]

Each of benchmarks/toys.py is real, on the CPU, and slowed down in one real place. Those of benchmarks/gpu_cases.py are
measurements; benchmarks/diagnosis_on_gpu.py trains on a GPU. "healthy" means that nothing is to be blamed and nothing
may be advised. The advisor comes first or last among the callbacks, at random where a toy does not say. At least 95 %
of each training's wall time must be explained.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import random
import signal
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpu_cases import MEASURED
from lightning.pytorch import Callback, LightningModule, Trainer
from machine import describe_machine
from rich.console import Console
from rich.table import Table
from toys import TOYS, train

from lightning_gpu_tools import GPUUtilizationAdvisor, GPUUtilizationMonitor, load_report
from lightning_gpu_tools.advice.diagnosis import diagnose
from lightning_gpu_tools.trainer.measuring_callback import FitSession
from lightning_gpu_tools.types import Diagnosis

MIN_EXPLAINED = 0.95


class Explained(Callback):
    """Holds the step clock of a training, to see how much of the wall time it explains."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.clock = FitSession.of(trainer, self).clock

    @property
    def share(self) -> float:
        return 1 - self.clock.seconds.get("unexplained", 0.0) / self.clock.wall_s


def in_words(diagnosis: Diagnosis) -> str:
    """Return the cause that is named first, with its kind or name; the verdict if there is none."""
    if not diagnosis.findings:
        return diagnosis.verdict
    first = diagnosis.findings[0]
    detail = first.evidence.get("name", first.evidence.get("kind", first.evidence.get("phase", "")))
    return f"{first.cause} {detail}".strip()


def answer(name: str, seconds: float, folder: str) -> dict[str, Any]:
    """Train a toy and return what the advisor says."""
    toy = TOYS[name]
    last = toy.last if toy.last is not None else random.Random(name).random() < 0.5
    advisor, explained = GPUUtilizationAdvisor(min_seconds=seconds / 4), Explained()
    monitor = [GPUUtilizationMonitor()] if toy.is_killed else []
    with contextlib.suppress(KeyError):  # the toy that fails
        train(toy, seconds, folder, [advisor, explained, *monitor], last=last)
    assert advisor.diagnosis is not None
    return {
        "said": in_words(advisor.diagnosis),
        "why": advisor.diagnosis.why,
        "explained": round(explained.share, 4),
        "advisor_last": last,
    }


def answer_in_a_process(name: str, seconds: float, folder: str) -> dict[str, Any]:
    """Do the same in a process of its own: Lightning starts it once more for each further rank, or it is killed."""
    file = Path(folder) / "answer.json"
    command = [sys.executable, __file__, "--one", name, "--seconds", str(seconds), "--output", str(file)]
    killed = TOYS[name].is_killed
    ended = subprocess.run(command, check=not killed, capture_output=True, timeout=120)
    if not killed:
        return json.loads(file.read_text())
    assert ended.returncode == -signal.SIGKILL, ended.stderr.decode()
    report = load_report(folder)
    assert report.outcome.startswith("cut off"), report.outcome
    explained = 1 - report.phase_s.get("unexplained", 0.0) / report.wall_s
    return {"said": in_words(report.diagnosis), "why": report.diagnosis.why, "explained": round(explained, 4)}


def rows(seconds: float, only: Sequence[str]) -> list[dict[str, Any]]:
    """Run everything."""
    found = []
    for name, toy in TOYS.items():
        if only and name not in only:
            continue
        with tempfile.TemporaryDirectory() as folder:
            ask = answer_in_a_process if toy.needs_a_process else answer
            found.append({"training": name, "ran": "on the CPU", "known": toy.known, **ask(name, seconds, folder)})
    if not only:
        for name, case in MEASURED.items():
            diagnosis = diagnose(case.run)
            said = {"said": in_words(diagnosis), "why": diagnosis.why, "explained": None}
            found.append({"training": name, "ran": "as measurements", "known": case.known, **said})
    for row in found:
        row["right"] = row["said"] == row["known"]
    return found


def confusion(found: Sequence[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Return how often each known cause was given which name."""
    pairs = Counter((row["known"].split()[0], row["said"].split()[0]) for row in found)
    matrix: dict[str, dict[str, int]] = {}
    for (known, said), count in sorted(pairs.items()):
        matrix.setdefault(known, {})[said] = count
    return matrix


def as_table(matrix: dict[str, dict[str, int]]) -> Table:
    """Return the matrix with numbered columns, one for each name."""
    names = sorted({*matrix, *(said for row in matrix.values() for said in row)})
    table = Table("known cause", title="Confusion matrix: known cause by the number of what was said first", box=None)
    for number in range(len(names)):
        table.add_column(str(number + 1), justify="right", min_width=2)
    for number, known in enumerate(names, 1):
        row = matrix.get(known, {})
        table.add_row(f"{number:2} {known}", *(str(row.get(said, ".")) for said in names))
    return table


def show(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Print everything and return the sums."""
    table = Table("training", "ran", "known cause", "the advisor says", "explained")
    for row in found:
        explained = "" if row["explained"] is None else f"{100 * row['explained']:.1f} %"
        wrong = "" if row["right"] else " (wrong)"
        table.add_row(row["training"], row["ran"], row["known"], row["said"] + wrong, explained)
    sums: dict[str, Any] = {"right": sum(row["right"] for row in found), "of": len(found)}
    least = min((row["explained"] for row in found if row["explained"] is not None), default=1.0)
    sums["least_explained"] = least
    matrix = sums["confusion"] = confusion(found)
    Console(width=160).print(table, as_table(matrix))
    print(f"{sums['right']} of {sums['of']} right; at least {100 * least:.1f} % of the wall time explained")
    return sums


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each training (default: %(default)s)")
    parser.add_argument("--only", nargs="+", choices=TOYS, default=[], help="these toys alone")
    parser.add_argument("--output", type=Path, help="also write the result as JSON")
    parser.add_argument("--one", choices=TOYS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    if args.one:
        said = answer(args.one, args.seconds, str(args.output.parent))
        if os.environ.get("LOCAL_RANK", "0") == "0":
            args.output.write_text(json.dumps(said))
        return 0
    found = rows(args.seconds, args.only)
    sums = show(found)
    if args.output:
        result = {"benchmark": "diagnosis_suite", "machine": describe_machine(), **sums, "answers": found}
        args.output.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if sums["right"] == sums["of"] and sums["least_explained"] >= MIN_EXPLAINED else 1


if __name__ == "__main__":
    sys.exit(main())
