"""The ranks of a job as real processes, forked from a server that has imported Lightning once for all of them."""

from __future__ import annotations

import multiprocessing
import os
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import fake_driver
from lightning.pytorch.loggers import CSVLogger
from trainings import Model, Raise, Samples, loader, quiet_trainer

from lightning_gpu_tools import GPUUtilizationAdvisor, GPUUtilizationMonitor

processes = multiprocessing.get_context("forkserver")
# Not this module itself: until Python 3.13 the server does not look where this process does for modules.
processes.set_forkserver_preload(
    [
        "lightning.pytorch",
        "matplotlib.figure",
        "lightning_gpu_tools.trainer.gpu_utilization_advisor",
        "lightning_gpu_tools.trainer.gpu_utilization_monitor",
        "lightning_gpu_tools.reports.plot",
        "lightning_gpu_tools.trainer.fit_report",
    ]
)


def train_ranks(
    folder: Path, *, nodes: int = 1, machines: Sequence[fake_driver.Driver] = (), **options: Any
) -> list[subprocess.CompletedProcess[str]]:
    """Let two ranks train together, as torchrun starts them, and return how each of them ended.

    Args:
        folder: Where each writes what it prints, and below which it logs.
        nodes: On how many nodes they are.
        machines: The fake driver of each node.
        **options: Of :func:`train`.
    """
    return run_ranks(folder, train, nodes=nodes, machines=machines, options={"nodes": nodes, **options})


def run_ranks(
    folder: Path,
    function: Callable[..., None],
    *,
    nodes: int = 1,
    machines: Sequence[fake_driver.Driver] = (),
    options: Mapping[str, Any] | None = None,
) -> list[subprocess.CompletedProcess[str]]:
    """Let two ranks call ``function(folder, rank, **options)``, and return how each of them ended."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    started = []
    for rank in range(2):
        place = {"RANK": rank, "LOCAL_RANK": rank % (2 // nodes), "GROUP_RANK": rank // (2 // nodes), "WORLD_SIZE": 2}
        env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "test"}
        env |= {name: str(number) for name, number in place.items()}
        if machines:
            env |= machines[rank].variables()
        process = processes.Process(target=_run, args=(folder, env, function, options or {}))
        process.start()
        started.append(process)
    for process in started:
        process.join(100)
        assert process.exitcode is not None, "it hangs"
    texts = [[(folder / f"{name}{rank}").read_text() for name in ("stdout", "stderr")] for rank in range(2)]
    return [subprocess.CompletedProcess("", p.exitcode, *text) for p, text in zip(started, texts, strict=True)]


def _run(folder: Path, env: Mapping[str, str], function: Callable[..., None], options: Mapping[str, Any]) -> None:
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(folder / f"{name}{env['RANK']}", os.O_WRONLY | os.O_CREAT)
        os.dup2(file, descriptor)
    os.environ.update(env)
    multiprocessing.set_start_method("fork", force=True)  # of their workers, which the server would start in seconds
    fake_driver.install()
    function(folder, int(env["RANK"]), **options)


def train(
    folder: Path,
    rank: int,
    *,
    nodes: int,
    sample_s: Sequence[float],
    failing_rank: int | None = None,
    min_seconds: Sequence[float] = (0.1, 0.1),
) -> None:
    """Train two epochs of 40 steps.

    Args:
        folder: Where to log.
        rank: This one.
        nodes: How many there are.
        sample_s: How long each rank takes to load a sample.
        failing_rank: The rank that fails at step 45.
        min_seconds: Of each rank's advisor.
    """
    monitor = GPUUtilizationMonitor(interval_s=0.02, devices="all" if nodes > 1 else "trainer")
    trainer = quiet_trainer(
        folder,
        callbacks=[
            monitor,
            GPUUtilizationAdvisor(min_seconds=min_seconds[rank], min_steps=20),
            *([Raise(at_step=45)] if rank == failing_rank else ()),
        ],
        logger=CSVLogger(folder, version=0),
        devices=2 // nodes,
        num_nodes=nodes,
        strategy="ddp",
        max_epochs=2,
        log_every_n_steps=10,
    )
    trainer.fit(Model(), loader(Samples(2 * 40, time.sleep, sample_s[rank])))
