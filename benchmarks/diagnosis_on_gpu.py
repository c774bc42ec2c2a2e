"""Trainings on a real GPU with one known cause each: what does the advisor say of them? Needs a CUDA device.

    python benchmarks/diagnosis_on_gpu.py [--seconds 12] [--output results.json]

The sizes are for a GPU of the Ampere generation or later. "healthy" means that the GPU is busy and nothing is advised
that it waits for; a remark on precision counts as healthy where it is not what was asked.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from diagnosis_suite import in_words
from lightning.pytorch import LightningModule, Trainer
from machine import describe_machine
from torch.utils.data import DataLoader, Dataset
from toys import Slow, SlowCallback, Stop

from lightning_gpu_tools import GPUUtilizationAdvisor


class Ready(Dataset):
    """The same batch over and over, so that loading costs nothing but handing it over."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.batch = torch.randn(shape)

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.batch


class Layers(LightningModule):
    """So many linear layers of this width.

    Args:
        width: Of each layer.
        depth: How many.
        item: Whether each layer's output is asked for its value.
        repeat: How often a batch goes through them.
    """

    def __init__(self, width: int, depth: int, *, item: bool = False, repeat: int = 1) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(depth))
        self.width, self.item, self.repeat = width, item, repeat

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        hidden = batch.reshape(-1, self.width) if batch.shape[-1] != self.width else batch
        for _ in range(self.repeat):
            for layer in self.layers:
                hidden = torch.relu(layer(hidden)) * 0.5
                if self.item and hidden.mean().item() > 1e9:
                    raise OverflowError
        return hidden.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-9)


@dataclass
class Case:
    known: tuple[str, ...]
    model: Callable[[], LightningModule]
    shape: tuple[int, ...]
    loader: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    slow_data_s: float = 0.0
    callback: bool = False


_BF16 = {"precision": "bf16-mixed"}
CASES = {
    "large products": Case(("healthy",), lambda: Layers(8192, 8), (8192, 8192), {"pin_memory": True}, _BF16),
    "slow data": Case(
        ("data_loading too_few_workers",), lambda: Layers(4096, 4), (64, 4096), options=_BF16, slow_data_s=0.03
    ),
    "slow callback": Case(
        ("callback SlowCallback",), lambda: Layers(4096, 4), (64, 4096), options=_BF16, callback=True
    ),
    "large pageable batches": Case(("host_to_device_copy",), lambda: Layers(1024, 1), (65536, 1024), options=_BF16),
    "large pinned batches": Case(
        ("host_to_device_copy",), lambda: Layers(1024, 1), (65536, 1024), {"pin_memory": True, "num_workers": 2}, _BF16
    ),
    ".item() after every layer": Case(
        ("device_sync",), lambda: Layers(2048, 60, item=True), (512, 2048), options=_BF16
    ),
    "many small kernels": Case(("launch_bound",), lambda: Layers(64, 400), (32, 64), options=_BF16),
    "a tiny model": Case(("launch_bound",), lambda: Layers(32, 2), (32, 32)),
    "a small batch": Case(("small_batch", "launch_bound"), lambda: Layers(1024, 20, repeat=10), (8, 1024), {}, _BF16),
    "fp32 products": Case(("low_precision",), lambda: Layers(8192, 4), (8192, 8192), {"pin_memory": True}),
}


def answer(case: Case, seconds: float, folder: str) -> dict[str, Any]:
    """Train and return what the advisor says, and where the GPU stood idle."""
    advisor = GPUUtilizationAdvisor(min_seconds=seconds / 4)
    dataset = Ready(case.shape)
    loader = DataLoader(dataset, batch_size=None, **case.loader)
    if case.slow_data_s:
        loader = DataLoader(_SlowReady(case.shape, case.slow_data_s), batch_size=None, **case.loader)
    callbacks = [Stop(seconds), advisor, *([SlowCallback()] if case.callback else [])]
    trainer = Trainer(
        accelerator="gpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False, callbacks=callbacks,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder, **case.options,
    )  # fmt: skip
    trainer.fit(case.model(), loader)
    diagnosis = advisor.diagnosis
    assert diagnosis is not None
    return {
        "said": in_words(diagnosis),
        "verdict": diagnosis.verdict,
        "why": diagnosis.why,
        "next": diagnosis.next_step,
        "utilization_percent": diagnosis.utilization_percent,
        "gpu_idle_percent": dict(diagnosis.gpu_idle_percent),
        "gpu_idle_residual_percent": diagnosis.gpu_idle_residual_percent,
        "findings": [{"cause": one.cause, "share": one.share, **one.evidence} for one in diagnosis.findings],
    }


class _SlowReady(Ready):
    def __init__(self, shape: tuple[int, ...], seconds: float) -> None:
        super().__init__(shape)
        self.slow = Slow(seconds)

    def __getitem__(self, index: int) -> torch.Tensor:
        self.slow[index]
        return self.batch


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=12.0, help="of each training (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="also write the result as JSON")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this needs a CUDA device")
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    rows = []
    for name, case in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            said = answer(case, args.seconds, folder)
        right = said["said"] in case.known
        rows.append({"training": name, "known": case.known, "right": right, **said})
        print(f"{'right' if right else 'WRONG':<6}{name}: known {' or '.join(case.known)}, said {said['said']}")
        print(f"      {said['why']} {said['gpu_idle_percent']}")
    if args.output:
        result = {"benchmark": "diagnosis_on_gpu", "machine": describe_machine(), "answers": rows}
        args.output.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if all(row["right"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
