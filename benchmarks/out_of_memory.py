"""Runs that fill GPU memory for one known reason each: does the report name it? And how large a batch would fit?

    python benchmarks/out_of_memory.py [--output results.json]

Requires torch's CUDA build and a real or simulated GPU. Each case is labeled by its cause and by the phase of the
error. torch may use about 1 GiB, or another process holds the rest of the GPU. Healthy runs must get no memory verdict.
Then benchmarks/largest_batch.py compares predicted and actual largest batch sizes.
"""

import contextlib
import linecache
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from harness import TESTS, be_quiet, exit_code, make_parser, print_answer, quiet_trainer, write_result
from largest_batch import mean_error, predictions
from lightning.pytorch import Callback, LightningModule
from torch import nn
from torch.utils.data import DataLoader, Dataset

sys.path.append(str(TESTS))

from rank_processes import run_ranks

from lightning_gpu_tools import GPUUtilizationMonitor, list_gpus, load_report

# A "MiB" of the cases is 256 KiB, so that a case takes a second. In this unit, the weights of a layer take 64 MiB, and
# its output for a sample of length 4 takes 2 MiB.
WIDTH, LENGTH, MIB = 2048, 16, 2**18


class Batches(Dataset):
    """A dataset of whole batches.

    Args:
        size: Samples in a batch.
        lengths: Sample length of each batch; repeats from the start.
        count: Number of batches.
    """

    def __init__(self, size: int = 16, lengths: Sequence[int] = (4,), count: int = 24) -> None:
        self.lengths, self.count = lengths, count
        self.batches = {length: torch.empty(size, LENGTH * length, WIDTH) for length in lengths}

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.batches[self.lengths[index % len(self.lengths)]]


def taken(mib: int) -> torch.Tensor:
    """Return a GPU tensor of some MiB."""
    return torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")


class Layers(LightningModule):
    """Linear layers with AdamW. Four have 256 MiB of parameters, 256 MiB of gradients, and 512 MiB of states.

    Args:
        depth: Number of layers.
        fused: Option of the optimizer.
    """

    def __init__(self, depth: int = 4, *, fused: bool | None = None) -> None:
        super().__init__()
        self.fused = fused
        # The values of the weights do not matter, so initialization is skipped.
        linear = (torch.nn.utils.skip_init(nn.Linear, WIDTH, WIDTH, bias=False) for _ in range(depth))
        self.layers = nn.Sequential(*(nn.Sequential(one, nn.Tanh()) for one in linear))
        self.kept: list[Any] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layers(batch).square().mean()

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.layers(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-6, fused=self.fused)


class Keeps(Layers):
    """A model that keeps something of every step or validation batch.

    Args:
        of_training: What it keeps of the outputs of a training step.
        of_validation: What it keeps of the outputs of a validation batch.
        with_graph: Whether validation enables gradients.
    """

    def __init__(
        self,
        of_training: Callable[[torch.Tensor], Any] | None = None,
        of_validation: Callable[[torch.Tensor], Any] | None = None,
        *,
        with_graph: bool = False,
    ) -> None:
        super().__init__()
        self.of_training, self.of_validation, self.with_graph = of_training, of_validation, with_graph

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.of_training is not None:
            self.kept.append(self.of_training(self.layers(batch)))
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        with torch.enable_grad() if self.with_graph else contextlib.nullcontext():
            if self.of_validation is not None:
                self.kept.append(self.of_validation(self.layers(batch)))


def mean_with_graph(outputs: torch.Tensor) -> torch.Tensor:
    return outputs.mean()


def as_they_are(outputs: torch.Tensor) -> torch.Tensor:
    return outputs


def without_graph(outputs: torch.Tensor) -> torch.Tensor:
    return outputs.detach()


def mean_without_graph(outputs: torch.Tensor) -> torch.Tensor:
    return outputs.mean().detach()


def as_a_number(outputs: torch.Tensor) -> float:
    return outputs.mean().item()


def on_the_cpu(outputs: torch.Tensor) -> torch.Tensor:
    return outputs[:1].cpu()


