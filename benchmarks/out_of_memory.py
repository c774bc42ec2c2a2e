"""Trainings that run out of GPU memory for one known reason each: what does the report say? Needs CUDA.

    python benchmarks/out_of_memory.py [--output results.json]

It runs on a real GPU, and on the simulated machine with torch's CUDA build. Each case is labeled by what was done, with
the phase in which the error must be seen; torch may use some 4 GiB, or another process holds the rest of the GPU.
Healthy trainings must stay without a verdict of memory. Then, for models like GPT-2, BERT and ResNet-50 with random
weights, the largest batch size that a training with a small one predicts is compared with the largest that trains,
found by trying. The prediction replays the recorded steps on a model of torch's allocator, and leaves 2 % free.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import linecache
import logging
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.strategies import DDPStrategy
from machine import describe_machine
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from rank_processes import run_ranks
from trainings import quiet_trainer

from lightning_gpu_tools import GPUUtilizationMonitor, list_gpus, load_report
from lightning_gpu_tools.trainer.measuring_callback import FitSession

GIB = 2**30
# What is said here of MiB is a quarter of that, so that a case takes a second. A layer of WIDTH x WIDTH weights takes
# 64 of them, and its output for a sample of length 4 takes 2.
WIDTH, LENGTH, MIB = 2048, 16, 2**18


class Batches(Dataset):
    """Batches of samples of these lengths, which begin again at the end.

    Args:
        size: Samples in a batch.
        lengths: Of the samples of each batch.
        count: How many batches.
    """

    def __init__(self, size: int = 16, lengths: Sequence[int] = (4,), count: int = 24) -> None:
        self.lengths, self.count = lengths, count
        self.batches = {length: torch.empty(size, LENGTH * length, WIDTH) for length in lengths}

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.batches[self.lengths[index % len(self.lengths)]]


def taken(mib: int) -> torch.Tensor:
    """Return a tensor that takes this much of the GPU."""
    return torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")


class Layers(LightningModule):
    """Linear layers with AdamW: with 4 of them, 256 MiB each of parameters and gradients, and 512 MiB of states."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        # Whatever the memory held will do as weights, and costs no time.
        linear = (torch.nn.utils.skip_init(nn.Linear, WIDTH, WIDTH, bias=False) for _ in range(depth))
        self.layers = nn.Sequential(*(nn.Sequential(one, nn.Tanh()) for one in linear))
        self.kept: list[Any] = []

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


class Generates(Layers):
    """Takes a branch in one step that holds much more, for a batch like all others."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if batch_idx == 15:
            generated = [self.layers(batch) for _ in range(60)]
            return torch.stack([one.square().mean() for one in generated]).mean()
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

    def on_fit_start(self) -> None:
        with tempfile.NamedTemporaryFile(suffix=".pt") as file:
            torch.save(self.state_dict(), file.name)
            self.load_state_dict(torch.load(file.name, map_location="cuda"))


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
    """Has NCCL ask the driver for buffers once in each step after the first ones."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        free, _ = torch.cuda.mem_get_info()
        if batch_idx > 3 and free < 800 * MIB:
            raise RuntimeError("NCCL error: unhandled cuda error\nCuda failure 2 'out of memory'")
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


class FillsAnother(Layers):
    """Rank 1 holds half of GPU 0, where rank 0 then asks for as much."""

    def on_fit_start(self) -> None:
        self.half = torch.cuda.get_device_properties(0).total_memory // 2
        if self.global_rank == 1:
            self.kept.append(torch.empty(self.half, dtype=torch.uint8, device="cuda:0"))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if batch_idx == 11:
            if self.global_rank == 1:
                raise KeyError("rank 0 does not go on, either")
            torch.empty(self.half, dtype=torch.uint8, device=self.device)
        return super().training_step(batch, batch_idx)


class OnOneGpu(DDPStrategy):
    """All ranks on one GPU, as where ``CUDA_VISIBLE_DEVICES`` shows the same one to each."""

    @property
    def parallel_devices(self) -> list[torch.device]:
        return [torch.device("cuda", 0)] * 2

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device]) -> None:
        self._parallel_devices = devices


