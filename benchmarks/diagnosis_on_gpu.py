"""Runs on a GPU with one known cause each: does the advisor name it?

    python benchmarks/diagnosis_on_gpu.py [--seconds 12] [--output results.json]

Requires a CUDA device. The sizes are for a GPU of the Ampere generation or later. A simulated GPU computes nothing, so
it skips runs whose cause is how fast a GPU computes. In a run labeled "healthy", the GPU is busy and no advice is given
about waiting; a note on precision counts as healthy.

If traceml-ai is installed, each run also trains under ``traceml run``. benchmarks/diagnosis_peers.py describes how
TraceML's verdict is judged.
"""

import argparse
import functools
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from diagnosis_peers import judge, traceml_says
from diagnosis_suite import in_words
from harness import be_quiet, exit_code, make_parser, print_answer, quiet_trainer, traceml, write_result
from lightning.pytorch import Callback, LightningModule
from torch.utils.data import DataLoader
from toys import Repeated, SlowCallback, Stop, TrainedBySGD, occupy

from lightning_gpu_tools import GPUUtilizationAdvisor, GPUUtilizationMonitor, load_report


class Layers(TrainedBySGD):
    """Linear layers.

    Args:
        width: Width of each layer.
        depth: Number of layers.
        item: Whether the host reads a value of each layer's output.
        repeat: Number of passes of a batch through all layers.
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


class Waiting(TrainedBySGD):
    """A model that keeps the GPU busy in forward, and calls functions before and after it.

    Args:
        gpu_ms: GPU time of forward.
        before: Function to call with the batch.
        after: Function to call with the loss; the host then sleeps 20 ms.
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
        for _ in range(8):  # takes the host longer than the next kernel takes the GPU
            batch = batch.unsqueeze(0).squeeze(0)
        batch = batch * 1.0


def pure_python(batch: torch.Tensor) -> None:
    end_s = time.perf_counter() + 0.025
    while time.perf_counter() < end_s:
        pass


@dataclass
class Case:
    """A run and its expected diagnosis.

    Attributes:
        known: The accepted answers.
        line: Function whose line the first finding must name.
        forward_ms: GPU time of forward, if known.
        by_speed: Whether the cause is how fast the GPU computes; a simulated GPU skips the run.
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
    "large pinned batches": Case(  # the loader hands them over more slowly than the GPU copies them
        ("host_to_device_copy", "data_loading too_few_workers"), lambda: Layers(1024, 1), (65536, 1024),
        {"pin_memory": True, "num_workers": 2}, _BF16, by_speed=True,
    ),
    ".item() after every layer": Case(
        ("device_sync", "launch_bound"), lambda: Layers(2048, 60, item=True), (512, 2048), options=_BF16
    ),
    "many small kernels": Case(
        ("launch_bound",), lambda: Layers(64, 200), (32, 64), options=_BF16, by_speed=True
    ),
    "a tiny model": Case(("launch_bound",), lambda: Layers(32, 2), (32, 32)),
    "a small batch": Case(
        ("small_batch", "launch_bound"), lambda: Layers(1024, 20, repeat=10), (8, 1024), {}, _BF16, by_speed=True
    ),
    "fp32 products": Case(
        ("low_precision",), lambda: Layers(8192, 4), (2048, 8192), {"pin_memory": True}, by_speed=True
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
    """Train with these callbacks before the case's own."""
    own = [case.callback()] if case.callback else []
    trainer = quiet_trainer(folder, accelerator="gpu", callbacks=[Stop(seconds), *callbacks, *own], **case.options)
    dataset = Repeated(torch.randn(case.shape), case.slow_data_s)
    trainer.fit(case.model(), DataLoader(dataset, batch_size=None, **case.loader))


def answer(case: Case, seconds: float, folder: str) -> dict[str, Any]:
    """Train, and return the advisor's answer and the phases in which the GPU was idle."""
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
        "findings": [{"cause": one.cause, "share": one.share, **one.evidence} for one in diagnosis.findings],
    }


def main() -> int:
    parser = make_parser(__doc__, seconds=12.0)
    parser.add_argument("--train", help=argparse.SUPPRESS)
    parser.add_argument("--only", default="", help="only runs whose name contains this text")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("a CUDA device is required")
    be_quiet()
    if args.train:
        train(CASES[args.train], args.seconds, os.getcwd())
        return 0
    rows = []
    for name, case in CASES.items():
        if args.only not in name or (case.by_speed and "SIMULATED_CUDA" in os.environ):
            continue
        with tempfile.TemporaryDirectory() as folder:
            given = answer(case, args.seconds, folder)
            theirs = None
            if traceml() is not None:
                arguments = ["--train", name, "--seconds", str(args.seconds)]
                theirs = traceml_says(Path(__file__).name, arguments, Path(folder, "traceml"))
                theirs["is"] = judge(case.known[0], theirs["verdict"])
        right = given["said"] in case.known
        known = {"training": name, "known": case.known, "forward_ms_known": case.forward_ms, "line_known": case.line}
        rows.append({**known, "right": right, **given, "traceml": theirs})
        print_answer(
            rows[-1],
            case.line and f"line of {case.line}: {'reported' if given['names_line'] else 'NOT REPORTED'}",
            case.forward_ms and f"GPU time of forward: {case.forward_ms} ms, measured {given['forward_ms']} ms",
            f"{given['why']} {given['gpu_idle_percent']}",
            theirs and f"TraceML: {theirs['verdict']} ({theirs['is']}), forward {theirs['forward_ms']} ms",
        )
    write_result(args.output, "diagnosis_on_gpu", *(["traceml-ai"] if traceml() else []), answers=rows)
    return exit_code(rows)


if __name__ == "__main__":
    sys.exit(main())