class Generates(Layers):
    """A model that takes a branch with a much higher peak in one step, for a usual batch."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if batch_idx == 15:
            generated = [self.layers(batch) for _ in range(60)]
            return torch.stack([one.square().mean() for one in generated]).mean()
        return super().training_step(batch, batch_idx)


class LoadsACheckpoint(Layers):
    """A model that loads a checkpoint next to its own weights, with these options of ``torch.load``."""

    def __init__(self, depth: int, **options: Any) -> None:
        super().__init__(depth)
        self.options = options

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        """Skip the step: with its gradients and states, the model does not fit."""

    def on_fit_start(self) -> None:
        with tempfile.NamedTemporaryFile(suffix=".pt") as file:
            torch.save(self.state_dict(), file.name)
            self.load_state_dict(torch.load(file.name, **self.options))


class Fragments(Layers):
    """A model that keeps every second of many allocations, as caches of varying sizes do.

    Args:
        piece: MiB of an allocation.
        block: MiB of the blocks from which they are cut.
        blocks: Number of such blocks.
    """

    def __init__(self, piece: int = 16, block: int = 512, blocks: int = 8) -> None:
        super().__init__()
        self.piece, self.block, self.blocks = piece, block, blocks

    def on_train_batch_start(self, batch: torch.Tensor, batch_idx: int) -> None:
        if batch_idx == 10:
            for _ in range(self.blocks):
                taken(self.block)  # returns to the cache, from which the pieces are cut
                pieces = [taken(self.piece) for _ in range(self.block // self.piece)]
                self.kept += pieces[::2]

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if batch_idx > 10:
            taken(600)
        return super().training_step(batch, batch_idx)


class EmptiesTheCache(Layers):
    """A model that empties torch's cache every tenth step, a common workaround for memory errors."""

    def on_train_batch_end(self, outputs: Any, batch: torch.Tensor, batch_idx: int) -> None:
        if batch_idx % 10 == 0:
            torch.cuda.empty_cache()


class Communicates(Layers):
    """A model in which NCCL needs 800 MiB from the driver in every step after the first ones."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        free, _ = torch.cuda.mem_get_info()
        if batch_idx > 3 and free < 800 * MIB:
            raise RuntimeError("NCCL error: unhandled cuda error\nCuda failure 2 'out of memory'")
        return loss


class CatchesErrors(Layers):
    """A model that skips batches that do not fit."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if batch_idx in (5, 9):
            with contextlib.suppress(torch.OutOfMemoryError):
                taken(800_000)
        return super().training_step(batch, batch_idx)


class Fails(Layers):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if batch_idx == 15:
            raise KeyError("unknown label")
        return super().training_step(batch, batch_idx)


class FillsGpu0(Layers):
    """A model in which ranks hold shares of GPU 0, and rank 0 then allocates another share there.

    Args:
        held: Share that each rank holds.
        requested: Share that rank 0 allocates.
    """

    def __init__(self, held: Sequence[float], requested: float) -> None:
        super().__init__()
        self.held, self.requested = held, requested

    def take(self, share: float) -> torch.Tensor:
        total = torch.cuda.get_device_properties(0).total_memory
        return torch.empty(int(share * total), dtype=torch.uint8, device="cuda:0")

    def on_fit_start(self) -> None:
        if share := self.held[self.global_rank]:
            self.kept.append(self.take(share))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if batch_idx == 11:
            if self.global_rank == 1:
                raise KeyError("stop, because rank 0 fails")
            self.take(self.requested)
        return super().training_step(batch, batch_idx)


class AtEpochEnd(Layers):
    """A model that evaluates 800 samples at the end of the epoch, in some parts, with or without gradients."""

    def __init__(self, parts: int = 1, *, with_graph: bool = True) -> None:
        super().__init__()
        self.parts, self.with_graph = parts, with_graph

    def on_train_epoch_end(self) -> None:
        samples = torch.zeros(800 // self.parts, LENGTH * 4, WIDTH, device=self.device)
        with contextlib.nullcontext() if self.with_graph else torch.no_grad():
            for _ in range(self.parts):
                self.layers(samples)


def hold(job: Connection, left: int, gpus: int | None, is_orphan: bool) -> None:
    """Run as another program: on a message from ``job``, take all but some MiB of the first GPUs, or of all."""
    if is_orphan and os.fork():
        os._exit(0)
    job.recv()
    held = []
    for gpu in range(gpus or torch.cuda.device_count()):
        torch.zeros(1, device=gpu)  # creates the CUDA context, which takes memory itself
        free, _ = torch.cuda.mem_get_info(gpu)
        held.append(torch.empty(free - left * MIB, dtype=torch.uint8, device=gpu))
    job.send(os.getpid())
    time.sleep(600)


@contextlib.contextmanager
def another_job(left: int, gpus: int | None = None, *, is_orphan: bool = False) -> Iterator[Callable[[], None]]:
    """Fork another program before CUDA starts, and yield a function that makes it take memory.

    With ``is_orphan``, its parent process exits at once.
    """
    ours, its = multiprocessing.Pipe()
    multiprocessing.get_context("fork").Process(target=hold, args=(its, left, gpus, is_orphan)).start()
    pids = []

    def take() -> None:
        ours.send("take memory")
        pids.append(ours.recv())

    try:
        yield take
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)