class SharesTheGpu(Layers):
    """Each rank holds 40 % of the GPU on which all train, and then rank 0 asks for more."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        total = torch.cuda.get_device_properties(0).total_memory
        if batch_idx == 0:
            self.kept.append(torch.empty(int(0.4 * total), dtype=torch.uint8, device="cuda:0"))
        if batch_idx == 11:
            if self.global_rank == 1:
                raise KeyError("rank 0 does not go on, either")
            torch.empty(int(0.3 * total), dtype=torch.uint8, device="cuda:0")
        return super().training_step(batch, batch_idx)


class AtEpochEnd(Layers):
    def on_train_epoch_end(self) -> None:
        taken(8000)


def hold(job: Connection, left: int, gpus: int | None, is_orphan: bool) -> None:
    """Be another program, which takes all but so many MiB of so many GPUs once it is told to."""
    if is_orphan and os.fork():
        os._exit(0)
    job.recv()
    held = []
    for gpu in range(gpus or torch.cuda.device_count()):
        torch.zeros(1, device=gpu)  # so that what CUDA takes is taken
        free, _ = torch.cuda.mem_get_info(gpu)
        held.append(torch.empty(free - left * MIB, dtype=torch.uint8, device=gpu))
    job.send(os.getpid())
    time.sleep(600)


@contextlib.contextmanager
def another_job(left: int, gpus: int | None = None, *, is_orphan: bool = False) -> Iterator[Callable[[], None]]:
    """Start another program, whose parent may end at once, and give what has it take memory. CUDA has not started."""
    ours, its = multiprocessing.Pipe()
    multiprocessing.get_context("fork").Process(target=hold, args=(its, left, gpus, is_orphan)).start()
    pids = []

    def take() -> None:
        ours.send("take it")
        pids.append(ours.recv())

    try:
        yield take
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)


class Starts(Callback):
    """Another job starts on the same GPU when torch's cache has been emptied."""

    def __init__(self, take: Callable[[], None]) -> None:
        self.take = take

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 11:
            self.take()


@dataclass
class Case:
    """A training and what must be said of it.

    Attributes:
        known: The cause, by what was done, or ``""`` if no memory must be blamed.
        phase: Where the error comes, as the outcome names it; empty if it may come anywhere.
        words: What the report must have.
        line: Code on a line that must be named as one that holds the memory, or that asked for more.
        model: Makes the model.
        batches: Makes the training batches.
        validation: Those of validation; none without.
        ranks: Each on a GPU of its own, unless the strategy says otherwise; torch may use all if there are several.
        allowed: How many MiB torch may use.
        job: Another process on the GPU, if any: ``before`` the training, on all GPUs; ``left over`` by a program that
            has ended; or one that ``starts`` in the middle of it.
        left: How many MiB that leaves; then torch may use all.
        allocator: Settings of torch's allocator, as in the environment, maybe with the ``{fraction}`` that is allowed.
        options: Of the Trainer.
    """

    known: str
    phase: str = ""
    words: str = ""
    line: str = ""
    model: Callable[[], LightningModule] = Layers
    batches: Callable[[], Batches] = Batches
    validation: Callable[[], Batches] | None = None
    ranks: int = 1
    allowed: int = 3800
    job: str = ""
    left: int = 0
    allocator: str = ""
    options: dict[str, Any] = field(default_factory=dict)


