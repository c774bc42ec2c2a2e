"""Trainings that run out of GPU memory for one known reason each: what does the report say? No GPU is needed.

    python benchmarks/out_of_memory.py [--output results.json]

Each is a real training of a Trainer on the CPU, over a simulated GPU whose allocator really runs out
(tests/limited_memory.py): it rounds, splits, caches and flushes as torch's does, and raises torch's error with torch's
message. Each case is labeled by what was done, with the phase in which the error must be seen. Healthy trainings must
stay without a verdict of memory. Then, for some models, the largest batch size that was predicted from a small one is
compared with the largest that trains.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from machine import describe_machine
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from limited_memory import UNIT, LimitedMemory, limited_gpu
from trainings import quiet_trainer

from lightning_gpu_tools import GPUUtilizationMonitor, load_report
from lightning_gpu_tools.reports.report import Report
from lightning_gpu_tools.trainer.measuring_callback import FitSession

# What is said here of MiB is KiB on the simulated GPU, which is 1024 times smaller. There a layer of 128 x 128 weights
# takes 64 of them, and its output for a sample of length 4 takes 2. On hardware benchmarks/out_of_memory_on_gpu.py has
# wider layers and longer samples instead.
WIDTH, LENGTH, MIB, DEVICE = 128, 1, UNIT, "cpu"
OTHER_JOB = 4_000_000  # no process of this machine has this number


class Batches(Dataset):
    """Batches of samples of these lengths, which begin again at the end.

    Args:
        size: Samples in a batch.
        lengths: Of the samples of each batch.
        count: How many batches.
    """

    def __init__(self, size: int = 16, lengths: Sequence[int] = (4,), count: int = 24) -> None:
        self.size, self.lengths, self.count = size, lengths, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(self.size, LENGTH * self.lengths[index % len(self.lengths)], WIDTH)


def taken(mib: int) -> torch.Tensor:
    """Return a tensor that takes this much of the GPU."""
    return torch.empty(mib * MIB, dtype=torch.uint8, device=DEVICE)


class Layers(LightningModule):
    """Linear layers with AdamW: with 4 of them, 256 MiB each of parameters and gradients, and 512 MiB of states."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.depth = depth
        self.layers: nn.Module | None = None
        self.kept: list[Any] = []

    def configure_model(self) -> None:
        if self.layers is None:
            layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()) for _ in range(self.depth)]
            self.layers = nn.Sequential(*layers)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layers(batch).square().mean()

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.layers(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-6)


class KeepsGraphs(Layers):
    """Keeps the loss of every step with its graph."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.kept.append(self.layers(batch).mean())
        return loss


class KeepsOutputs(Layers):
    """Keeps the outputs of every step, without a graph, as for a metric at the end of the epoch."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.kept.append(self.layers(batch).detach())
        return super().training_step(batch, batch_idx)


class EvaluatesWithGraph(Layers):
    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        with torch.enable_grad():
            self.kept.append(self.layers(batch).mean())


class EvaluatesIntoAList(Layers):
    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.kept.append(self.layers(batch))


class LoadsOntoTheGpu(Layers):
    """Loads a checkpoint beside its own weights."""

    def configure_model(self) -> None:
        super().configure_model()
        with tempfile.NamedTemporaryFile(suffix=".pt") as file:
            torch.save(self.state_dict(), file.name)
            self.load_state_dict(torch.load(file.name, map_location=DEVICE))


class Fragments(Layers):
    """Leaves half of what it allocates in a step, in pieces, as caches of many sizes do."""

    def on_train_batch_start(self, batch: torch.Tensor, batch_idx: int) -> None:
        if batch_idx == 10:
            for _ in range(8):
                taken(512)  # and given back to the cache, from which the pieces are cut
                pieces = [taken(16) for _ in range(32)]
                self.kept += pieces[::2]

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if batch_idx > 10:
            taken(600)
        return super().training_step(batch, batch_idx)


