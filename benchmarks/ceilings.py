"""Whether the range that the advisor predicts for more workers holds what they bring: trainings on the CPU.

    python benchmarks/ceilings.py [--runs 3] [--only NAME ...] [--output results.json]

Each loader is paired with steps that leave the cores alone, as those on a GPU do. Some are also paired with steps that
compute on the cores that the workers need: how much both then lose is not known before it is tried, so these ranges are
wide. In a run, the training is measured as it is, and at once with the number of workers that its report names. The
range must hold what is reached; 2 runs of 36 may miss it. Nothing else may run on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
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
from toys import compute

from lightning_gpu_tools import GPUUtilizationAdvisor
from lightning_gpu_tools.training.run_measurements import without_warm_up
from lightning_gpu_tools.types import Diagnosis

sys.path.append(str(Path(__file__).parents[1] / "examples"))

from train import Classifier, PhotoCrops

MIN_HELD = 34 / 36
MAX_WIDTH = 1.25


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
    threads: int = torch.get_num_threads()


LOADERS: dict[str, tuple[Callable[[], Dataset], int | None]] = {
    "computes 10 ms": (lambda: Batches(cpu_ms=10), None),
    "computes 35 ms": (lambda: Batches(cpu_ms=35), None),
    "waits 12 ms": (lambda: Batches(wait_ms=12), None),
    "waits 30 ms": (lambda: Batches(wait_ms=30), None),
    "computes 12 ms, waits 12 ms": (lambda: Batches(cpu_ms=12, wait_ms=12), None),
    "photographs": (lambda: PhotoCrops((0.0, 0.7), length=1_000_000), 8),
}
LIGHT: dict[str, Callable[[], LightningModule]] = {
    "15 ms": lambda: Sleeping(15),
    "40 ms": lambda: Sleeping(40),
}
SHORT: dict[str, Callable[[], LightningModule]] = {"5 ms": lambda: Sleeping(5)}
COMPUTING: dict[str, Callable[[], LightningModule]] = {
    "computes on one core": lambda: Steps(150),
    "computes on all cores": lambda: Products(512, 3),
}
WITH_COMPUTING = ("computes 35 ms", "waits 30 ms", "photographs")


def _pairs(steps: dict[str, Callable[[], LightningModule]], loaders: Iterable[str]) -> dict[str, Case]:
    names = itertools.product(loaders, steps)
    return {f"loader {loader}; step {step}": Case(steps[step], *LOADERS[loader]) for loader, step in names}


AS_ON_A_GPU = {
    **_pairs(LIGHT, LOADERS),
    **_pairs(SHORT, ("computes 10 ms", "waits 12 ms")),
    "examples/train.py": Case(Classifier, lambda: PhotoCrops((0.0, 0.7), length=1_000_000), 32, 1),
}
CASES = AS_ON_A_GPU | _pairs(COMPUTING, WITH_COMPUTING)
TRAINED_STEPS = 90  # the first 20 do not count


def train(case: Case, num_workers: int) -> tuple[float, Diagnosis]:
    """Return the seconds of a median steady step, and the diagnosis."""
    torch.set_num_threads(case.threads)
    advisor, watch = GPUUtilizationAdvisor(min_seconds=0.0), Explained()
    loader = DataLoader(
        case.dataset(), batch_size=case.batch_size, num_workers=num_workers, persistent_workers=num_workers > 0
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            accelerator="cpu", devices=1, max_steps=TRAINED_STEPS, logger=False, enable_checkpointing=False,
            callbacks=[advisor, watch], enable_progress_bar=False, enable_model_summary=False,
            default_root_dir=folder,
        )  # fmt: skip
        trainer.fit(case.model(), loader)
    assert advisor.diagnosis is not None
    return median(block.step_s for block in without_warm_up(watch.clock.blocks)), advisor.diagnosis


def run(case: Case) -> dict[str, Any]:
    """Return what a training predicts and what comes with as many workers."""
    before_s, diagnosis = train(case, 0)
    evidence = next((dict(one.evidence) for one in diagnosis.findings if "speedup" in one.evidence), None)
    if evidence is None:
        raise SystemExit(f"The report predicts nothing: {diagnosis.verdict}. {diagnosis.why}")
    num_workers = int(evidence["predicted_num_workers"])
    after_s, _ = train(case, num_workers)
    return {
        "said": in_words(diagnosis),
        "num_workers": num_workers,
        "predicted": [round(float(evidence[name]), 3) for name in ("speedup_lower", "speedup", "speedup_upper")],
        "reached": round(before_s / after_s, 3),
        "before_ms": round(1e3 * before_s, 2),
        "after_ms": round(1e3 * after_s, 2),
        "evidence": {name: evidence[name] for name in EVIDENCE if name in evidence},
    }


EVIDENCE = ("wait_ms_per_step", "load_cpu_ms_per_batch", "step_cpu_ms")


def holds(one: dict[str, Any]) -> bool:
    """Return whether the range holds what was reached."""
    lower, _, upper = one["predicted"]
    return bool(lower <= one["reached"] <= upper)


def width(runs: list[dict[str, Any]]) -> float:
    """Return how many times the lower end the upper end of a range is, in the median of some runs."""
    return median(one["predicted"][2] / one["predicted"][0] for one in runs)


def verdict(pairs: dict[str, list[dict[str, Any]]]) -> str:
    """Return how often ranges held, and how wide they are, in a sentence."""
    runs = [one for of_pair in pairs.values() for one in of_pair]
    narrow = sum(width(of_pair) <= MAX_WIDTH for of_pair in pairs.values())
    return (
        f"the range held what was reached in {sum(map(holds, runs))} of {len(runs)} runs, and was no wider than "
        f"{MAX_WIDTH:g}x in {narrow} of {len(pairs)} pairs."
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="of each pair (default: %(default)s)")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), help="these pairs alone")
    parser.add_argument("--output", type=Path, help="also write the result as JSON; other pairs in it stay")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    pairs = json.loads(args.output.read_text())["pairs"] if args.output and args.output.exists() else {}
    table = Table("training", "the advisor says", "workers", "predicted", "reached", "before, after ms")
    for name in args.only:
        pairs[name] = [run(CASES[name]) for _ in range(args.runs)]
        for one in pairs[name]:
            lower, expected, upper = one["predicted"]
            table.add_row(
                name, one["said"], str(one["num_workers"]), f"{expected:.2f} ({lower:.2f} to {upper:.2f})",
                f"{one['reached']:.2f}{'' if holds(one) else ' !'}", f"{one['before_ms']}, {one['after_ms']}",
            )  # fmt: skip
        if args.output:
            ordered = {name: pairs[name] for name in CASES if name in pairs}
            light = [name for name in ordered if name in AS_ON_A_GPU]
            result = {"benchmark": "ceilings", "machine": describe_machine(), "as_on_a_gpu": light, "pairs": ordered}
            args.output.write_text(json.dumps(result, indent=1) + "\n")
    Console(width=150).print(table)
    print(f"With steps as on a GPU: {verdict({name: pairs[name] for name in args.only if name in AS_ON_A_GPU})}")
    print(f"With steps that compute: {verdict({name: pairs[name] for name in args.only if name not in AS_ON_A_GPU})}")
    runs = [one for name in args.only for one in pairs[name]]
    held = sum(map(holds, runs))
    return 0 if held >= MIN_HELD * len(runs) else 1


if __name__ == "__main__":
    sys.exit(main())
