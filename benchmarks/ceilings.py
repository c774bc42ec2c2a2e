"""Predicted and measured speedups of more DataLoader workers: does the advisor's range contain the measured one?

    python benchmarks/ceilings.py [--runs 3] [--only NAME ...] [--output results.json]

Each loader trains with steps that leave the CPU cores idle, as steps on a GPU do. Some also train with steps that
compute on the cores that the workers need; their ranges are wide, because how much both slow down is unknown before a
trial. Each training runs without workers, and immediately again with the number of workers that its report names. At
most 2 of 36 runs may miss the range. No other program may run on the machine.
"""

import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from diagnosis_suite import Explained, in_words
from harness import be_quiet, make_parser, quiet_trainer, write_result
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader, Dataset
from toys import TrainedBySGD, compute

from lightning_gpu_tools import GPUUtilizationAdvisor
from lightning_gpu_tools.types import Diagnosis

sys.path.append(str(Path(__file__).parents[1] / "examples"))

from train import Classifier, PhotoCrops

MIN_HELD = 34 / 36


class Batches(Dataset):
    """A dataset whose batches compute, and then wait for storage, for some milliseconds each."""

    def __init__(self, cpu_ms: float = 0.0, wait_ms: float = 0.0) -> None:
        self.cpu_s, self.wait_s = cpu_ms / 1e3, wait_ms / 1e3

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> torch.Tensor:
        compute(self.cpu_s)
        time.sleep(self.wait_s)
        return torch.ones(64, 64)


class Products(TrainedBySGD):
    """Products of square matrices, on all of torch's cores."""

    def __init__(self, size: int, depth: int) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(size, size) for _ in range(depth)))
        self.register_buffer("batch", torch.ones(size, size))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.layers(self.batch).mean()


class Steps(Products):
    """A sequence of small operations, which keep one core busy."""

    def __init__(self, count: int) -> None:
        super().__init__(16, 1)
        self.count = count

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        hidden = self.batch
        for _ in range(self.count):
            hidden = torch.tanh(self.layers(hidden))
        return hidden.mean()


class Sleeping(Products):
    """A step that leaves the cores idle, as a step on a GPU does."""

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
TRAINED_STEPS = 90  # including 20 of warm-up


def train(case: Case, num_workers: int) -> tuple[float, Diagnosis]:
    """Return the median time of a steady step in seconds, and the diagnosis."""
    torch.set_num_threads(case.threads)
    advisor, explained = GPUUtilizationAdvisor(min_seconds=0.0), Explained()
    loader = DataLoader(
        case.dataset(), batch_size=case.batch_size, num_workers=num_workers, persistent_workers=num_workers > 0
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = quiet_trainer(folder, max_steps=TRAINED_STEPS, callbacks=[advisor, explained])
        trainer.fit(case.model(), loader)
    assert advisor.diagnosis is not None
    return median(block.step_s for block in explained.clock.blocks), advisor.diagnosis


def run(case: Case) -> dict[str, Any]:
    """Return the speedup predicted by a run without workers, and the one measured with the predicted number."""
    before_s, diagnosis = train(case, 0)
    evidence = next((dict(one.evidence) for one in diagnosis.findings if "speedup" in one.evidence), None)
    if evidence is None:
        raise SystemExit(f"The report has no prediction: {diagnosis.verdict}. {diagnosis.why}")
    num_workers = int(evidence["predicted_num_workers"])
    after_s, _ = train(case, num_workers)
    return {
        "said": in_words(diagnosis),
        "num_workers": num_workers,
        "predicted": [round(float(evidence[name]), 3) for name in ("speedup_lower", "speedup", "speedup_upper")],
        "reached": round(before_s / after_s, 3),
        "before_ms": round(1e3 * before_s, 2),
        "after_ms": round(1e3 * after_s, 2),
    }


def holds(one: dict[str, Any]) -> bool:
    """Return whether the range contains the measured speedup."""
    lower, _, upper = one["predicted"]
    return bool(lower <= one["reached"] <= upper)


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--runs", type=int, default=3, help="runs of each pair (default: %(default)s)")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), help="only these pairs")
    args = parser.parse_args()
    be_quiet()
    # Pairs that are not measured now stay in the file.
    pairs = json.loads(args.output.read_text())["pairs"] if args.output and args.output.exists() else {}
    for name in args.only:
        pairs[name] = [run(CASES[name]) for _ in range(args.runs)]
        for one in pairs[name]:
            lower, expected, upper = one["predicted"]
            print(
                f"{name}: {one['said']}; with {one['num_workers']} workers predicted {expected:.2f}x ({lower:.2f}x to "
                f"{upper:.2f}x), measured {one['reached']:.2f}x{'' if holds(one) else ', OUTSIDE THE RANGE'}",
                flush=True,
            )
        ordered = {name: pairs[name] for name in CASES if name in pairs}
        light = [name for name in ordered if name in AS_ON_A_GPU]
        write_result(args.output, "ceilings", as_on_a_gpu=light, pairs=ordered)
    runs = [one for name in args.only for one in pairs[name]]
    held = sum(map(holds, runs))
    print(f"In {held} of {len(runs)} runs, the range contains the measured speedup.")
    return 0 if held >= MIN_HELD * len(runs) else 1


if __name__ == "__main__":
    sys.exit(main())
