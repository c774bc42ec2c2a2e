"""Runs with one known cause each: does the advisor name it?

    python benchmarks/diagnosis_suite.py [--seconds 5] [--output results.json]

Each run of benchmarks/toys.py trains on the CPU and is slowed down in one place. The cases of benchmarks/gpu_cases.py
are measurements written by hand; benchmarks/diagnosis_on_gpu.py trains on a GPU. A run labeled "healthy" must get no
finding and no advice. The advisor is the first or the last callback, at random unless the run sets it. The phases must
explain at least 95% of each run's wall time.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpu_cases import MEASURED
from harness import be_quiet, exit_code, make_parser, print_answer, write_result
from lightning.pytorch import Callback, LightningModule, Trainer
from toys import TOYS, train

from lightning_gpu_tools import GPUUtilizationAdvisor, GPUUtilizationMonitor, load_report
from lightning_gpu_tools.advice.diagnosis import diagnose
from lightning_gpu_tools.trainer.fit_session import FitSession
from lightning_gpu_tools.types import Diagnosis

MIN_EXPLAINED = 0.95


class Explained(Callback):
    """A callback that measures the share of the wall time that the phases explain."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.clock = FitSession.of(trainer, self).clock

    @property
    def share(self) -> float:
        return 1 - self.clock.seconds.get("unexplained", 0.0) / self.clock.wall_s


def in_words(diagnosis: Diagnosis) -> str:
    """Return the cause of the first finding with its kind or name, or the verdict if there is no finding."""
    if not diagnosis.findings:
        return diagnosis.verdict
    first = diagnosis.findings[0]
    detail = first.evidence.get("name", first.evidence.get("kind", ""))
    if first.cause in ("unexplained", "slow_steps", "straggler"):
        detail = first.evidence.get("phase", "")
    return f"{first.cause} {detail}".strip()


def answer(name: str, seconds: float, folder: str) -> dict[str, Any]:
    """Train a toy and return the advisor's answer."""
    toy = TOYS[name]
    last = toy.last if toy.last is not None else random.Random(name).random() < 0.5
    advisor, explained = GPUUtilizationAdvisor(min_seconds=seconds / 4), Explained()
    monitor = [GPUUtilizationMonitor()] if toy.is_killed else []
    with contextlib.suppress(KeyError):  # one toy fails
        train(toy, seconds, folder, [advisor, explained, *monitor], last=last)
    assert advisor.diagnosis is not None
    return {
        "said": in_words(advisor.diagnosis),
        "why": advisor.diagnosis.why,
        "explained": round(explained.share, 4),
        "advisor_last": last,
    }


def answer_in_a_process(name: str, seconds: float, folder: str) -> dict[str, Any]:
    """Train a toy in its own process: Lightning restarts the script for each further rank, or the toy is killed."""
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
    """Diagnose the selected toys, or all toys and all measurements."""
    found: list[dict[str, Any]] = []

    def add(name: str, ran: str, known: str, given: dict[str, Any]) -> None:
        found.append({"training": name, "ran": ran, "known": known, **given, "right": given["said"] == known})
        explained = given["explained"]
        print_answer(found[-1], explained and f"{100 * explained:.1f}% of the wall time explained")

    for name in only or TOYS:
        toy = TOYS[name]
        with tempfile.TemporaryDirectory() as folder:
            ask = answer_in_a_process if toy.needs_a_process else answer
            add(name, "on the CPU", toy.known, ask(name, seconds, folder))
    for name, case in MEASURED.items() if not only else ():
        diagnosis = diagnose(case.run)
        given = {"said": in_words(diagnosis), "why": diagnosis.why, "explained": None}
        add(name, "as measurements", case.known, given)
    return found


def main() -> int:
    parser = make_parser(__doc__, seconds=5.0)
    parser.add_argument("--only", nargs="+", choices=TOYS, default=[], help="only these toys")
    parser.add_argument("--one", choices=TOYS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    be_quiet()
    if args.one:
        given = answer(args.one, args.seconds, str(args.output.parent))
        if os.environ.get("LOCAL_RANK", "0") == "0":
            args.output.write_text(json.dumps(given))
        return 0
    found = rows(args.seconds, args.only)
    right = sum(row["right"] for row in found)
    least = min((row["explained"] for row in found if row["explained"] is not None), default=1.0)
    print(f"{right} of {len(found)} right; at least {100 * least:.1f}% of the wall time explained")
    sums = {"right": right, "of": len(found), "least_explained": least}
    write_result(args.output, "diagnosis_suite", **sums, answers=found)
    return exit_code(found) or int(least < MIN_EXPLAINED)


if __name__ == "__main__":
    sys.exit(main())
