"""GPU times of forward, backward, and the optimizer: the report's, and the sums of torch.profiler's kernels.

    python benchmarks/gpu_times.py [--seconds 6] [--output results.json]

Requires a real GPU. Each network trains twice: once with torch.profiler for some steps, and once with the monitor at
its defaults. A kernel belongs to the part of the step in which any host thread launched it. The report's times include
about 1 us between kernels, and the profiler's do not. Some networks starve the GPU, with late data or a host that
launches too slowly. The result also has the elapsed time between two events around forward, often mistaken for GPU
time.
"""

import bisect
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

os.environ["HF_HUB_OFFLINE"] = "1"  # networks are built from their default configurations

import torch
import torchvision
import transformers
from harness import be_quiet, make_parser, quiet_trainer, write_result
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.data import DataLoader
from toys import Repeated, Stop

from lightning_gpu_tools import GPUUtilizationMonitor, load_report

PARTS = ("forward", "backward", "optimizer")
SKIPPED, PROFILED = 10, 10  # steps


class Model(LightningModule):
    """A network that marks the parts of a step for the profiler. With ``sync``, each step reads its loss."""

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
    trainer = quiet_trainer(folder, accelerator="gpu", precision="bf16-mixed", callbacks=[*callbacks])
    trainer.fit(model, DataLoader(Repeated(case.batch(), case.wait_s), batch_size=None))
    return model


class Profiled(Callback):
    """A callback that profiles some steps, and then ends the run."""

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
    """Return the GPU time of each part of a step in ms, from a profiler trace."""
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
            # Forward and backward run inside the optimizer's closure, so the part that began last counts.
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
        reported_s = report.gpu_step_s
        elapsed = sorted(begin.elapsed_time(end) for begin, end in model.elapsed)
    measured = {
        part: 1e3 * reported_s[key] if (key := f"training_step/{part}") in reported_s else None for part in PARTS
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
    parser = make_parser(__doc__, seconds=6.0)
    parser.add_argument("--only", default="", help="only runs whose name contains this text")
    args = parser.parse_args()
    if not torch.cuda.is_available() or "SIMULATED_CUDA" in os.environ:
        parser.error("a real GPU is required")
    be_quiet()
    rows = [compared(name, case, args.seconds) for name, case in CASES.items() if args.only in name]
    write_result(args.output, "gpu_times", trainings=rows)


if __name__ == "__main__":
    main()
