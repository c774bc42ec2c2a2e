"""The ranks of a job as real processes, forked from a server that has imported Lightning once for all of them."""

import multiprocessing
import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import fake_driver
import quiet_kernel
from launched_jobs import free_port
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger
from trainings import Boom, Model, Samples, loader, quiet_trainer

from lightning_gpu_tools import GPUUtilizationAdvisor, GPUUtilizationMonitor, load_report
from lightning_gpu_tools.errors import ReportError
from lightning_gpu_tools.types import Report

processes = multiprocessing.get_context("forkserver")
# Not this module itself: until Python 3.13 the server does not look where this process does for modules.
processes.set_forkserver_preload(
    [
        "lightning.pytorch",
        "matplotlib.figure",
        "lightning_gpu_tools.trainer.gpu_utilization",
        "lightning_gpu_tools.runs.run_report",
    ]
)


def start_ranks(
    folder: Path,
    function: Callable[..., None],
    *,
    ranks: int = 2,
    nodes: int = 1,
    machines: Sequence[fake_driver.Driver] = (),
    options: Mapping[str, Any] | None = None,
) -> list[Any]:
    """Let ranks call ``function(folder, rank, **options)``, and return their processes.

    One rank alone is a program that nobody has launched as a part of a job.
    """
    port, started = free_port(), []
    for rank in range(ranks):
        node, local_rank = divmod(rank, ranks // nodes)
        place = {"RANK": rank, "LOCAL_RANK": local_rank, "GROUP_RANK": node, "WORLD_SIZE": ranks}
        place |= {"LOCAL_WORLD_SIZE": ranks // nodes}
        env = {name: str(number) for name, number in place.items() if ranks > 1}
        if ranks > 1:
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "test"}
            env["TORCH_FR_BUFFER_SIZE"] = "2000"  # as docs/hanging_training.md says for torch before 2.13
        if machines:
            env |= machines[rank].variables()
        process = processes.Process(target=_run, args=(folder, rank, env, function, options or {}))
        process.start()
        started.append(process)
    return started


def run_ranks(folder: Path, function: Callable[..., None], **options: Any) -> list[subprocess.CompletedProcess[str]]:
    """Do the same as ``start_ranks``, and return how each rank ended."""
    started = start_ranks(folder, function, **options)
    for process in started:
        process.join(150)
        assert process.exitcode is not None, "it hangs"
    texts = [[(folder / f"{name}{rank}").read_text() for name in ("stdout", "stderr")] for rank in range(len(started))]
    return [subprocess.CompletedProcess("", p.exitcode, *text) for p, text in zip(started, texts, strict=True)]


def _run(
    folder: Path, rank: int, env: Mapping[str, str], function: Callable[..., None], options: Mapping[str, Any]
) -> None:
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(folder / f"{name}{rank}", os.O_WRONLY | os.O_CREAT)
        os.dup2(file, descriptor)
    os.environ.update(env)
    multiprocessing.set_start_method("fork", force=True)  # of their workers, which the server would start in seconds
    fake_driver.install()
    quiet_kernel.install(setattr, folder)
    function(folder, rank, **options)


class OnceReported(Callback):
    """Acts as soon as the report that rank 0 has written so far says something."""

    def __init__(self, folder: Path, says: Callable[[Report], Any], act: Callable[[], Any]) -> None:
        self.folder, self.says, self.act = folder, says, act

    def on_train_batch_end(self, *args: Any) -> None:
        with suppress(ReportError):  # it has not been written yet
            if self.says(load_report(self.folder)):
                self.act()


def fail() -> None:
    raise Boom


def train_on_two_nodes(folder: Path, rank: int, *, slower_s: float, fails: bool) -> None:
    """Train two epochs of 50 steps; with ``fails``, until the second rank fails, but at most 100 of them.

    ``slower_s`` is how much longer the second rank takes to load a sample.
    """
    trainer = quiet_trainer(
        folder,
        callbacks=[
            GPUUtilizationMonitor(interval_s=0.02, devices="all"),
            GPUUtilizationAdvisor(min_seconds=1e9 if rank else 0.1, min_steps=20),  # rank 0 alone decides when to warn
            *([OnceReported(folder, lambda report: report.ranks, fail)] if fails and rank == 1 else ()),
        ],
        logger=CSVLogger(folder, version=0),
        devices=1,
        num_nodes=2,
        strategy="ddp",
        max_epochs=100 if fails else 2,
        log_every_n_steps=10,
    )
    trainer.fit(Model(), loader(Samples(2 * 50, time.sleep, slower_s * rank)))
