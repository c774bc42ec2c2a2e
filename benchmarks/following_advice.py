"""Speedups from following the advice of each report, for ResNet-50 on JPEG files.

    python benchmarks/following_advice.py [--seconds 20] [--reports FOLDER] [--output results.json]

Requires a GPU, torchvision, and scikit-learn.
The first run uses the DataLoader's defaults and float32. Each next run applies the settings under "Next" in the report
of the previous run, exactly as printed, and changes nothing else. The benchmark ends when a report advises no setting
of the loader or the precision, or after five runs.

The files are random crops of scikit-learn's two sample photographs. As for ImageNet, each sample is decoded, cropped,
and flipped.
"""

from __future__ import annotations

import ast
import json
import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchvision
from harness import be_quiet, make_parser, quiet_trainer, write_result
from lightning.pytorch import LightningModule, seed_everything
from PIL import Image
from sklearn.datasets import load_sample_images
from torch.utils.data import DataLoader, Dataset
from toys import Stop

from lightning_gpu_tools import GPUUtilizationAdvisor, GPUUtilizationMonitor, load_report
from lightning_gpu_tools.types import Report

FILES = 512
BATCH = 32
MAX_RUNS = 5

# The DataLoader's settings and the precision, as printed in advice.
LOADER = re.compile(r"DataLoader\(\.\.\., (.*?)\)")
PRECISION = re.compile(r"Trainer\(precision=('.*?'|\".*?\")")


class Photographs(Dataset[tuple[torch.Tensor, int]]):
    """JPEG files, decoded and augmented for each sample. An epoch is longer than the run."""

    def __init__(self, folder: Path) -> None:
        transforms = torchvision.transforms
        self.files = sorted(folder.glob("*.jpg"))
        self.transform = transforms.Compose(
            [
                transforms.RandomResizedCrop(224),
                transforms.RandomHorizontalFlip(),
                transforms.ToTensor(),
                transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
            ]
        )

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        with Image.open(self.files[index % len(self.files)]) as file:
            return self.transform(file.convert("RGB")), index % 2


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = torchvision.models.resnet50()

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        images, labels = batch
        return torch.nn.functional.cross_entropy(self.network(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


def write_photographs(folder: Path) -> None:
    """Write files of 500 x 375 pixels, of two classes in turn."""
    photographs = [Image.fromarray(image) for image in load_sample_images().images]
    random = np.random.default_rng(0)
    for number in range(FILES):
        photograph = photographs[number % 2]
        left, top = (int(random.integers(0, size)) for size in (photograph.width - 500, photograph.height - 375))
        photograph.crop((left, top, left + 500, top + 375)).save(folder / f"{number:04}.jpg", quality=90)


def train(photographs: Path, folder: Path, seconds: float, loader: dict[str, Any], trainer: dict[str, Any]) -> Report:
    """Train with these options of the loader and the Trainer, and return the report."""
    seed_everything(0, verbose=False)
    torch.cuda.empty_cache()
    callbacks = [Stop(seconds), GPUUtilizationMonitor(), GPUUtilizationAdvisor(min_seconds=seconds / 4)]
    data = DataLoader(Photographs(photographs), batch_size=BATCH, **loader)
    quiet_trainer(folder, accelerator="gpu", callbacks=callbacks, **trainer).fit(Classifier(), data)
    return load_report(folder)


def advised(report: Report) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings of the loader and the Trainer that a report advises under "Next"."""
    words = report.diagnosis.next_step
    loader, precision = LOADER.search(words), PRECISION.search(words)
    keywords = ast.parse(f"f({loader[1]})", mode="eval").body.keywords if loader else []  # type: ignore[attr-defined]
    found = {one.arg: ast.literal_eval(one.value) for one in keywords}
    return found, {"precision": ast.literal_eval(precision[1])} if precision else {}


def main() -> None:
    parser = make_parser(__doc__, seconds=20.0)
    parser.add_argument("--reports", type=Path, help="folder in which to keep the reports")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("a CUDA device is required")
    be_quiet()
    rows: list[dict[str, Any]] = []
    loader: dict[str, Any] = {}
    trainer: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        photographs, reports = Path(temporary, "photographs"), args.reports or Path(temporary, "reports")
        photographs.mkdir()
        write_photographs(photographs)
        for number in range(1, MAX_RUNS + 1):
            report = train(photographs, reports / str(number), args.seconds, loader, trainer)
            rows.append(
                {
                    "loader": loader,
                    "trainer": trainer,
                    "samples_per_s": report.samples_per_s,
                    "utilization_percent": report.diagnosis.utilization_percent,
                    "verdict": report.diagnosis.verdict,
                    "why": report.diagnosis.why,
                    "next": report.diagnosis.next_step,
                }
            )
            print(f"--- {number}: DataLoader({loader}), Trainer({trainer})", json.dumps(rows[-1], indent=1), flush=True)
            next_loader, next_trainer = advised(report)
            if not next_loader and not next_trainer:
                break
            loader, trainer = loader | next_loader, trainer | next_trainer
    write_result(args.output, "following_advice", batch_size=BATCH, trainings=rows)


if __name__ == "__main__":
    main()