class EmptiesTheCache(Layers):
    """Empties torch's cache now and then, as some do against errors of memory."""

    def on_train_batch_end(self, outputs: Any, batch: torch.Tensor, batch_idx: int) -> None:
        if batch_idx % 10 == 0:
            torch.cuda.empty_cache()


class Communicates(Layers):
    """Has NCCL ask the driver for buffers once in each step."""

    memory: LimitedMemory

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.memory.ask_driver(800 * MIB, "NCCL error: unhandled cuda error\nCuda failure 2 'out of memory'")
        return loss


class CatchesErrors(Layers):
    """Skips the batches that do not fit."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if batch_idx in (5, 9):
            with contextlib.suppress(torch.OutOfMemoryError):
                taken(800_000)
        return super().training_step(batch, batch_idx)


class Fails(Layers):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if batch_idx == 15:
            raise KeyError("a label that is not in the table")
        return super().training_step(batch, batch_idx)


class Starts(Callback):
    """Another job starts on the same GPU."""

    def __init__(self, memory: LimitedMemory, size: int) -> None:
        self.memory, self.size = memory, size

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 10:
            self.memory.others = {OTHER_JOB: self.size}


@contextlib.contextmanager
def orphan() -> Iterator[int]:
    """Give the number of a process whose parent has ended."""
    started = subprocess.run(["sh", "-c", "sleep 600 >/dev/null 2>&1 & echo $!"], capture_output=True, check=True)
    pid = int(started.stdout)
    try:
        yield pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@dataclass
class Case:
    """A training and what must be said of it.

    Attributes:
        known: The cause, by what was done, or ``""`` if no memory must be blamed.
        phase: Where the error comes, as the outcome names it; empty if it may come anywhere.
        words: What the advice must have.
        model: Makes the model.
        batches: The training batches.
        validation: Those of validation; none without.
        gpu: Options of ``LimitedMemory``, in MiB.
        starts: What another job takes in the middle of it, in MiB, as the next one.
        orphan: What a left-over process holds.
        spare_gpus: Other GPUs of the machine, free and twice as large.
        options: Of the Trainer.
    """

    known: str
    phase: str = ""
    words: str = ""
    model: Callable[[], LightningModule] = Layers
    batches: Batches = field(default_factory=Batches)
    validation: Batches | None = None
    gpu: dict[str, Any] = field(default_factory=dict)
    starts: int = 0
    orphan: int = 0
    spare_gpus: int = 0
    options: dict[str, Any] = field(default_factory=dict)


CASES = {
    # Beside 256 MiB of weights a sample takes 12 MiB at the peak of forward and 16 at that of backward.
    "a batch too large": Case("batch_too_large", "forward", "batch_size=", batches=Batches(512)),
    "a batch that fits in forward alone": Case("batch_too_large", "backward", "accumulate", batches=Batches(270)),
    "a batch too large for a cap": Case("batch_too_large", "forward", batches=Batches(200), gpu={"allowed": 2048}),
    "a validation batch too large": Case(
        "batch_too_large", "validation", "of the validation loader", validation=Batches(800, count=4)
    ),
    "a cache that leaves NCCL no room": Case(
        "batch_too_large", "forward", model=Communicates, batches=Batches(100), gpu={"total": 3072}
    ),
    "one long batch": Case("spike", "forward", "numbers fit", batches=Batches(64, lengths=[4] * 15 + [32])),
    "weights and gradients too large": Case("model_too_large", "backward", model=partial(Layers, 32)),
    "weights too large": Case("model_too_large", "the setup", model=partial(Layers, 100)),
    "states too large": Case("optimizer_too_large", "the optimizer", "fused=True", model=partial(Layers, 15),
                             batches=Batches(2)),
    "memory in pieces": Case("fragmentation", "forward", "expandable_segments", model=Fragments,
                             gpu={"total": 4608}),
    "another job that starts": Case(
        "other_processes", "forward", "pick --min-free", model=EmptiesTheCache, batches=Batches(64), starts=3072,
        spare_gpus=1,
    ),
    "a GPU in use": Case(
        "other_processes", "forward", "--wait 2h", gpu={"others": 3072}, batches=Batches(64)
    ),
    "a process left over": Case("leftover_process", "forward", "kill", orphan=3072, batches=Batches(64)),
    "graphs kept": Case("memory_growth", "", "detach", model=KeepsGraphs),
    "outputs kept": Case("memory_growth", "", "loss.item()", model=KeepsOutputs, batches=Batches(32, count=60)),
    "a graph in validation": Case(
        "evaluation_graph", "validation", "enable_grad", model=EvaluatesWithGraph, batches=Batches(count=10),
        validation=Batches(count=40), options={"inference_mode": False},
    ),
    "outputs kept in validation": Case(
        "memory_growth", "validation", "numbers", model=EvaluatesIntoAList, batches=Batches(count=10),
        validation=Batches(64, count=40),
    ),
    "a checkpoint on the GPU": Case(
        "loading_checkpoint", "loading a checkpoint", "map_location", model=partial(LoadsOntoTheGpu, 40)
    ),
    # Healthy ones.
    "all of it fits": Case("", validation=Batches(count=5)),
    "errors that are caught": Case("", model=CatchesErrors),
    "lengths that vary": Case("", batches=Batches(16, lengths=[2, 4, 3, 8, 5])),
    "an error of another kind on a full GPU": Case("", model=Fails, batches=Batches(80)),
}  # fmt: skip


def train(case: Case, folder: Path, set_attribute: Callable[..., None]) -> Report:
    """Train over a simulated GPU, and return the report."""
    options = {name: size * MIB for name, size in case.gpu.items()}
    others = options.pop("others", 0)
    memory = LimitedMemory(**options, others={OTHER_JOB: others} if others else None)
    with contextlib.ExitStack() as stack:
        if case.orphan:
            memory.others = {stack.enter_context(orphan()): case.orphan * MIB}
        stack.enter_context(limited_gpu(memory, folder, set_attribute, case.spare_gpus))
        model = case.model()
        if isinstance(model, Communicates):
            model.memory = memory
        fit(case, model, folder, *([Starts(memory, case.starts * MIB)] if case.starts else []))
        del model
    return load_report(folder)


def fit(case: Case, model: LightningModule, folder: Path, *others: Callback) -> None:
    """Train until it fails, on the GPU that there is, and leave a report."""
    trainer = quiet_trainer(
        folder,
        accelerator="cuda",
        callbacks=[GPUUtilizationMonitor(), *others],
        num_sanity_val_steps=0,
        **case.options,
    )
    loaders = [DataLoader(data, batch_size=None) for data in (case.batches, case.validation) if data is not None]
    with contextlib.suppress(RuntimeError, KeyError):
        trainer.fit(model, *loaders)


def judged(case: Case, report: Report) -> dict[str, Any]:
    """Return what is said of a training, and whether it is right."""
    diagnosis = report.diagnosis
    blamed = diagnosis.verdict == "out_of_memory"
    first = diagnosis.findings[0] if diagnosis.findings else None
    said = first.cause if blamed and first is not None else ""
    return {
        "known": case.known,
        "said": said,
        "outcome": report.outcome,
        "right": said == case.known and (not case.phase or f"out of memory in {case.phase} at" in report.outcome),
        "why": diagnosis.why,
        "next": diagnosis.next_step,
        "largest_batch_size": None if first is None else first.evidence.get("largest_batch_size"),
        "allocator_failures": report.allocator_failures,
    }


class Checkpointed(Layers):
    """Computes each four layers again in backward."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        for i in range(0, len(self.layers), 4):
            batch = checkpoint(self.layers[i : i + 4], batch, use_reentrant=False)
        return batch.square().mean()