CASES = {
    # Beside 256 MiB of weights a sample takes 12 MiB at the peak of forward and 16 at that of backward.
    "a second step that does not fit": Case(
        "batch_too_large", "forward", "fit by measured memory", model=partial(Layers, 16), batches=partial(Batches, 64),
        allowed=5900,
    ),
    "a batch too large": Case(
        "batch_too_large", "forward", "batch_size=", line="self.layers(batch).square()", batches=partial(Batches, 512)
    ),
    "a batch that fits in forward alone": Case(
        "batch_too_large", "backward", "accumulate", batches=partial(Batches, 270)
    ),
    "a validation batch too large": Case(
        "batch_too_large", "validation", "of the validation loader", validation=partial(Batches, 800, count=4)
    ),
    "a cache that leaves NCCL no room": Case(
        "batch_too_large", "forward", model=Communicates, batches=partial(Batches, 100), job="before", left=3050
    ),
    "one long batch": Case(
        "spike", "forward", "elements fit", batches=partial(Batches, 64, lengths=[4] * 15 + [32])
    ),
    "a step that generates": Case(
        "spike", "forward", "rarely taken", line="self.layers(batch) for _ in range", model=Generates,
        batches=partial(Batches, 32),
    ),
    "weights and gradients too large": Case("model_too_large", "backward", model=partial(Layers, 32)),
    "weights too large": Case("model_too_large", "the setup", model=partial(Layers, 62)),
    "states too large": Case(
        "optimizer_too_large", "the optimizer", "fused=True", model=partial(Layers, 15), batches=partial(Batches, 2)
    ),
    "memory in pieces": Case("fragmentation", "forward", "expandable_segments", model=Fragments, allowed=4300),
    "another job that starts": Case(
        "other_processes", "forward", "--min-free", model=EmptiesTheCache, batches=partial(Batches, 64), job="starts",
        left=20,
    ),
    "GPUs in use": Case(
        "other_processes", "forward", "--wait 2h", batches=partial(Batches, 64), job="before", left=724
    ),
    "a process left over": Case(
        "leftover_process", "forward", "kill", batches=partial(Batches, 64), job="left over", left=724
    ),
    "graphs kept": Case("memory_growth", "", "detach", line="self.kept.append", model=KeepsGraphs),
    "outputs kept": Case(
        "memory_growth", "", "loss.item()", line="self.kept.append", model=KeepsOutputs,
        batches=partial(Batches, 32, count=60)
    ),
    "a graph in validation": Case(
        "evaluation_graph", "validation", "enable_grad", line="self.kept.append", model=EvaluatesWithGraph,
        batches=partial(Batches, count=10),
        validation=partial(Batches, count=40), options={"inference_mode": False},
    ),
    "outputs kept in validation": Case(
        "memory_growth", "validation", "numbers", line="self.kept.append", model=EvaluatesIntoAList,
        batches=partial(Batches, count=10),
        validation=partial(Batches, 64, count=40),
    ),
    "a checkpoint on the GPU": Case(
        "loading_checkpoint", "loading a checkpoint", "map_location", model=partial(LoadsOntoTheGpu, 8), allowed=1000
    ),
    "a batch too large, expandable_segments": Case(
        "batch_too_large", "forward", "in addition to 64.0 MiB of fixed memory", line="self.layers(batch).square()",
        batches=partial(Batches, 512), allocator="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    ),
    "outputs kept, expandable_segments": Case(
        "memory_growth", "", "loss.item()", line="self.kept.append", model=KeepsOutputs,
        batches=partial(Batches, 32, count=60), allocator="PYTORCH_ALLOC_CONF=expandable_segments:True",
    ),
    "memory in pieces, expandable_segments": Case(
        "fragmentation", "forward", "expandable_segments:True is set", model=Fragments, allowed=4300,
        allocator="PYTORCH_ALLOC_CONF=expandable_segments:True",
    ),
    "memory in pieces, max_split_size_mb": Case(
        "fragmentation", "forward", "Set PYTORCH_ALLOC_CONF=max_split_size_mb:64,expandable_segments:True ",
        model=Fragments, allowed=4300, allocator="PYTORCH_ALLOC_CONF=max_split_size_mb:64",
    ),
    "a batch too large for a limit": Case(
        "batch_too_large", "forward", "Raise it: torch.cuda.set_per_process", batches=partial(Batches, 512),
        allocator="PYTORCH_ALLOC_CONF=per_process_memory_fraction:{fraction},garbage_collection_threshold:0.8",
    ),
    "a batch that fits in forward alone, cudaMallocAsync": Case(
        "batch_too_large", "backward", "accumulate", batches=partial(Batches, 270),
        allocator="PYTORCH_CUDA_ALLOC_CONF=backend:cudaMallocAsync",
    ),
    "a validation batch too large, in the sanity check": Case(
        "batch_too_large", "validation", "of the validation loader", validation=partial(Batches, 800, count=4),
        options={"num_sanity_val_steps": 2},
    ),
    "a batch too large, accumulated": Case(
        "batch_too_large", "backward", "accumulate_grad_batches=8 (now 4)", batches=partial(Batches, 256),
        options={"accumulate_grad_batches": 4},
    ),
    "ranks on one GPU": Case(
        "shared_by_ranks", "forward", "Give each rank its own GPU", model=SharesTheGpu, ranks=2,
        options={"strategy": OnOneGpu(process_group_backend="gloo")},  # NCCL refuses it
    ),
    "a hook that takes too much": Case(
        "spike", "AtEpochEnd.on_train_epoch_end", "Do it in parts", model=AtEpochEnd
    ),
    "half of a GPU held by another rank": Case("stray_contexts", "forward", "set_device", model=FillsAnother, ranks=2),
    # Healthy ones.
    "all of it fits": Case("", validation=partial(Batches, count=5)),
    "all of it fits, cudaMallocAsync": Case(
        "", validation=partial(Batches, count=5), allocator="PYTORCH_CUDA_ALLOC_CONF=backend:cudaMallocAsync"
    ),
    "errors that are caught": Case("", model=CatchesErrors),
    "lengths that vary": Case("", batches=partial(Batches, 16, lengths=[2, 4, 3, 8, 5])),
    "an error of another kind on a full GPU": Case("", model=Fails, batches=partial(Batches, 80)),
}  # fmt: skip


def warm_up() -> None:
    """Have CUDA take what it takes for kernels when they are first used."""
    layer = nn.Linear(8, 8, device="cuda")
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.zeros(8, 8, device="cuda")).tanh().square().mean().backward()
    optimizer.step()


