"""Trainings on a real GPU with one known cause each: what does the advisor say of them? Needs a CUDA device.

    python benchmarks/diagnosis_on_gpu.py [--seconds 12] [--output results.json]

The sizes are for a GPU of the Ampere generation or later; a simulated one, which computes nothing, leaves out the
trainings whose cause lies in how fast a GPU computes. "healthy" means that the GPU is busy and nothing is advised
that it waits for; a remark on precision counts as healthy where it is not what was asked.

Where traceml-ai is installed, each training runs once more under ``traceml run``. How its verdict is judged is in
benchmarks/diagnosis_peers.py.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import json
import logging
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from diagnosis_peers import judge, traceml, traceml_says
from diagnosis_suite import in_words
from lightning.pytorch import Callback, LightningModule, Trainer
from machine import describe_machine
from torch.utils.data import DataLoader, Dataset
from toys import Slow, SlowCallback, Stop, occupy

from lightning_gpu_tools import GPUUtilizationAdvisor, GPUUtilizationMonitor, load_report


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


class Waiting(LightningModule):
    """Keeps the GPU busy in forward and calls a function before and after that.

    Args:
        gpu_ms: For how long.
        before: Is called with the batch.
        after: Is called with the loss; then the host sleeps 20 ms.
    """

    def __init__(
        self,
        gpu_ms: float,
        before: Callable[[torch.Tensor], object] | None = None,
        after: Callable[[torch.Tensor], object] | None = None,
    ) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(32, 1)
        self.gpu_ms, self.before, self.after = gpu_ms, before, after

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        occupy(self.gpu_ms / 1e3)
        return self.layer(batch)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if self.before is not None:
            self.before(batch)
        loss = self(batch).square().mean()
        if self.after is not None:
            self.after(loss)
            time.sleep(0.020)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-9)


class Augmenting(Waiting):
    def on_after_batch_transfer(self, batch: torch.Tensor, dataloader_idx: int) -> torch.Tensor:
        occupy(0.020)
        return batch


class Averaging(Callback):
    def on_train_batch_end(self, *args: Any) -> None:
        occupy(0.020)


def item(loss: torch.Tensor) -> None:
    loss.item()


def to_cpu(loss: torch.Tensor) -> None:
    loss.detach().cpu()


def nonzero(loss: torch.Tensor) -> None:
    torch.nonzero(loss.detach())


def synchronize(loss: torch.Tensor) -> None:
    torch.cuda.synchronize()


def small_kernels(batch: torch.Tensor) -> None:
    for _ in range(400):
        for _ in range(8):  # which takes the host longer than a kernel takes the GPU
            batch = batch.unsqueeze(0).squeeze(0)
        batch = batch * 1.0


def pure_python(batch: torch.Tensor) -> None:
    end_s = time.perf_counter() + 0.025
    while time.perf_counter() < end_s:
        pass


@dataclass
class Case:
    """A training.

    Attributes:
        known: What may be said of it.
        line: The function whose line has to be named in the first finding.
        forward_ms: How long the GPU works in forward.
        by_speed: Whether the cause lies in how fast a GPU computes. A simulated one computes nothing.
    """

    known: tuple[str, ...]
    model: Callable[[], LightningModule]
    shape: tuple[int, ...]
    line: str = field(default="", kw_only=True)
    forward_ms: float | None = field(default=None, kw_only=True)
    by_speed: bool = field(default=False, kw_only=True)
    loader: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    slow_data_s: float = 0.0
    callback: Callable[[], Callback] | None = None


_BF16 = {"precision": "bf16-mixed"}
CASES = {
    "large products": Case(
        ("healthy",), lambda: Layers(8192, 8), (8192, 8192), {"pin_memory": True}, _BF16, by_speed=True
    ),
    "slow data": Case(
        ("data_loading too_few_workers",), lambda: Layers(4096, 4), (64, 4096), options=_BF16, slow_data_s=0.03
    ),
    "slow callback": Case(
        ("callback SlowCallback",), lambda: Layers(4096, 4), (64, 4096), options=_BF16, callback=SlowCallback
    ),
    "large pageable batches": Case(("host_to_device_copy",), lambda: Layers(1024, 1), (65536, 1024), options=_BF16),
    "large pinned batches": Case(
        ("host_to_device_copy",), lambda: Layers(1024, 1), (65536, 1024), {"pin_memory": True, "num_workers": 2}, _BF16,
        by_speed=True,
    ),
    ".item() after every layer": Case(
        ("device_sync", "launch_bound"), lambda: Layers(2048, 60, item=True), (512, 2048), options=_BF16
    ),
    "many small kernels": Case(
        ("launch_bound",), lambda: Layers(64, 400), (32, 64), options=_BF16, by_speed=True
    ),
    "a tiny model": Case(("launch_bound",), lambda: Layers(32, 2), (32, 32)),
    "a small batch": Case(
        ("small_batch", "launch_bound"), lambda: Layers(1024, 20, repeat=10), (8, 1024), {}, _BF16, by_speed=True
    ),
    "fp32 products": Case(
        ("low_precision",), lambda: Layers(8192, 4), (8192, 8192), {"pin_memory": True}, by_speed=True
    ),
    **{
        f"{sync.__name__}, then 20 ms of the host": Case(
            ("device_sync",), functools.partial(Waiting, 18.0, after=sync), (32, 32), line=sync.__name__,
            forward_ms=18.0,
        )
        for sync in (item, to_cpu, nonzero, synchronize)
    },
    "a sync that costs less than the host behind it": Case(
        ("host_work",), functools.partial(Waiting, 6.0, after=item), (32, 32), forward_ms=6.0
    ),
    "400 kernels, each of them small": Case(
        ("launch_bound",), functools.partial(Waiting, 0.5, small_kernels), (32, 32), line="small_kernels"
    ),
    "25 ms of Python before the kernels": Case(
        ("host_work",), functools.partial(Waiting, 6.0, pure_python), (32, 32), line="pure_python", forward_ms=6.0
    ),
    "kernels in on_after_batch_transfer": Case(
        ("healthy", "small_batch"), functools.partial(Augmenting, 6.0), (32, 32), forward_ms=6.0
    ),
    "kernels in a callback": Case(
        ("healthy", "small_batch"), functools.partial(Waiting, 6.0), (32, 32), callback=Averaging, forward_ms=6.0
    ),
}  # fmt: skip


def train(case: Case, seconds: float, folder: str, callbacks: Sequence[Callback] = ()) -> None:
    """Train, with the callback that the case is about behind these."""
    dataset = _SlowReady(case.shape, case.slow_data_s) if case.slow_data_s else Ready(case.shape)
    trainer = Trainer(
        accelerator="gpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False,
        callbacks=[Stop(seconds), *callbacks, *([case.callback()] if case.callback else [])],
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder, **case.options,
    )  # fmt: skip
    trainer.fit(case.model(), DataLoader(dataset, batch_size=None, **case.loader))


def answer(case: Case, seconds: float, folder: str) -> dict[str, Any]:
    """Train and return what the advisor says, and where the GPU stood idle."""
    advisor = GPUUtilizationAdvisor(min_seconds=seconds / 4)
    train(case, seconds, folder, [GPUUtilizationMonitor(interval_s=0.1), advisor])
    diagnosis = advisor.diagnosis
    assert diagnosis is not None
    measured_s = load_report(folder).gpu_step_s.get("training_step/forward")
    lines = str(diagnosis.findings[0].evidence.get("source_lines", "")) if diagnosis.findings else ""
    return {
        "said": in_words(diagnosis),
        "verdict": diagnosis.verdict,
        "line": lines,
        "names_line": not case.line or f"in {case.line}" in lines,
        "forward_ms": None if measured_s is None else round(measured_s * 1e3, 2),
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
    parser.add_argument("--train", help=argparse.SUPPRESS)
    parser.add_argument("--only", default="", help="trainings whose names have this text")
    parser.add_argument("--output", type=Path, help="also write the result as JSON")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this needs a CUDA device")
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    sys.modules.update(dict.fromkeys(["matplotlib", "bokeh"]))  # no pictures, which take longer than the trainings
    if args.train:
        train(CASES[args.train], args.seconds, os.getcwd())
        return 0
    rows = []
    for name, case in CASES.items():
        if args.only not in name or (case.by_speed and "SIMULATED_CUDA" in os.environ):
            continue
        with tempfile.TemporaryDirectory() as folder:
            said = answer(case, args.seconds, folder)
            theirs = None
            if traceml() is not None:
                arguments = ["--train", name, "--seconds", str(args.seconds)]
                theirs = traceml_says(Path(__file__).name, arguments, Path(folder, "traceml"))
                theirs["is"] = judge(case.known[0], theirs["verdict"])
        right = said["said"] in case.known
        known = {"training": name, "known": case.known, "forward_ms_known": case.forward_ms, "line_known": case.line}
        rows.append({**known, "right": right, **said, "traceml": theirs})
        print(f"{'right' if right else 'WRONG':<6}{name}: known {' or '.join(case.known)}, said {said['said']}")
        if case.line:
            print(f"      line of {case.line}: {'named' if said['names_line'] else 'NOT NAMED'}")
        if case.forward_ms:
            print(f"      forward on the GPU: known {case.forward_ms} ms, measured {said['forward_ms']} ms")
        print(f"      {said['why']} {said['gpu_idle_percent']}", flush=True)
        if theirs is not None:
            print(f"      TraceML: {theirs['verdict']} ({theirs['is']}), forward {theirs['forward_ms']} ms", flush=True)
    if args.output:
        versions = {} if traceml() is None else {"traceml-ai": importlib.metadata.version("traceml-ai")}
        result = {"benchmark": "diagnosis_on_gpu", "machine": {**describe_machine(), **versions}, "answers": rows}
        args.output.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if all(row["right"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