class Transformer(Layers):
    def configure_model(self) -> None:
        if self.layers is None:
            layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)
            self.layers = nn.TransformerEncoder(layer, self.depth, enable_nested_tensor=False)


MODELS: dict[str, Callable[[], LightningModule]] = {
    "4 layers": Layers,
    "16 layers": partial(Layers, 16),
    "16 layers, checkpointed": partial(Checkpointed, 16),
    "a transformer of 2 layers": partial(Transformer, 2),
}
MEASURED_AT = (8, 16, 32)


class Predict(Callback):
    """Asks after some steps for the largest batch size."""

    size: int | None = None

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        self.session = FitSession.of(trainer, self)

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.size = self.session.begin().largest_batch_size()

    def teardown(self, trainer: Any, module: Any, stage: str) -> None:
        self.session.release(self)


def trains(name: str, size: int, *callbacks: Callback) -> bool:
    """Train a model four steps on a GPU of 16,384 MiB, and return whether the batches fit."""
    memory = LimitedMemory(16 * 1024 * MIB)
    with tempfile.TemporaryDirectory() as folder, limited_gpu(memory, Path(folder), set_attribute):
        trainer = quiet_trainer(
            Path(folder), accelerator="cuda", callbacks=[GPUUtilizationMonitor(report=False), *callbacks]
        )
        loader = DataLoader(Samples(4 * size), batch_size=size)
        with contextlib.suppress(torch.OutOfMemoryError):
            trainer.fit(MODELS[name](), loader)
        return bool(trainer.global_step == 4)


