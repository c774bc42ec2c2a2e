"""GPU times of forward, backward and optimizer in the report, next to the kernels that torch.profiler counts.

    python benchmarks/gpu_times.py [--seconds 6] [--output results.json]

It needs a real GPU. Each network trains twice: with torch.profiler for some steps, and with the monitor at its defaults
and without the profiler. A kernel belongs to the part of the step in which the host launched it, on whatever thread.
Between two kernels a GPU takes about a microsecond, which is in the report's times and not in the profiler's. Some
networks are starved, by data that comes late or by a host that cannot launch fast enough. The elapsed time between two
events around forward, which is often taken for the GPU's time, is written next to them.
"""

from __future__ import annotations

import argparse
import bisect
import json
import logging
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

os.environ["HF_HUB_OFFLINE"] = "1"  # networks are made from their default configurations

import torch
import torchvision
import transformers
from lightning.pytorch import Callback, LightningModule, Trainer
from machine import describe_machine
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.data import DataLoader, Dataset
from toys import Stop

from lightning_gpu_tools import GPUUtilizationMonitor, load_report

PARTS = ("forward", "backward", "optimizer")
SKIPPED, PROFILED = 10, 10  # steps


class Same(Dataset[torch.Tensor]):
    """The same batch over and over, which may come late."""

    def __init__(self, batch: torch.Tensor, wait_s: float) -> None:
        self.batch, self.wait_s = batch, wait_s

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.wait_s)
        return self.batch


class Model(LightningModule):
    """A network whose parts are marked for the profiler.

    Args:
        network: It.
        sync: Whether each step reads its loss.
    """

    def __init__(self, network: torch.nn.Module, *, sync: bool = False) -> None:
        super().__init__()
        self.network, self.sync = network, sync
        self.elapsed: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        with record_function("forward"):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            outputs = self.network(batch)
            outputs = getattr(outputs, "logits", outputs)
            loss = outputs.float().square().mean()
            end.record()
            if batch_idx >= SKIPPED:
                self.elapsed.append((begin, end))
            if self.sync:
                loss.item()
            return loss

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        with record_function("backward"):
            super().backward(loss, *args, **kwargs)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        with record_function("optimizer"):
            super().optimizer_step(*args, **kwargs)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-9)


def resnet() -> torch.nn.Module:
    return torchvision.models.resnet50()


def gpt2() -> torch.nn.Module:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=16_384))


def many_layers() -> torch.nn.Module:
    return torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(200)))


class Case(NamedTuple):
    network: Callable[[], torch.nn.Module]
    batch: Callable[[], torch.Tensor]
    wait_s: float = 0.0
    sync: bool = False


IMAGES = (64, 3, 224, 224)
CASES = {
    "ResNet-50, busy": Case(resnet, lambda: torch.randn(IMAGES, device="cuda")),
    "ResNet-50, data 150 ms late": Case(resnet, lambda: torch.randn(IMAGES, device="cuda"), 0.150),
    "GPT-2, busy": Case(gpt2, lambda: torch.randint(16_384, (16, 512), device="cuda")),
    "GPT-2, reads its loss, data 50 ms late": Case(
        gpt2, lambda: torch.randint(16_384, (16, 512), device="cuda"), 0.050, sync=True
    ),
    "GPT-2, batch of 1: the host is too slow": Case(gpt2, lambda: torch.randint(16_384, (1, 128), device="cuda")),
    "200 small layers: the host is too slow": Case(many_layers, lambda: torch.randn(32, 256, device="cuda")),
}


def fit(case: Case, folder: Path, *callbacks: Callback) -> Model:
    model = Model(case.network(), sync=case.sync)
    trainer = Trainer(
        accelerator="gpu", devices=1, precision="bf16-mixed", max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder, callbacks=[*callbacks],
    )  # fmt: skip
    trainer.fit(model, DataLoader(Same(case.batch(), case.wait_s), batch_size=None))
    return model


class Profiled(Callback):
    """Profiles some steps, and ends the training."""

    def __init__(self, folder: Path) -> None:
        self.trace = folder / "trace.json"
        self.profiler = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == SKIPPED:
            torch.cuda.synchronize()
            self.profiler.start()

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == SKIPPED + PROFILED:
            torch.cuda.synchronize()
            self.profiler.stop()
            self.profiler.export_chrome_trace(str(self.trace))
            trainer.should_stop = True


def kernel_ms(trace: dict[str, Any]) -> dict[str, float]:
    """Return the milliseconds that the GPU works on each part of a step, by a trace of the profiler."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    ranges = sorted(
        (event["ts"], event["ts"] + event["dur"], event["name"])
        for event in events
        if event["name"] in PARTS and event.get("cat") == "user_annotation"
    )
    begins = [begin for begin, _, _ in ranges]
    launched = {
        event["args"]["correlation"]: event["ts"]
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})
    }
    found = dict.fromkeys(PARTS, 0.0)
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            at = launched.get(event["args"]["correlation"], 0.0)
            # Forward and backward lie within the optimizer's closure: the one that began last has it.
            inside = [name for _, end, name in ranges[: bisect.bisect(begins, at)] if at < end]
            if inside:
                found[inside[-1]] += event["dur"] / 1e3 / PROFILED
    return found


def compared(name: str, case: Case, seconds: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        profiled = Profiled(Path(folder))
        fit(case, Path(folder), profiled)
        known = kernel_ms(json.loads(profiled.trace.read_text()))
        model = fit(case, Path(folder), Stop(seconds), GPUUtilizationMonitor())
        report = load_report(folder)
        said = report.gpu_step_s
        elapsed = sorted(begin.elapsed_time(end) for begin, end in model.elapsed)
    measured = {
        part: said[f"training_step/{part}"] * 1e3 if f"training_step/{part}" in said else None for part in PARTS
    }
    row = {
        "training": name,
        "profiler_ms": known,
        "report_ms": measured,
        "error": {part: None if measured[part] is None else measured[part] / known[part] - 1 for part in PARTS},
        "elapsed_forward_ms": elapsed[len(elapsed) // 2],
        "context_bytes": report.memory[0].parts_bytes.get("context"),
    }
    print(name, *(f"{key}: {row[key]}" for key in list(row)[1:]), sep="\n   ", flush=True)
    torch.cuda.empty_cache()
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=6.0, help="of each training (default: %(default)s)")
    parser.add_argument("--only", default="", help="trainings whose names have this text")
    parser.add_argument("--output", type=Path, help="also write the result as JSON")
    args = parser.parse_args()
    if not torch.cuda.is_available() or "SIMULATED_CUDA" in os.environ:
        parser.error("this needs a real GPU")
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    sys.modules.update(dict.fromkeys(["matplotlib", "bokeh"]))  # no pictures
    rows = [compared(name, case, args.seconds) for name, case in CASES.items() if args.only in name]
    if args.output:
        result = {"benchmark": "gpu_times", "machine": describe_machine(), "trainings": rows}
        args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
