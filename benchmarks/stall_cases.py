"""Runs that hang for one known reason each, and slow but healthy runs: real processes on the CPU."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any, Literal

import torch
from harness import quiet_trainer
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lightning_gpu_tools import GPUUtilizationMonitor, watch
from lightning_gpu_tools.training import stacks

StallAfter = float | Literal["auto"]

AT = 12  # the step, batch, or sample at which the run hangs


def hang() -> None:
    """Wait forever, as for a lock that is never released."""
    threading.Event().wait()


class Data(Dataset[torch.Tensor]):
    """A dataset that calls a function with the index of each sample."""

    def __init__(self, act: Callable[[int], None] = lambda index: None, length: int = 200) -> None:
        self.act, self.length = act, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        self.act(index)
        return torch.full((4,), float(index))


class Model(LightningModule):
    """A model that calls a function in each training step, and one in each validation batch."""

    def __init__(
        self,
        act: Callable[[Model, int], None] = lambda model, step: None,
        validate: Callable[[int], None] | None = None,
    ) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.act, self.validate = act, validate

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.layer(batch).square().mean()
        self.act(self, batch_idx)
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        if self.validate is not None:
            self.validate(batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-6)


class Acting(Callback):
    """A callback that calls a function in one hook."""

    def __init__(self, hook: str, act: Callable[[Trainer], None]) -> None:
        setattr(self, hook, lambda trainer, *args, **kwargs: act(trainer))


def fit(
    folder: Path,
    stall_after_s: StallAfter,
    *callbacks: Callback,
    data: Dataset[torch.Tensor] | None = None,
    model: LightningModule | None = None,
    loader: Mapping[str, Any] | None = None,
    validation: DataLoader[torch.Tensor] | None = None,
    **options: Any,
) -> None:
    """Train for one epoch, by default of 100 steps on the CPU, with the monitor; ``loader`` has DataLoader options."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    monitor = GPUUtilizationMonitor(stall_after_s=stall_after_s)
    options = {"devices": ranks, "strategy": "ddp" if ranks > 1 else "auto", **options}
    trainer = quiet_trainer(folder, callbacks=[monitor, *callbacks], use_distributed_sampler=False, **options)
    trainer.fit(model or Model(), DataLoader(data or Data(), batch_size=2, **(loader or {})), validation)


def save_at_step(folder: Path) -> Acting:
    """Return a callback that saves a checkpoint at one step."""

    def act(trainer: Trainer) -> None:
        if trainer.global_step == AT:
            trainer.save_checkpoint(folder / "last.ckpt")

    return Acting("on_train_batch_end", act)


# Runs that hang


def blocked_worker(folder: Path, rank: int, stall_after_s: StallAfter, **loader: Any) -> None:
    data = Data(lambda index: hang() if index == 4 * AT else None)
    fit(folder, stall_after_s, data=data, loader={"num_workers": 2, **loader})


LOCK = threading.Lock()  # of a library, which a module of the program imports


def with_lock(index: int) -> None:
    with LOCK:
        pass


def deadlocked_workers(folder: Path, rank: int, stall_after_s: StallAfter, **loader: Any) -> None:
    LOCK.acquire()  # as a library's thread may while workers are forked
    fit(folder, stall_after_s, data=Data(with_lock), loader={"num_workers": 2, **loader})


def dataset(folder: Path, rank: int, stall_after_s: StallAfter) -> None:
    fit(folder, stall_after_s, data=Data(lambda index: hang() if index == AT else None))


def silent_storage(folder: Path, rank: int, stall_after_s: StallAfter) -> None:
    """Open a pipe without a writer, which blocks like a file on a dead file server."""
    os.mkfifo(folder / "sample")

    def act(index: int) -> None:
        if index >= 2 * AT:
            (folder / "sample").read_bytes()

    fit(folder, stall_after_s, data=Data(act), loader={"num_workers": 2})


def waiting_callback(folder: Path, rank: int, stall_after_s: StallAfter) -> None:
    fit(
        folder,
        stall_after_s,
        Acting("on_train_batch_end", lambda trainer: hang() if trainer.global_step == AT else None),
    )


def swapping(folder: Path, rank: int, stall_after_s: StallAfter) -> None:
    """Hang on a machine that swaps, according to replaced kernel files."""
    proc = folder / "proc"
    (proc / "pressure").mkdir(parents=True)
    (proc / "pressure" / "memory").write_text("some avg10=97.00 avg60=80.00\nfull avg10=91.00 avg60=70.00 avg300=1\n")
    stacks._PROC = proc
    fit(folder, stall_after_s, model=Model(lambda model, step: hang() if step == AT else None))


def evaluation(folder: Path, rank: int, stall_after_s: StallAfter) -> None:
    """Hang in the sanity check."""
    validation = DataLoader(Data(lambda index: hang()), num_workers=1)
    fit(folder, stall_after_s, validation=validation, num_sanity_val_steps=1)


