"""What the advisor promises of more workers, and what they bring: trainings on the CPU, measured before and after.

    python benchmarks/ceilings.py [--seconds 10] [--rounds 3] [--only NAME ...] [--output results.json]

Each training runs as it is and with the number of workers that the advisor names, in turns; where it names none, with a
worker for each core, at least one more than it has. The promise is the finding's ceiling, and 1 where more workers are
not advised. It must be within 10 % of what comes. Nothing else may run on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from diagnosis_suite import Explained, in_words
from lightning.pytorch import LightningModule, Trainer
from machine import describe_machine
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader, Dataset
from toys import Stop, compute

from lightning_gpu_tools import Diagnosis, GPUUtilizationAdvisor
from lightning_gpu_tools.host import read_host_budget
from lightning_gpu_tools.trainer.demo import SlowImages, SmallNetwork

sys.path.append(str(Path(__file__).parents[1] / "examples"))

from train import Classifier, PhotoCrops

MAX_ERROR = 0.10


class Batches(Dataset):
    """Batches that keep a core, and then the storage, busy for some milliseconds each."""

    def __init__(self, cpu_ms: float = 0.0, wait_ms: float = 0.0) -> None:
        self.cpu_s, self.wait_s = cpu_ms / 1e3, wait_ms / 1e3

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> torch.Tensor:
        compute(self.cpu_s)
        time.sleep(self.wait_s)
        return torch.ones(64, 64)


class Products(LightningModule):
    """Products of square matrices, on all cores that torch uses."""

    def __init__(self, size: int, depth: int) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(size, size) for _ in range(depth)))
        self.register_buffer("batch", torch.ones(size, size))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.layers(self.batch).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-9)


class Steps(Products):
    """Many small operations one after the other, which keep one core busy."""

    def __init__(self, count: int) -> None:
        super().__init__(16, 1)
        self.count = count

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        hidden = self.batch
        for _ in range(self.count):
            hidden = torch.tanh(self.layers(hidden))
        return hidden.mean()


class Sleeping(Products):
    """A step that leaves the cores alone, as one on a GPU does."""

    def __init__(self, ms: float) -> None:
        super().__init__(16, 1)
        self.seconds = ms / 1e3

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        time.sleep(self.seconds)
        return super().training_step(batch, batch_idx)


class Case(NamedTuple):
    model: Callable[[], LightningModule]
    dataset: Callable[[], Dataset]
    batch_size: int | None = None
    num_workers: int = 0


CASES = {
    "README's example": Case(Classifier, lambda: PhotoCrops((0.0, 0.7), length=1_000_000), 32),
    "the example, small batches": Case(Classifier, lambda: PhotoCrops((0.0, 0.7), length=1_000_000), 8),
    "the example, 1 worker": Case(Classifier, lambda: PhotoCrops((0.0, 0.7), length=1_000_000), 32, 1),
    "the demo": Case(SmallNetwork, SlowImages, 16),
    "computing loader, products": Case(lambda: Products(512, 8), lambda: Batches(cpu_ms=20)),
    "costly loader, products": Case(lambda: Products(512, 8), lambda: Batches(cpu_ms=80)),
    "waiting loader, products": Case(lambda: Products(512, 8), lambda: Batches(wait_ms=20)),
    "mixed loader, products": Case(lambda: Products(512, 8), lambda: Batches(cpu_ms=15, wait_ms=15)),
    "computing loader, small operations": Case(lambda: Steps(200), lambda: Batches(cpu_ms=10)),
    "costly loader, small operations": Case(lambda: Steps(200), lambda: Batches(cpu_ms=60)),
    "waiting loader, small operations": Case(lambda: Steps(200), lambda: Batches(wait_ms=20)),
    "computing loader, sleeping step": Case(lambda: Sleeping(20), lambda: Batches(cpu_ms=30)),
    "costly loader, sleeping step": Case(lambda: Sleeping(20), lambda: Batches(cpu_ms=80)),
    "waiting loader, 1 worker": Case(lambda: Sleeping(10), lambda: Batches(wait_ms=30), num_workers=1),
    "as many workers as cores": Case(
        lambda: Products(512, 8), lambda: Batches(cpu_ms=60), num_workers=math.ceil(read_host_budget().cores)
    ),
}


def train(case: Case, num_workers: int, seconds: float) -> tuple[float, Diagnosis]:
    """Return the seconds of a median steady step, and the diagnosis."""
    advisor, watch = GPUUtilizationAdvisor(), Explained()
    loader = DataLoader(
        case.dataset(), batch_size=case.batch_size, num_workers=num_workers, persistent_workers=num_workers > 0
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            accelerator="cpu", devices=1, max_epochs=-1, logger=False, enable_checkpointing=False,
            callbacks=[Stop(seconds), advisor, watch], enable_progress_bar=False, enable_model_summary=False,
            default_root_dir=folder,
        )  # fmt: skip
        trainer.fit(case.model(), loader)
    if advisor.diagnosis is None or not watch.clock.blocks:
        raise SystemExit(f"No steady steps in {seconds:g} s: the machine is busy, or give it more --seconds.")
    return median(block.step_s for block in watch.clock.blocks), advisor.diagnosis


def promise(case: Case, diagnosis: Diagnosis) -> tuple[int, float]:
    """Return a number of workers to try and how many times as fast training is to be with them."""
    for finding in diagnosis.findings:
        if "advised_num_workers" in finding.evidence:
            return int(finding.evidence["advised_num_workers"]), finding.ceiling
    return max(case.num_workers + 1, math.ceil(read_host_budget().cores)), 1.0


def error(promised: float, reached: float) -> float:
    """Return by how much a promise is too high. Where nothing was promised, nothing can be too high."""
    return promised / max(reached, 1.0 if promised == 1.0 else 0.0) - 1


def compare(name: str, seconds: float, rounds: int) -> dict[str, Any]:
    """Return what the first run promises, and what comes in the median of some rounds."""
    case = CASES[name]
    step_s, diagnosis = train(case, case.num_workers, seconds)
    if diagnosis.verdict == "too_short":
        return compare(name, 2 * seconds, rounds)
    num_workers, promised = promise(case, diagnosis)
    before_s, after_s = [step_s], []
    for _ in range(rounds):
        after_s.append(train(case, num_workers, seconds)[0])
        before_s.append(train(case, case.num_workers, seconds)[0])
    reached = median(before_s) / median(after_s)
    evidence = next((dict(one.evidence) for one in diagnosis.findings if one.cause == "data_loading"), {})
    return {
        "training": name,
        "seconds": seconds,
        "said": in_words(diagnosis),
        "num_workers": [case.num_workers, num_workers],
        "promised": round(promised, 3),
        "reached": round(reached, 3),
        "error": round(error(promised, reached), 3),
        "before_ms": [round(1e3 * one, 1) for one in before_s],
        "after_ms": [round(1e3 * one, 1) for one in after_s],
        "evidence": evidence,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--seconds",
        type=float,
        default=10.0,
        help="of a training; twice that if too short (default: %(default)s)",
    )
    parser.add_argument("--rounds", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), help="these trainings alone")
    parser.add_argument("--output", type=Path, help="also write the result as JSON; other trainings in it stay")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    found = []
    table = Table("training", "the advisor says", "num_workers", "promised", "reached", "too high by", "before ms")
    for name in args.only:
        found.append(row := compare(name, args.seconds, args.rounds))
        before, after = row["num_workers"]
        table.add_row(
            name, row["said"], f"{before} -> {after}", f"{row['promised']:.2f}", f"{row['reached']:.2f}",
            f"{100 * row['error']:.0f} %", f"{median(row['before_ms']):.1f}",
        )  # fmt: skip
        print(json.dumps(row), file=sys.stderr)
    Console(width=150).print(table)
    wrong = [row["training"] for row in found if abs(row["error"]) > MAX_ERROR]
    print(f"{len(found) - len(wrong)} of {len(found)} promises within {100 * MAX_ERROR:.0f} %")
    if args.output:
        kept = json.loads(args.output.read_text())["trainings"] if args.output.exists() else []
        rows = {row["training"]: row for row in [*kept, *found]}
        trainings = [rows[name] for name in CASES if name in rows]
        result = {"benchmark": "ceilings", "machine": describe_machine(), "trainings": trainings}
        args.output.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