def train(folder: Path, rank: int, name: str) -> None:
    """Train until it fails, and leave a report; in a process of its own, because a limit of torch's stays."""
    sys.modules.update(dict.fromkeys(["matplotlib", "bokeh"]))  # no pictures, which take longer than the training
    case = CASES[name]
    if case.allocator:
        total = list_gpus()[0].memory_total_bytes or 0
        variable, settings = case.allocator.replace("{fraction}", f"{case.allowed * MIB / total:.4f}").split("=")
        os.environ[variable] = settings  # torch reads them when CUDA starts
    callbacks: list[Callback] = [GPUUtilizationMonitor()]
    with contextlib.ExitStack() as jobs:
        if case.job:
            gpus, is_orphan = None if case.job == "before" else 1, case.job == "left over"
            take = jobs.enter_context(another_job(case.left, gpus, is_orphan=is_orphan))
            warm_up()
            if case.job == "starts":
                callbacks.append(Starts(take))
            else:
                take()
        elif case.ranks == 1 and "fraction" not in case.allocator:
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(case.allowed * MIB / total)
        ranks: dict[str, Any] = {"devices": case.ranks, "strategy": "ddp" if case.ranks > 1 else "auto"}
        options = {"accelerator": "cuda", "num_sanity_val_steps": 0, **ranks, **case.options}
        trainer = quiet_trainer(folder, callbacks=callbacks, **options)
        loaders = [DataLoader(data(), batch_size=None) for data in (case.batches, case.validation) if data is not None]
        with contextlib.suppress(RuntimeError, KeyError):
            trainer.fit(case.model(), *loaders)


def train_one_by_one(folders: dict[str, Path]) -> None:
    """Train cases in this process."""
    for name, folder in folders.items():
        with open(folder / "stdout", "w") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
            train(folder, 0, name)


def train_in_new_process(folders: dict[str, Path], allocator: str) -> None:
    """Train cases with a backend of the allocator, which torch chooses when it is imported."""
    variable, settings = allocator.split("=")
    os.environ[variable] = settings
    alone = multiprocessing.get_context("spawn").Process(target=train_one_by_one, args=(folders,))
    alone.start()
    del os.environ[variable]
    alone.join()
    assert alone.exitcode == 0


def judged(name: str, folder: Path) -> dict[str, Any]:
    """Train, and return what is said of it, and whether it is right."""
    case = CASES[name]
    if "backend" in case.allocator:
        train_in_new_process({name: folder}, case.allocator)
    else:
        for process in run_ranks(folder, train, ranks=case.ranks, options={"name": name}):
            assert process.returncode == 0, process.stderr
    return answer(name, folder)


def answer(name: str, folder: Path) -> dict[str, Any]:
    """Return what is said of a training, and whether it is right."""
    case = CASES[name]
    report = load_report(folder)
    diagnosis = report.diagnosis
    first = diagnosis.findings[0] if diagnosis.findings else None
    said = first.cause if diagnosis.verdict == "out_of_memory" and first is not None else ""
    evidence = {} if first is None else first.evidence
    places = f"{evidence.get('asked_at')}, {evidence.get('source_lines')}"
    code = "".join(linecache.getline(__file__, int(line)) for line in re.findall(r"out_of_memory\.py:(\d+)", places))
    words = f"{diagnosis.why} {diagnosis.next_step}"
    is_there = not case.phase or f"out of memory in {case.phase} at" in report.outcome
    return {
        "known": case.known,
        "said": said,
        "outcome": report.outcome,
        "right": said == case.known and is_there and case.words in words and case.line in code,
        "lines": places,
        "why": diagnosis.why,
        "next": diagnosis.next_step,
        "largest_batch_size": None if first is None else first.evidence.get("largest_batch_size"),
        "allocator_failures": report.allocator_failures,
    }


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
    """A network with an optimizer."""

    def __init__(self, network: nn.Module, optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW) -> None:
        super().__init__()
        self.network, self.optimizer = network, optimizer

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.network(batch).float().square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer(self.parameters(), lr=1e-6)


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