class Starts(Callback):
    """A callback that starts another job on the GPU just after torch's cache was emptied."""

    def __init__(self, take: Callable[[], None]) -> None:
        self.take = take

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 11:
            self.take()


@dataclass
class Case:
    """A run and its expected report.

    Attributes:
        known: The cause; ``""`` = the report must not blame memory.
        phase: Phase of the error, as in the outcome; ``""`` = any phase.
        words: Text that the report must contain.
        line: Code on a line that the report must name.
        model: Makes the model.
        batches: Makes the training batches.
        validation: Makes the validation batches.
        ranks: Number of ranks. Several ranks have one GPU each, unless the strategy decides otherwise, and no limit.
        allowed: Limit for torch, in MiB.
        job: Another process on the GPU. It starts ``before`` the run, on all GPUs; it was ``left over`` when its parent
            exited; or it ``starts`` during the run. torch then has no limit.
        left: Memory that the other process leaves, in MiB.
        allocator: Environment variable with settings of torch's allocator. ``{fraction}`` becomes the share of the GPU
            that ``allowed`` is.
        options: Trainer options.
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
    # With 4 layers, a sample takes 12 MiB at the peak of forward, and 16 MiB at the peak of backward.
    "a second step that does not fit": Case(
        "batch_too_large", "forward", "fit, based on measured memory", model=partial(Layers, 16),
        batches=partial(Batches, 64), allowed=5900,
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
        "spike", "forward", "Limit the elements", batches=partial(Batches, 64, lengths=[4] * 15 + [32])
    ),
    "a step that generates": Case(
        "spike", "forward", "rarely taken", line="self.layers(batch) for _ in range", model=Generates,
        batches=partial(Batches, 32),
    ),
    "weights and gradients too large": Case("model_too_large", "backward", model=partial(Layers, 32)),
    "weights too large": Case("model_too_large", "the setup", model=partial(Layers, 62)),
    "states too large": Case(
        "optimizer_too_large", "the optimizer", "fused=True", model=partial(Layers, 13), batches=partial(Batches, 2)
    ),
    "memory in pieces": Case(
        "fragmentation", "forward", "expandable_segments:True in the environment",
        model=partial(Fragments, 256, block=2048, blocks=1),
    ),
    "memory in small pieces": Case(
        "fragmentation", "forward", "Allocate long-lived tensors before training", model=Fragments, allowed=4300
    ),
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
    "graphs kept": Case("memory_growth", "", "detach", line="self.kept.append", model=partial(Keeps, mean_with_graph)),
    "outputs kept": Case(
        "memory_growth", "", "loss.item()", line="self.kept.append", model=partial(Keeps, without_graph),
        batches=partial(Batches, 32, count=60)
    ),
    "a graph in validation": Case(
        "evaluation_graph", "validation", "enable_grad", line="self.kept.append",
        model=partial(Keeps, None, mean_with_graph, with_graph=True),
        batches=partial(Batches, count=10),
        validation=partial(Batches, count=40), options={"inference_mode": False},
    ),
    "outputs kept in validation": Case(
        "memory_growth", "validation", "numbers", line="self.kept.append", model=partial(Keeps, None, as_they_are),
        batches=partial(Batches, count=10),
        validation=partial(Batches, 64, count=40),
    ),
    "a checkpoint on the GPU": Case(
        "loading_checkpoint", "loading a checkpoint", "map_location",
        model=partial(LoadsACheckpoint, 8, map_location="cuda"), allowed=1000
    ),
    "a batch too large, expandable_segments": Case(
        "batch_too_large", "forward", "in addition to 64.0 MiB of fixed memory", line="self.layers(batch).square()",
        batches=partial(Batches, 512), allocator="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    ),
    "outputs kept, expandable_segments": Case(
        "memory_growth", "", "loss.item()", line="self.kept.append", model=partial(Keeps, without_graph),
        batches=partial(Batches, 32, count=60), allocator="PYTORCH_ALLOC_CONF=expandable_segments:True",
    ),
    "memory in pieces, expandable_segments": Case(
        "fragmentation", "forward", "long-lived tensors", model=Fragments, allowed=4300,
        allocator="PYTORCH_ALLOC_CONF=expandable_segments:True",
    ),
    "a batch too large for a limit": Case(
        "batch_too_large", "forward", "batch_size=", batches=partial(Batches, 512),
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
        "batch_too_large", "backward", "accumulate_grad_batches=16 (now 4)", batches=partial(Batches, 256),
        options={"accumulate_grad_batches": 4},
    ),
    "a hook that takes too much": Case(
        "spike", "AtEpochEnd.on_train_epoch_end", "Do it in parts", model=AtEpochEnd
    ),
    "half of a GPU held by another rank": Case(
        "stray_contexts", "forward", "set_device", model=partial(FillsGpu0, [0.0, 0.5], 0.5), ranks=2
    ),
    # Healthy runs.
    "all of it fits": Case("", validation=partial(Batches, count=5)),
    "all of it fits, cudaMallocAsync": Case(
        "", validation=partial(Batches, count=5), allocator="PYTORCH_CUDA_ALLOC_CONF=backend:cudaMallocAsync"
    ),
    "errors that are caught": Case("", model=CatchesErrors),
    "lengths that vary": Case("", batches=partial(Batches, 16, lengths=[2, 4, 3, 8, 5])),
    "an error of another kind on a full GPU": Case("", model=Fails, batches=partial(Batches, 80)),
}  # fmt: skip


def warm_up() -> None:
    """Run each kind of kernel once, because its first use takes GPU memory."""
    layer = nn.Linear(8, 8, device="cuda")
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.zeros(8, 8, device="cuda")).tanh().square().mean().backward()
    optimizer.step()


def train(folder: Path, rank: int, case: Case) -> None:
    """Train until memory runs out, and leave a report. Each case needs its own process, because torch keeps limits."""
    be_quiet()
    if case.allocator:
        total = list_gpus()[0].memory_total_bytes or 0
        variable, settings = case.allocator.replace("{fraction}", f"{case.allowed * MIB / total:.4f}").split("=")
        os.environ[variable] = settings  # read when CUDA starts
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
        trainer = quiet_trainer(folder, accelerator="cuda", callbacks=callbacks, **{**ranks, **case.options})
        loaders = [DataLoader(data(), batch_size=None) for data in (case.batches, case.validation) if data is not None]
        with contextlib.suppress(RuntimeError, KeyError):
            trainer.fit(case.model(), *loaders)


def train_one_by_one(cases: dict[Path, Case]) -> None:
    """Train cases in this process, each in its folder."""
    for folder, case in cases.items():
        with open(folder / "stdout", "w") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
            train(folder, 0, case)


def train_in_new_process(cases: dict[Path, Case]) -> None:
    """Train cases with the same allocator in a new process, because torch chooses its backend on import."""
    variable, settings = next(iter(cases.values())).allocator.split("=")
    os.environ[variable] = settings
    alone = multiprocessing.get_context("spawn").Process(target=train_one_by_one, args=(cases,))
    alone.start()
    del os.environ[variable]
    alone.join()
    assert alone.exitcode == 0


def judged(case: Case, folder: Path) -> dict[str, Any]:
    """Train, and return the report's answer."""
    if "backend" in case.allocator:
        train_in_new_process({folder: case})
    else:
        for process in run_ranks(folder, train, ranks=case.ranks, options={"case": case}):
            assert process.returncode == 0, process.stderr
    return answer(case, folder)


def answer(case: Case, folder: Path) -> dict[str, Any]:
    """Return the answer in the report of a run, and whether it is right."""
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
    }


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=CASES, help="only these cases, and no batch sizes")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("a CUDA device is required; for a simulated one, run python -m lightning_gpu_tools.simulated")
    be_quiet()
    rows = []
    for name in args.only or CASES:
        has_too_few = CASES[name].ranks > torch.cuda.device_count()
        if has_too_few or ("SIMULATED_CUDA" in os.environ and "backend" in CASES[name].allocator):  # not simulated
            continue
        with tempfile.TemporaryDirectory() as folder:
            rows.append({"training": name, **judged(CASES[name], Path(folder))})
        print_answer(rows[-1], rows[-1]["outcome"], rows[-1]["why"], rows[-1]["next"])
    right = sum(row["right"] for row in rows)
    sizes = [] if args.only else predictions()
    error = mean_error(sizes)
    print(f"{right} of {len(rows)} right; mean error of the predicted batch size: {error}")
    sums = {"right": right, "of": len(rows), "mean_error": error}
    write_result(args.output, "out_of_memory", **sums, answers=rows, sizes=sizes)
    return exit_code(rows)


if __name__ == "__main__":
    sys.exit(main())