class Samples(Batches):
    """Samples, of which the loader makes batches."""

    def __init__(self, count: int) -> None:
        super().__init__(count=count)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(4, WIDTH)


def largest_that_trains(trains: Callable[[int], bool], guess: int) -> int:
    """Return the largest batch size that trains within a percent, by halving what is between one that does and not."""
    fits, fails = 0, guess
    while trains(fails):
        fits, fails = fails, 2 * fails
    while fails - fits > max(1, fits // 100):
        middle = (fits + fails) // 2
        fits, fails = (middle, fails) if trains(middle) else (fits, middle)
    return fits


def predictions(names: Iterable[str], trains: Callable[..., bool], measured_at: Iterable[int]) -> list[dict[str, Any]]:
    """Compare the largest batch sizes that are predicted from small ones with those that train.

    Args:
        names: Of the models.
        trains: Returns whether a model of this name trains with batches of this size, and with these callbacks.
        measured_at: The small batch sizes.
    """
    rows = []
    for name in names:
        predicted = {}
        for size in measured_at:
            predict = Predict()
            trains(name, size, predict)
            predicted[size] = predict.size
        guess = max((size for size in predicted.values() if size), default=64)
        found = largest_that_trains(partial(trains, name), guess)
        errors = {size: None if value is None else value / found - 1 for size, value in predicted.items()}
        rows.append({"model": name, "predicted": predicted, "found": found, "error": errors})
        print(f"{name}: predicted {predicted}, {found} train")
    return rows


def mean_error(sizes: Sequence[dict[str, Any]]) -> float | None:
    """Return by how much the predictions from the largest of the small batches are wrong on average."""
    errors = [abs(error) for row in sizes if (error := [*row["error"].values()][-1]) is not None]
    return sum(errors) / len(errors) if errors else None


def set_attribute(owner: Any, name: str, value: Any, raising: bool = True) -> None:
    """Replace something for the rest of this process."""
    setattr(owner, name, value)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), help="these cases alone")
    parser.add_argument("--output", type=Path, help="also write the result as JSON")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    rows = []
    for name in args.only:
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            row = judged(CASES[name], train(CASES[name], Path(folder), set_attribute))
        rows.append({"training": name, **row})
        print(f"{'right' if row['right'] else 'WRONG'}  {name}: {row['known'] or 'healthy'}; {row['outcome']}")
        print(f"       {row['said']}: {row['why']}\n       {row['next']}")
    right = sum(row["right"] for row in rows)
    sizes = predictions(MODELS, trains, MEASURED_AT) if len(args.only) == len(CASES) else []
    print(f"{right} of {len(rows)} right; mean error of the predicted batch size: {mean_error(sizes)}")
    if args.output:
        result = {"benchmark": "out_of_memory", "machine": describe_machine(), "right": right, "of": len(rows)}
        result |= {"mean_error": mean_error(sizes), "answers": rows, "sizes": sizes}
        args.output.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if right == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
