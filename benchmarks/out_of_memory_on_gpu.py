"""Real errors of memory on a real GPU: what does the report say, and how good is the predicted batch size? Needs CUDA.

    python benchmarks/out_of_memory_on_gpu.py [--output results.json]

First the trainings of benchmarks/out_of_memory.py that need no other process, with torch limited to some 4 GiB. Then,
for models like GPT-2, BERT and ResNet-50 with random weights, the largest batch size that a training with a small one
predicts is compared with the largest that trains, found by trying. All but 8 GiB of the GPU are taken before.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import json
import logging
import sys
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import out_of_memory
import torch
from lightning.pytorch import Callback, LightningModule
from machine import describe_machine
from out_of_memory import CASES, Case, Communicates, fit, judged, mean_error, predictions
from torch import nn
from torch.utils.data import DataLoader, Dataset
from trainings import quiet_trainer

from lightning_gpu_tools import GPUUtilizationMonitor, load_report

MIB, GIB = 2**20, 2**30
ROOM = 8 * GIB
STEPS = 4


class Same(Dataset):
    """The same sample over and over."""

    def __init__(self, sample: torch.Tensor) -> None:
        self.sample = sample

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.sample


class Model(LightningModule):
    """A network with AdamW, on a GPU of which only a part is left."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def on_fit_start(self) -> None:
        free, _ = torch.cuda.mem_get_info()
        self.taken = torch.empty(max(0, free - ROOM), dtype=torch.uint8, device=self.device)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.network(batch).float().square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-6)


class Transformer(nn.Module):
    """A transformer over tokens, with a head over the vocabulary: causal as GPT-2, or not as BERT."""

    def __init__(self, layers: int, width: int, *, causal: bool, vocabulary: int = 16_384) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, width // 64, 4 * width, batch_first=True, norm_first=causal)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.causal = causal

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, tokens.device) if self.causal else None
        return self.head(self.layers(self.embedding(tokens), mask, is_causal=self.causal))


class Bottleneck(nn.Module):
    def __init__(self, inside: int, width: int, outside: int, stride: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(inside, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, outside, 1, bias=False), nn.BatchNorm2d(outside)),
        )
        same = inside == outside and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(inside, outside, 1, stride, bias=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.layers(images) + self.shortcut(images))


def resnet() -> nn.Module:
    """Return 50 layers of convolutions, as ResNet-50 has them."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
    ]
    inside = 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        width = 64 * 2**stage
        for block in range(blocks):
            layers.append(Bottleneck(inside, width, 4 * width, 2 if stage and not block else 1))
            inside = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, 1000))


TOKENS, IMAGE = torch.zeros(256, dtype=torch.long), torch.zeros(3, 160, 160)
MODELS: dict[str, tuple[Callable[[], nn.Module], torch.Tensor, dict[str, Any]]] = {
    "like GPT-2": (partial(Transformer, 8, 512, causal=True), TOKENS, {}),
    "like GPT-2, bf16-mixed": (partial(Transformer, 8, 512, causal=True), TOKENS, {"precision": "bf16-mixed"}),
    "like BERT": (partial(Transformer, 6, 768, causal=False), TOKENS, {}),
    "like ResNet-50": (resnet, IMAGE, {}),
    "like ResNet-50, bf16-mixed": (resnet, IMAGE, {"precision": "bf16-mixed"}),
}


def trains(name: str, batch_size: int, *callbacks: Callback) -> bool:
    """Train some steps, and return whether the batches fit."""
    build, sample, options = MODELS[name]
    loader = DataLoader(Same(sample), batch_size=batch_size)
    watched = [GPUUtilizationMonitor(report=False), *callbacks]
    with tempfile.TemporaryDirectory() as folder:
        trainer = quiet_trainer(Path(folder), accelerator="gpu", max_steps=STEPS, callbacks=watched, **options)
        model = Model(build())
        try:
            trainer.fit(model, loader)
        except torch.OutOfMemoryError:
            return False
        finally:
            trainer.strategy.teardown()
            del model, trainer
            gc.collect()
            torch.cuda.empty_cache()
    return True


def causes() -> list[dict[str, Any]]:
    """Run out of memory for known reasons."""
    out_of_memory.WIDTH, out_of_memory.LENGTH, out_of_memory.MIB, out_of_memory.DEVICE = 4096, 32, MIB, "cuda"
    total = torch.cuda.get_device_properties(0).total_memory
    rows = []
    for name, case in CASES.items():
        if _needs_another_process(case):
            continue
        allowed = case.gpu.get("allowed") or case.gpu.get("total", 4096) - 300
        torch.cuda.set_per_process_memory_fraction(allowed * MIB / total)
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            fit(case, case.model(), Path(folder))
            row = judged(case, load_report(folder))
        gc.collect()
        torch.cuda.empty_cache()
        rows.append({"training": name, **row})
        print(f"{'right' if row['right'] else 'WRONG'}  {name}: {row['known'] or 'healthy'}; {row['outcome']}")
        print(f"       {row['said']}: {row['why']}\n       {row['next']}")
    torch.cuda.set_per_process_memory_fraction(1.0)
    return rows


def _needs_another_process(case: Case) -> bool:
    return bool(case.starts or case.orphan or case.gpu.get("others") or case.model is Communicates)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="also write the result as JSON")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this needs a CUDA device")
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    answers, sizes = causes(), predictions(MODELS, trains, measured_at=(8, 16))
    right = sum(row["right"] for row in answers)
    mean = mean_error(sizes)
    print(f"{right} of {len(answers)} right; mean error of the predicted batch size {mean}")
    if args.output:
        result = {"benchmark": "out_of_memory_on_gpu", "machine": describe_machine(), "mean_error": mean}
        args.output.write_text(json.dumps({**result, "answers": answers, "sizes": sizes}, indent=1) + "\n")
    return 0 if right == len(answers) else 1


if __name__ == "__main__":
    sys.exit(main())