def swallowed_error(folder: Path, rank: int, stall_after_s: StallAfter, *, swallow: bool = True) -> None:
    def act(model: Model, step: int) -> None:
        if rank == 1 and step == AT:
            raise ValueError("corrupt sample")

    try:
        fit(folder, stall_after_s, model=Model(act))
    except ValueError:
        if not swallow:
            raise
        hang()


def uneven_batches(
    folder: Path, rank: int, stall_after_s: StallAfter, *, is_distributed: bool = False, **options: Any
) -> None:
    meet = Acting("on_train_epoch_end", lambda trainer: trainer.strategy.barrier())
    data: Dataset[torch.Tensor] = Data(length=2 * (AT if rank == 1 else 2 * AT))
    loader = {}
    if is_distributed:
        data = Data(length=6 * AT + 1)
        loader = {"sampler": DistributedSampler(data, 2, rank, drop_last=True)}
    fit(folder, stall_after_s, meet, data=data, loader=loader, **options)


def log_on_ranks(
    folder: Path, rank: int, stall_after_s: StallAfter, *, ranks: Collection[int] = (0,), **options: Any
) -> None:
    def act(model: Model, step: int) -> None:
        if rank in ranks and step == AT:
            model.log("loss", torch.tensor(1.0), **(options or {"sync_dist": True}))

    fit(folder, stall_after_s, model=Model(act))


def save_on_ranks(folder: Path, rank: int, stall_after_s: StallAfter, *, ranks: Collection[int] = (0,)) -> None:
    fit(folder, stall_after_s, *([save_at_step(folder)] if rank in ranks else []))


def stopped_rank(folder: Path, rank: int, stall_after_s: StallAfter) -> None:
    def act(model: Model, step: int) -> None:
        if rank == 1 and step == AT:
            os.kill(os.getpid(), signal.SIGSTOP)

    fit(folder, stall_after_s, model=Model(act))


def late_rank(folder: Path, rank: int, stall_after_s: StallAfter) -> None:
    """Hang while loading data on one rank; the other waits in backward."""
    fit(folder, stall_after_s, data=Data(lambda index: hang() if rank == 1 and index == 2 * AT else None))


def another_collective(folder: Path, rank: int, stall_after_s: StallAfter) -> None:
    def act(model: Model, step: int) -> None:
        if step == AT and rank == 0:
            torch.distributed.all_reduce(torch.ones(7))
        elif step == AT:
            torch.distributed.broadcast(torch.ones(4), 0)

    fit(folder, stall_after_s, model=Model(act))


# Healthy runs, in which no stall may be reported. With ``stall_after_s="auto"``, they run under shorter thresholds.

MIN_S, RARE_S = 1.5, 6.0


def scale() -> None:
    """Shorten the package's thresholds of 60 s and 450 s to 1.5 s and 6 s."""
    from lightning_gpu_tools.advice import stalls

    stalls.MIN_S, stalls.RARE_S = MIN_S, RARE_S


LONG_S = 2 * MIN_S


def first_step(folder: Path, rank: int, stall_after_s: StallAfter) -> None:
    fit(folder, stall_after_s, model=Model(lambda model, step: time.sleep(LONG_S if step == 0 else 0)))


def epoch_start(folder: Path, rank: int, stall_after_s: StallAfter) -> None:
    """Load the first batch of each epoch for LONG_S."""
    data = Data(lambda index: time.sleep(LONG_S if index == 0 else 0))
    fit(folder, stall_after_s, data=data, loader={"num_workers": 1}, max_epochs=2)


def compiling(folder: Path, rank: int, stall_after_s: StallAfter) -> None:
    """Compile during the run for longer than RARE_S."""

    def backend(graph: Any, inputs: Any) -> Any:
        time.sleep(1.2 * RARE_S)
        return graph.forward

    compiled = torch.compile(lambda x: x + 1, backend=backend)
    fit(folder, stall_after_s, model=Model(lambda model, step: compiled(torch.ones(4)) if step == AT else None))


def long_validation(folder: Path, rank: int, stall_after_s: StallAfter) -> None:
    validation = DataLoader(Data(length=2))
    fit(folder, stall_after_s, model=Model(validate=lambda i: time.sleep(LONG_S)), validation=validation)


