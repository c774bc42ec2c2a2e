"""Runs of several ranks over NCCL with one known cause each: does the advisor name it?

    python benchmarks/diagnosis_of_ranks.py [--ranks 2] [--output results.json]

Each rank needs a GPU. Every supported torch is tested on simulated GPUs:

    python -m lightning_gpu_tools.simulated -n 4 -- python benchmarks/diagnosis_of_ranks.py --ranks 4

A GPU that waits for another one in NCCL looks busy, so only the ranks' own times show which rank is late.
"""

import faulthandler
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from diagnosis_suite import in_words
from harness import be_quiet, exit_code, free_port, make_parser, print_answer, quiet_trainer, write_result
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader
from toys import Slow, occupy

from lightning_gpu_tools import GPUUtilizationAdvisor, GPUUtilizationMonitor, load_report

SLOW_RANK = 1
LATE_S = 0.030
GPU_S = 0.010  # GPU time of a forward pass


def be_late(seconds: float = LATE_S) -> None:
    time.sleep(seconds)


class Model(LightningModule):
    """A small model with one late rank.

    Args:
        part: The part of a step in which the slow rank is late.
        more: Number of additional weights whose gradients are sent.
        gpu_s: GPU time of a forward pass.
    """

    def __init__(self, part: str = "", more: int = 1, gpu_s: float = GPU_S) -> None:
        super().__init__()
        self.part, self.more, self.gpu_s = part, more, gpu_s
        self.layer = torch.nn.Linear(4, 32)
        self.unused = torch.nn.Linear(4, 1)

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


def send_slowly(state, bucket):  # no annotations: DDP refuses those that are strings
    """Send each bucket 40 times, as if the network were slower."""
    for _ in range(39):
        torch.distributed.all_reduce(bucket.buffer(), async_op=True)
    sent = torch.distributed.all_reduce(bucket.buffer(), async_op=True).get_future()
    return sent.then(lambda future: future.value()[0])


class LateCallback(Callback):
    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_rank == SLOW_RANK:
            be_late()


class LateCheckpoint(ModelCheckpoint):
    """A checkpoint callback that is slow on one rank, as when that rank saves a shard."""

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_rank == SLOW_RANK and trainer.global_step % 5 == 0:
            be_late(5 * LATE_S)


@dataclass(frozen=True)
class Case:
    """A run, the accepted answers, and the function whose line the first finding must name."""

    known: tuple[str, ...]
    model: Callable[[], LightningModule] = Model
    line: str = field(default="", kw_only=True)
    late_data_s: float = field(default=0.0, kw_only=True)
    callbacks: Sequence[Callable[[], Callback]] = field(default=(), kw_only=True)
    options: dict[str, Any] = field(default_factory=dict, kw_only=True)
    steps: int = field(default=150, kw_only=True)


LATE = partial(Case, line="be_late")
# Four ranks on two cores compete for them, and wait for the one that has none.
CONTENTION = ("cpu_contention other_programs", "cpu_contention own_threads", "communication")
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
    "no slow rank": Case(("healthy", *CONTENTION), partial(Model, gpu_s=4 * GPU_S), steps=100),
}  # fmt: skip


def train(case: Case, ranks: int, folder: str) -> dict[str, Any] | None:
    """Train one of the ranks, and return the advisor's answer on rank 0."""
    advisor = GPUUtilizationAdvisor(min_seconds=1.0)
    options = {
        "accelerator": "gpu",
        "devices": ranks,
        "strategy": "ddp",
        "max_steps": case.steps,
        "callbacks": [GPUUtilizationMonitor(interval_s=0.1), advisor, *(make() for make in case.callbacks)],
        "enable_checkpointing": LateCheckpoint in case.callbacks,
    }
    trainer = quiet_trainer(folder, **{**options, **case.options})
    data = Slow(case.late_data_s, be_late, slow_rank=SLOW_RANK)
    trainer.fit(case.model(), DataLoader(data), DataLoader(Slow()))
    if trainer.global_rank:
        return None
    diagnosis = advisor.diagnosis
    assert diagnosis is not None
    # On a busy machine, threads wait for cores whatever the run does.
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
    """Train in one forked process per rank, which need not import torch again."""
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
    file = Path(folder, "answer.json")
    children = set()
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            os.environ.update(job, RANK=str(rank), LOCAL_RANK=str(rank), NODE_RANK="0")
            given = train(case, ranks, folder)
            if given is not None:
                file.write_text(json.dumps(given))
            os._exit(0)
        children.add(child)
    while children:
        child, status = os.wait()
        children.remove(child)
        if status:
            print(f"A rank ended with exit status {os.waitstatus_to_exitcode(status)}", file=sys.stderr, flush=True)
        for other in children if status else ():
            os.kill(other, signal.SIGKILL)  # it would wait for the failed rank
    return json.loads(file.read_text())


def is_right(case: Case, given: dict[str, Any]) -> bool:
    """Return whether cause, rank, and line are as expected."""
    is_known = bool({given["said"], given["first"]} & {*case.known})
    return is_known and (not case.line or (given["rank"] == SLOW_RANK and given["names_line"]))


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks and GPUs (default: %(default)s)")
    parser.add_argument("--only", nargs="+", choices=CASES, default=[], help="only these runs")
    args = parser.parse_args()
    faulthandler.enable()
    be_quiet()
    rows = []
    for name in args.only or CASES:
        case = CASES[name]
        with tempfile.TemporaryDirectory() as folder:
            began_s = time.perf_counter()
            given = answer(case, args.ranks, folder)
            took_s, reported = time.perf_counter() - began_s, len(load_report(folder).ranks)
        rows.append({"training": name, "known": case.known, "right": is_right(case, given), **given})
        line = "with" if given["names_line"] else "without"
        print_answer(
            rows[-1],
            f"rank {given['rank']}, {line} the line ({took_s:.0f} s, {reported} ranks in the report)",
            given["why"],
        )
    write_result(args.output, "diagnosis_of_ranks", ranks=args.ranks, answers=rows)
    return exit_code(rows)


if __name__ == "__main__":
    sys.exit(main())
