"""Trainings of several ranks over NCCL with one known cause each: what does the advisor say of them?

    python benchmarks/diagnosis_of_ranks.py [--ranks 2] [--output results.json]

Each rank has a GPU; simulated ones do, and are what each supported torch is tried on:

    python -m lightning_gpu_tools.simulated -n 4 -- python benchmarks/diagnosis_of_ranks.py --ranks 4

A GPU that waits for another one in NCCL is busy, so nothing but the ranks' own times tells which of them is late.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import logging
import os
import signal
import socket
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from diagnosis_suite import in_words
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from machine import describe_machine
from torch.utils.data import DataLoader, Dataset
from toys import occupy

from lightning_gpu_tools import GPUUtilizationAdvisor, GPUUtilizationMonitor, load_report

SLOW_RANK = 1
LATE_S = 0.030
GPU_S = 0.010  # of a forward pass


def be_late(seconds: float = LATE_S) -> None:
    time.sleep(seconds)


class Samples(Dataset):
    """Samples that take the slow rank some seconds each."""

    def __init__(self, late_s: float = 0.0) -> None:
        self.late_s = late_s

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.late_s and os.environ["RANK"] == str(SLOW_RANK):
            be_late(self.late_s)
        return torch.ones(32)


class Model(LightningModule):
    """Takes the GPU some milliseconds.

    Args:
        part: In which part of a step the slow rank is late.
        more: The number of further weights whose gradients are sent.
        gpu_s: How long a forward pass takes the GPU.
    """

    def __init__(self, part: str = "", more: int = 1, gpu_s: float = GPU_S) -> None:
        super().__init__()
        self.part, self.more, self.gpu_s = part, more, gpu_s
        self.layer = torch.nn.Linear(32, 32)
        self.unused = torch.nn.Linear(32, 1)

    def configure_model(self) -> None:
        self.large = torch.nn.Parameter(torch.empty(self.more, device=self.trainer.strategy.root_device))

    def late_in(self, part: str) -> None:
        if part == self.part and self.global_rank == SLOW_RANK:
            be_late()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        occupy(self.gpu_s)
        self.late_in("forward")
        if self.part == "uneven" and batch_idx % self.trainer.world_size == self.global_rank:
            be_late()
        loss = self.layer(batch).square().mean() + 0.0 * self.large.sum()
        if self.part == "unused" or not self.trainer.strategy.__class__.__name__.startswith("DDP"):
            self.late_in("unused")
        else:
            loss = loss + 0.0 * self.unused(batch).sum()
        loss.register_hook(lambda gradient: self.late_in("backward"))
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        if self.part == "validation" and self.global_rank == SLOW_RANK:
            be_late(5 * LATE_S)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(self.parameters(), lr=1e-9)
        optimizer.register_step_post_hook(lambda *_: self.late_in("optimizer"))
        return optimizer


def send_slowly(state, bucket):  # DDP refuses annotations that are text
    """Send a bucket 40 times, as over a slower network."""
    for _ in range(39):
        torch.distributed.all_reduce(bucket.buffer(), async_op=True)
    sent = torch.distributed.all_reduce(bucket.buffer(), async_op=True).get_future()
    return sent.then(lambda future: future.value()[0])


class LateCallback(Callback):
    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_rank == SLOW_RANK:
            be_late()


class LateCheckpoint(ModelCheckpoint):
    """A checkpoint of the slow rank's own, as of its part of a sharded one."""

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_rank == SLOW_RANK and trainer.global_step % 5 == 0:
            be_late(5 * LATE_S)


@dataclass(frozen=True)
class Case:
    """A training and what must be said of it first; and the function whose line must be named."""

    known: tuple[str, ...]
    model: Callable[[], LightningModule] = Model
    line: str = field(default="", kw_only=True)
    late_data_s: float = field(default=0.0, kw_only=True)
    callbacks: Sequence[Callable[[], Callback]] = field(default=(), kw_only=True)
    options: dict[str, Any] = field(default_factory=dict, kw_only=True)
    steps: int = field(default=150, kw_only=True)


LATE = partial(Case, line="be_late")
# Four ranks on two cores are in each other's way.
CONTENTION = ("cpu_contention other_programs", "cpu_contention own_threads")
CASES = {
    "slow forward": LATE(("straggler forward",), partial(Model, "forward")),
    "slow data": LATE(("straggler data_loading",), late_data_s=LATE_S),
    "slow checkpoint": LATE(("straggler checkpoint",), callbacks=[LateCheckpoint]),
    "slow validation": LATE(
        ("straggler validation",), partial(Model, "validation"),
        options={"val_check_interval": 5, "limit_val_batches": 1},
    ),
    "slow callback": LATE(("straggler callback/LateCallback",), callbacks=[LateCallback]),
    "slow backward": LATE(("straggler backward",), partial(Model, "backward")),
    "slow optimizer": LATE(("straggler optimizer",), partial(Model, "optimizer")),
    "slow forward, unused parameters": LATE(
        ("straggler forward",), partial(Model, "unused"), options={"strategy": "ddp_find_unused_parameters_true"}
    ),
    "slow forward, FSDP": LATE(("straggler forward",), partial(Model, "forward"), options={"strategy": "fsdp"}),
    "slow forward, accumulated gradients": LATE(
        ("straggler forward",), partial(Model, "forward"), options={"accumulate_grad_batches": 4}
    ),
    "much to send": Case(
        ("communication",), partial(Model, more=17_000_000),
        options={"strategy": DDPStrategy(ddp_comm_hook=send_slowly, gradient_as_bucket_view=True)},
    ),
    "each rank slow in turn": Case(("communication", "host_work"), partial(Model, "uneven")),
    # Where a rank waits for a core, the others wait for that rank.
    "no slow rank": Case(("healthy", *CONTENTION), partial(Model, gpu_s=4 * GPU_S), steps=100),
}  # fmt: skip