class _Writing(TorchCheckpointIO):
    """A checkpoint plugin that writes for some seconds."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        until_s = time.monotonic() + self.seconds
        with open(path, "wb") as file:
            while time.monotonic() < until_s:
                file.seek(0)
                file.write(bytes(4 << 20))
                file.flush()
                time.sleep(0.05)


def large_checkpoint(folder: Path, rank: int, stall_after_s: StallAfter) -> None:
    """Write a checkpoint for longer than RARE_S."""
    fit(folder, stall_after_s, save_at_step(folder), plugins=[_Writing(1.2 * RARE_S)])


def debugger(folder: Path, rank: int, stall_after_s: StallAfter) -> None:
    """Wait at a breakpoint for longer than RARE_S."""
    import pdb

    keyboard, typist = os.pipe()

    def act(trainer: Trainer) -> None:
        if trainer.global_step == AT:
            threading.Timer(1.2 * RARE_S, os.write, (typist, b"continue\n")).start()
            pdb.Pdb(stdin=open(keyboard), stdout=StringIO()).set_trace()  # noqa: SIM115 - open until the process ends

    fit(folder, stall_after_s, Acting("on_train_batch_end", act))


def suspended(folder: Path, rank: int, stall_after_s: StallAfter) -> None:
    """Suspend the process for 8 seconds, as Ctrl-Z or a scheduler does."""

    def act(model: Model, step: int) -> None:
        if step == AT:
            process = os.getpid()
            if not os.fork():
                os.kill(process, signal.SIGSTOP)
                time.sleep(8.0)
                os.kill(process, signal.SIGCONT)
                os._exit(0)
            os.wait()

    fit(folder, stall_after_s, model=Model(act))


def slow_data(folder: Path, rank: int, stall_after_s: StallAfter) -> None:
    """Double the loading time of a batch three times."""
    waits = {2 * AT: 1.0, 2 * AT + 2: 2.0, 2 * AT + 4: 4.0}
    scale_s = 0.9 * MIN_S
    fit(folder, stall_after_s, data=Data(lambda index: time.sleep(scale_s * waits.get(index, 0.0)), length=80))


def outside_of_the_loop(folder: Path, rank: int, stall_after_s: StallAfter) -> None:
    """Wait after a loop, as in a notebook before the next cell runs."""
    layer = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-6)
    with watch(folder=str(folder), stall_after_s=stall_after_s) as run:
        for _ in range(2):
            for batch in run.batches(DataLoader(Data(), batch_size=2)):
                layer(batch).square().mean().backward()
                optimizer.step()
            time.sleep(1.2 * RARE_S)


def checkpoint_of_rank_zero(folder: Path, rank: int, stall_after_s: StallAfter) -> None:
    """Save a checkpoint on rank 0, while rank 1 waits."""

    class Slow(TorchCheckpointIO):
        def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
            time.sleep(LONG_S)

    fit(folder, stall_after_s, save_at_step(folder), plugins=[Slow()])


@dataclass(frozen=True)
class Case:
    """A run and its expected stall.

    Attributes:
        train: Trains in a folder, as a rank, with a value for ``stall_after_s``.
        cause: Expected cause; ``None`` = no stall.
        words: Text that the reported reason must contain.
        ranks: Number of processes.
        rank: The rank that the report must blame.
    """

    train: Callable[[Path, int, StallAfter], None]
    cause: str | None = None
    words: str = ""
    ranks: int = 1
    rank: int | None = None


STALLS = {
    "a dataset that blocks in one worker": Case(blocked_worker, "blocked_worker", "waits for a lock in hang"),
    "workers dead-locked after fork": Case(deadlocked_workers, "blocked_worker", "All 2 workers wait for a lock"),
    "a dataset that blocks in the training process": Case(dataset, "dataset", "waits for a lock in hang"),
    "storage that does not answer": Case(silent_storage, "storage", "waits for storage in act"),
    "a callback that waits": Case(waiting_callback, "code", "The training process waits for a lock in hang"),
    "swap thrash": Case(swapping, "swap", "every task waited for memory 91%"),
    "an error swallowed on one rank": Case(
        swallowed_error, "rank_behind", "Rank 1 stopped training at step 13 (stopped by ValueError", 2, 1
    ),
    "a rank that was stopped": Case(stopped_rank, "rank_behind", "Rank 1 (PID ", 2, 1),
    "a rank that waits for data": Case(
        late_rank, "rank_behind", "rank 1, at step 13, while waiting for data. The training process itself", 2, 1
    ),
    "uneven numbers of batches": Case(uneven_batches, "collective", "rank 1 in barrier in <lambda> (", 2),
    "sync_dist on one rank": Case(log_on_ranks, "collective", "rank 0 in barrier in act (", 2),
    "a checkpoint on one rank": Case(save_on_ranks, "collective", "rank 0 in barrier in act (", 2),
    "another collective on one rank": Case(
        another_collective, "collective", "rank 1 called broadcast of 4 float32 numbers", 2
    ),
}
HAS_RECORD = hasattr(torch._C._distributed_c10d, "_dump_fr_trace_json")  # torch 2.8 and later record gloo's calls
if not HAS_RECORD:
    del STALLS["another collective on one rank"]
HEALTHY = {
    "a slow first step": Case(first_step),
    "slow starts of epochs": Case(epoch_start),
    "torch.compile in mid-run": Case(compiling),
    "long batches of validation": Case(long_validation),
    "a large checkpoint": Case(large_checkpoint),
    "a breakpoint": Case(debugger),
    "a process that was stopped for a while": Case(suspended),
    "slower and slower data": Case(slow_data),
    "code between two loops": Case(outside_of_the_loop),
    "a checkpoint that only rank 0 writes": Case(checkpoint_of_rank_zero, ranks=2),
}
