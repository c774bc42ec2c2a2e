"""Speedups from following the advice of each report, next to the speedup that it predicted.

    python benchmarks/following_advice.py [--workload NAME ...] [--seconds 20] [--output results.json]

Requires a GPU; the photographs also torchvision and scikit-learn. The workloads:

- photographs: ResNet-50 on JPEG files, with the DataLoader's defaults. The files are random crops of scikit-learn's two
  sample photographs. As for ImageNet, each sample is decoded, cropped, and flipped.
- float32: a transformer like GPT-2 on data in memory, in float32.
- sync: a smaller transformer that reads its loss in each step, before 10 ms of host work.

Each next run applies what the report of the previous run says under "Next", exactly as printed, and changes nothing
else. A workload ends when a report advises nothing of the kind, or after five runs.
"""

import ast
import json
import re
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import be_quiet, make_parser, quiet_trainer, write_result
from largest_batch import Transformer
from lightning.pytorch import LightningModule, seed_everything
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from toys import Repeated, Stop, compute

from lightning_gpu_tools import GPUUtilizationAdvisor, GPUUtilizationMonitor, load_report
from lightning_gpu_tools.types import Report

FILES = 512
MAX_RUNS = 5

# The DataLoader's settings, the precision, and how often to read from the GPU, as printed in advice.
LOADER = re.compile(r"DataLoader\(\.\.\., (.*?)\)")
PRECISION = re.compile(r"Trainer\(precision=('.*?'|\".*?\")")
READ_EVERY = re.compile(r"\.item\(\).* call them every (\d+) steps")


class Photographs(Dataset[tuple[torch.Tensor, int]]):
    """JPEG files, decoded and augmented for each sample. An epoch is longer than the run."""

    def __init__(self, folder: Path) -> None:
        from torchvision import transforms

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


class Trained(LightningModule):
    """A network and its loss.

    Args:
        network: The network.
        read_every: Read the loss every so many steps, followed by 10 ms of host work; 0 = never.
    """

    def __init__(self, network: torch.nn.Module, read_every: int = 0) -> None:
        super().__init__()
        self.network, self.read_every = network, read_every
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if isinstance(batch, torch.Tensor):
            loss = self.network(batch).float().square().mean()
        else:
            images, labels = batch
            loss = torch.nn.functional.cross_entropy(self.network(images), labels)
        if self.read_every:
            if batch_idx % self.read_every == 0:
                self.losses.append(loss.item())
            compute(0.01)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-6, momentum=0.9)


def write_photographs(folder: Path) -> None:
    """Write files of 500 x 375 pixels, of two classes in turn."""
    from sklearn.datasets import load_sample_images

    photographs = [Image.fromarray(image) for image in load_sample_images().images]
    random = np.random.default_rng(0)
    for number in range(FILES):
        photograph = photographs[number % 2]
        left, top = (int(random.integers(0, size)) for size in (photograph.width - 500, photograph.height - 375))
        photograph.crop((left, top, left + 500, top + 375)).save(folder / f"{number:04}.jpg", quality=90)


def resnet50() -> torch.nn.Module:
    import torchvision

    network: torch.nn.Module = torchvision.models.resnet50()
    return network


TOKENS = torch.zeros(256, dtype=torch.long)
# The network, its samples, the batch size, and how often the host reads the loss.
WORKLOADS: dict[str, tuple[Callable[[], torch.nn.Module], Callable[[Path], Dataset[Any]], int, int]] = {
    "photographs": (resnet50, Photographs, 32, 0),
    "float32": (partial(Transformer, 8, 1024, causal=True), lambda folder: Repeated(TOKENS), 16, 0),
    "sync": (partial(Transformer, 6, 512, causal=True), lambda folder: Repeated(TOKENS), 16, 1),
}


def train(name: str, photographs: Path, folder: Path, seconds: float, changes: dict[str, dict[str, Any]]) -> Report:
    """Train a workload with these changes to it, and return the report."""
    seed_everything(0, verbose=False)
    torch.cuda.empty_cache()
    build, samples, batch_size, read_every = WORKLOADS[name]
    callbacks = [Stop(seconds), GPUUtilizationMonitor(), GPUUtilizationAdvisor(min_seconds=seconds / 4)]
    data = DataLoader(samples(photographs), batch_size=batch_size, **changes["loader"])
    model = Trained(build(), **{"read_every": read_every, **changes["model"]})
    quiet_trainer(folder, accelerator="gpu", callbacks=callbacks, **changes["trainer"]).fit(model, data)
    return load_report(folder)


def advised(report: Report) -> dict[str, dict[str, Any]]:
    """Return the changes to the loader, the Trainer, and the model that a report advises under "Next"."""
    words = report.diagnosis.next_step
    loader, precision, read_every = LOADER.search(words), PRECISION.search(words), READ_EVERY.search(words)
    keywords = ast.parse(f"f({loader[1]})", mode="eval").body.keywords if loader else []  # type: ignore[attr-defined]
    return {
        "loader": {one.arg: ast.literal_eval(one.value) for one in keywords},
        "trainer": {"precision": ast.literal_eval(precision[1])} if precision else {},
        "model": {"read_every": int(read_every[1])} if read_every else {},
    }


def follow(name: str, photographs: Path, reports: Path, seconds: float) -> list[dict[str, Any]]:
    """Train a workload as it is, then with what each report advises, and return a row for each training."""
    rows: list[dict[str, Any]] = []
    changes: dict[str, dict[str, Any]] = {"loader": {}, "trainer": {}, "model": {}}
    for number in range(1, MAX_RUNS + 1):
        report = train(name, photographs, reports / f"{name}_{number}", seconds, changes)
        rows.append(
            {
                **changes,
                "samples_per_s": report.samples_per_s,
                "step_p50_s": report.diagnosis.step_p50_s,
                "utilization_percent": report.diagnosis.utilization_percent,
                "verdict": report.diagnosis.verdict,
                "why": report.diagnosis.why,
                "next": report.diagnosis.next_step,
            }
        )
        print(f"--- {name} {number}: {changes}", json.dumps(rows[-1], indent=1), flush=True)
        more = advised(report)
        if not any(more.values()) or all(changes[part] | more[part] == changes[part] for part in changes):
            break
        changes = {part: changes[part] | more[part] for part in changes}
    return rows


def main() -> None:
    parser = make_parser(__doc__, seconds=20.0)
    parser.add_argument("--workload", nargs="+", choices=WORKLOADS, default=[*WORKLOADS], help="default: all")
    parser.add_argument("--reports", type=Path, help="folder in which to keep the reports")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("a CUDA device is required")
    be_quiet()
    with tempfile.TemporaryDirectory() as temporary:
        photographs, reports = Path(temporary, "photographs"), args.reports or Path(temporary, "reports")
        photographs.mkdir()
        if "photographs" in args.workload:
            write_photographs(photographs)
        trainings = {name: follow(name, photographs, reports, args.seconds) for name in args.workload}
    write_result(args.output, "following_advice", workloads=trainings)


if __name__ == "__main__":
    main()