def train(case: Case, ranks: int, folder: str) -> dict[str, Any] | None:
    """Train as one of the ranks; return what the advisor says, on the first one."""
    advisor = GPUUtilizationAdvisor(min_seconds=1.0)
    trainer = Trainer(
        callbacks=[GPUUtilizationMonitor(interval_s=0.1), advisor, *(make() for make in case.callbacks)],
        **{
            "accelerator": "gpu", "devices": ranks, "strategy": "ddp", "max_steps": case.steps, "logger": False,
            "enable_checkpointing": bool(case.callbacks) and case.callbacks[0] is LateCheckpoint,
            "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0,
            "default_root_dir": folder, **case.options,
        },
    )  # fmt: skip
    trainer.fit(case.model(), DataLoader(Samples(case.late_data_s), batch_size=1), DataLoader(Samples(), batch_size=1))
    if trainer.global_rank:
        return None
    diagnosis = advisor.diagnosis
    assert diagnosis is not None
    # That threads wait for cores is true of a busy machine, whatever the training does.
    own = replace(diagnosis, findings=tuple(one for one in diagnosis.findings if one.cause != "cpu_contention"))
    evidence = dict(own.findings[0].evidence) if own.findings else {}
    return {
        "said": in_words(own) if own.findings else "healthy",
        "first": in_words(diagnosis),
        "rank": evidence.get("rank"),
        "names_line": f"in {case.line}" in str(evidence.get("source_lines", "")),
        "why": diagnosis.why,
        "next": diagnosis.next_step,
        "findings": [{"cause": one.cause, "share": one.share, **one.evidence} for one in diagnosis.findings],
    }


def answer(case: Case, ranks: int, folder: str) -> dict[str, Any]:
    """Train in a process for each rank, forked so that nothing is imported again."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(ranks)}
    file = Path(folder, "answer.json")
    children = set()
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            os.environ.update(job, RANK=str(rank), LOCAL_RANK=str(rank), NODE_RANK="0")
            said = train(case, ranks, folder)
            if said is not None:
                file.write_text(json.dumps(said))
            os._exit(0)
        children.add(child)
    while children:
        child, status = os.wait()
        children.remove(child)
        if status:
            print(f"A rank ended with exit status {os.waitstatus_to_exitcode(status)}", file=sys.stderr, flush=True)
        for other in children if status else ():
            os.kill(other, signal.SIGKILL)  # it would wait for the one that failed
    return json.loads(file.read_text())


def is_right(case: Case, said: dict[str, Any]) -> bool:
    """Return whether cause, rank and line are the known ones."""
    is_known = bool({said["said"], said["first"]} & {*case.known})
    return is_known and (not case.line or (said["rank"] == SLOW_RANK and said["names_line"]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="each with a GPU (default: %(default)s)")
    parser.add_argument("--only", nargs="+", choices=CASES, default=[], help="these trainings alone")
    parser.add_argument("--reports", type=Path, help="keep the reports in folders here")
    parser.add_argument("--output", type=Path, help="also write the result as JSON")
    args = parser.parse_args()
    faulthandler.enable()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    rows = []
    for name in args.only or CASES:
        case = CASES[name]
        with tempfile.TemporaryDirectory() as temporary:
            folder = str(args.reports / name) if args.reports else temporary
            os.makedirs(folder, exist_ok=True)
            began_s = time.perf_counter()
            said = answer(case, args.ranks, folder)
            report = load_report(folder)
        rows.append({"training": name, "known": case.known, "right": is_right(case, said), **said})
        print(
            f"{'right' if rows[-1]['right'] else 'WRONG':<6}{name}: known {' or '.join(case.known)}, said "
            f"{said['said']} of rank {said['rank']}{', with the line' * said['names_line']}"
            f" ({time.perf_counter() - began_s:.0f} s, {len(report.ranks)} ranks)"
        )
        print(f"      {said['why']}", flush=True)
    if args.output:
        result = {
            "benchmark": "diagnosis_of_ranks",
            "ranks": args.ranks,
            "machine": describe_machine(),
            "answers": rows,
        }
        args.output.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if all(row["right"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
