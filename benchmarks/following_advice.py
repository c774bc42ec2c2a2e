"""Train ResNet-50 on JPEG files as a first version is often written, and follow the advice of each report. Needs a GPU.

    python benchmarks/following_advice.py [--seconds 20] [--reports FOLDER] [--output results.json]

The first training has a DataLoader with its defaults and float32. Each next one has what the report of the one before
says under "Next", word for word, until a report has no advice that is a setting of the loader or the precision. Nothing
else is changed. The files are random parts of scikit-learn's two photographs, written by Pillow; they are decoded,
cropped and flipped for each sample, as for ImageNet. It needs torchvision and scikit-learn.
"""

from __future__ import annotations

import argparse
import ast
import json
import logging
import re
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchvision
from lightning.pytorch import LightningModule, Trainer, seed_everything
from machine import describe_machine
from PIL import Image
from sklearn.datasets import load_sample_images
from torch.utils.data import DataLoader, Dataset
from toys import Stop

from lightning_gpu_tools import GPUUtilizationAdvisor, GPUUtilizationMonitor, load_report
from lightning_gpu_tools.reports.comparison import compare
from lightning_gpu_tools.types import Report

FILES, BATCH = 512, 32
MAX_TRAININGS = 5
# The settings of a DataLoader, and the precision, as advice writes them.
LOADER = re.compile(r"DataLoader\(\.\.\., (.*?)\)")
PRECISION = re.compile(r"Trainer\(precision=('.*?'|\".*?\")")


class Photographs(Dataset[tuple[torch.Tensor, int]]):
    """JPEG files, decoded and augmented for each sample; an epoch is longer than the training."""

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
    """Write the files: 500 x 375 pixels each, two classes in turn."""
    photographs = [Image.fromarray(image) for image in load_sample_images().images]
    random = np.random.default_rng(0)
    for number in range(FILES):
        photograph = photographs[number % 2]
        left, top = (int(random.integers(0, size)) for size in (photograph.width - 500, photograph.height - 375))
        photograph.crop((left, top, left + 500, top + 375)).save(folder / f"{number:04}.jpg", quality=90)


def train(photographs: Path, folder: Path, seconds: float, loader: dict[str, Any], trainer: dict[str, Any]) -> Report:
    """Train with these options of the loader and the Trainer."""
    seed_everything(0, verbose=False)
    torch.cuda.empty_cache()
    callbacks = [Stop(seconds), GPUUtilizationMonitor(), GPUUtilizationAdvisor(min_seconds=seconds / 4)]
    options = {"accelerator": "gpu", "devices": 1, "max_epochs": 1, "logger": False, "enable_checkpointing": False}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    data = DataLoader(Photographs(photographs), batch_size=BATCH, **loader)
    Trainer(callbacks=callbacks, default_root_dir=folder, **options, **quiet, **trainer).fit(Classifier(), data)
    return load_report(folder)


def advised(report: Report) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings of loader and Trainer that a report says under "Next"."""
    words = report.diagnosis.next_step
    loader, precision = LOADER.search(words), PRECISION.search(words)
    keywords = ast.parse(f"f({loader[1]})", mode="eval").body.keywords if loader else []  # type: ignore[attr-defined]
    found = {one.arg: ast.literal_eval(one.value) for one in keywords}
    return found, {"precision": ast.literal_eval(precision[1])} if precision else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each training (default: %(default)s)")
    parser.add_argument("--reports", type=Path, help="where the reports of the trainings stay")
    parser.add_argument("--output", type=Path, help="also write the result as JSON")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this needs a CUDA device")
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    rows: list[dict[str, Any]] = []
    loader: dict[str, Any] = {}
    trainer: dict[str, Any] = {}
    before: Report | None = None
    with tempfile.TemporaryDirectory() as temporary:
        photographs, reports = Path(temporary, "photographs"), args.reports or Path(temporary, "reports")
        photographs.mkdir()
        write_photographs(photographs)
        for number in range(1, MAX_TRAININGS + 1):
            report = train(photographs, reports / str(number), args.seconds, loader, trainer)
            compared = compare(report, before) if before else None
            rows.append(
                {
                    "loader": loader,
                    "trainer": trainer,
                    "samples_per_s": report.samples_per_s,
                    "utilization_percent": report.diagnosis.utilization_percent,
                    "verdict": report.diagnosis.verdict,
                    "why": report.diagnosis.why,
                    "next": report.diagnosis.next_step,
                    "compared": None if compared is None else compared.verdict,
                    "doubt": None if compared is None else compared.doubt,
                }
            )
            print(f"--- {number}: DataLoader({loader}), Trainer({trainer})", json.dumps(rows[-1], indent=1), flush=True)
            next_loader, next_trainer = advised(report)
            if not next_loader and not next_trainer:
                break
            loader, trainer, before = loader | next_loader, trainer | next_trainer, report
    if args.output:
        result = {
            "benchmark": "following_advice",
            "machine": describe_machine(),
            "batch_size": BATCH,
            "trainings": rows,
        }
        args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