class PlainAttention(nn.Module):
    """A layer of a transformer whose attention is written out, so that it keeps all pairs of tokens."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads, self.norm = width // 64, nn.LayerNorm(width)
        self.inside, self.outside = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, length, width = hidden.shape
        parts = self.inside(self.norm(hidden)).view(batch, length, 3, self.heads, 64).permute(2, 0, 3, 1, 4)
        query, key, value = parts.unbind()
        weights = (query @ key.transpose(-2, -1) / 8).softmax(-1)
        hidden = hidden + self.outside((weights @ value).transpose(1, 2).reshape(batch, length, width))
        return hidden + self.mlp(hidden)


class Checkpointed(nn.Module):
    """Layers that are computed again in backward."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, use_reentrant=False)
        return hidden


def plain(layers: int, width: int, *, checkpointed: bool) -> nn.Module:
    """Return a transformer with written-out attention."""
    inside = [PlainAttention(width) for _ in range(layers)]
    return nn.Sequential(
        nn.Embedding(16_384, width), Checkpointed(*inside) if checkpointed else nn.Sequential(*inside),
        nn.Linear(width, 1024),
    )  # fmt: skip


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
    "attention of all pairs": (partial(plain, 8, 512, checkpointed=False), TOKENS, {}),
    "attention of all pairs, checkpointed": (partial(plain, 8, 512, checkpointed=True), TOKENS, {}),
    "like BERT, 4 batches accumulated": (
        partial(Transformer, 6, 768, causal=False), TOKENS, {"accumulate_grad_batches": 4}
    ),
    "like BERT, fused AdamW": (partial(Transformer, 6, 768, causal=False), TOKENS, {}),
    "like ResNet-50, SGD with momentum": (resnet, IMAGE, {}),
}  # fmt: skip
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "like BERT, fused AdamW": partial(torch.optim.AdamW, fused=True),
    "like ResNet-50, SGD with momentum": partial(torch.optim.SGD, momentum=0.9),
}


def trains(name: str, batch_size: int, *callbacks: Callback) -> bool:
    """Train some steps, and return whether the batches fit."""
    build, sample, options = MODELS[name]
    loader = DataLoader(Same(sample), batch_size=batch_size)
    watched = [GPUUtilizationMonitor(report=False), *callbacks]
    with tempfile.TemporaryDirectory() as folder:
        trainer = quiet_trainer(Path(folder), accelerator="gpu", max_steps=STEPS, callbacks=watched, **options)
        model = Model(build(), OPTIMIZERS.get(name, torch.optim.AdamW))
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


class Predict(Callback):
    """Asks after some steps for the largest batch size."""

    size: int | None = None

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        self.session = FitSession.of(trainer, self)

    def on_train_end(self, trainer: Any, module: Any) -> None:
        recorder = self.session.begin()
        recorder.find_largest_batch()
        self.size = recorder.largest_batch_size

    def teardown(self, trainer: Any, module: Any, stage: str) -> None:
        self.session.release(self)


def largest_that_trains(trains: Callable[[int], bool], guess: int) -> int:
    """Return the largest batch size that trains within a percent, by halving what is between one that does and not."""
    fits, fails = 0, guess
    while trains(fails):
        fits, fails = fails, 2 * fails
    while fails - fits > max(1, fits // 100):
        middle = (fits + fails) // 2
        fits, fails = (middle, fails) if trains(middle) else (fits, middle)
    return fits


def predictions() -> list[dict[str, Any]]:
    """Compare the largest batch sizes that are predicted from small ones with those that train, in 15 GiB."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, 15 * GIB / total))
    rows = []
    for name in MODELS:
        predicted = {}
        for size in (8, 32):
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), help="these cases alone")
    parser.add_argument("--output", type=Path, help="also write the result as JSON")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this needs a CUDA device, or python -m lightning_gpu_tools.simulated")
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    rows = []
    for name in (name for name in args.only if CASES[name].ranks <= torch.cuda.device_count()):
        with tempfile.TemporaryDirectory() as folder:
            row = judged(name, Path(folder))
        rows.append({"training": name, **row})
        print(f"{'right' if row['right'] else 'WRONG'}  {name}: {row['known'] or 'healthy'}; {row['outcome']}")
        print(f"       {row['said']}: {row['why']}\n       {row['next']}")
    right = sum(row["right"] for row in rows)
    sizes = predictions() if len(args.only) == len(CASES) else []
    print(f"{right} of {len(rows)} right; mean error of the predicted batch size: {mean_error(sizes)}")
    if args.output:
        result = {"benchmark": "out_of_memory", "machine": describe_machine(), "right": right, "of": len(rows)}
        result |= {"mean_error": mean_error(sizes), "answers": rows, "sizes": sizes}
        args.output.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if right == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
