"""The ranks of a job as real processes, forked from a server that has imported Lightning once for all of them."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import fake_driver
import quiet_kernel
import torch
from launched_jobs import free_port
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.io import TorchCheckpointIO
from trainings import Model, Raise, Samples, Spending, loader, quiet_trainer

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


def train_on_two_nodes(folder: Path, rank: int, *, slower_s: float, failing_rank: int | None) -> None:
    """Train two epochs of 50 steps.

    Args:
        folder: Where to log.
        rank: This one.
        slower_s: How long the second rank takes to load a sample.
        failing_rank: The rank that fails at step 70.
    """
    trainer = quiet_trainer(
        folder,
        callbacks=[
            GPUUtilizationMonitor(interval_s=0.02, devices="all"),
            GPUUtilizationAdvisor(min_seconds=1e9 if rank else 0.1, min_steps=20),  # rank 0 alone decides when to warn
            *([Raise(at_step=70)] if rank == failing_rank else ()),
        ],
        logger=CSVLogger(folder, version=0),
        devices=1,
        num_nodes=2,
        strategy="ddp",
        max_epochs=2,
        log_every_n_steps=10,
    )
    trainer.fit(Model(), loader(Samples(2 * 50, time.sleep, slower_s * rank)))


class _SlowSaving(TorchCheckpointIO):
    """Takes its time to save on rank 0, for which the others wait."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        time.sleep(self.seconds)


def occupy(seconds: float) -> None:
    """Keep the GPU busy at least so long, and the host for hardly any time."""
    torch.cuda._sleep(int(seconds * 2e9))  # in cycles, of which no GPU makes more in a second


class _Slow(Model):
    """A model whose GPU takes its time, or without one its host.

    Ranks meet in its forward pass, too: for the buffers of its BatchNorm and, without a GPU, to log a metric.
    """

    def __init__(self, forward_s: float, backward_s: float, optimizer_s: float, *, on_gpu: bool) -> None:
        super().__init__()
        self.spend, self.meets = (occupy, False) if on_gpu else (time.sleep, True)
        self.layer = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
        self.forward_s, self.backward_s, self.optimizer_s = forward_s, backward_s, optimizer_s

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.spend(self.forward_s)
        output = self.layer(batch)
        output.register_hook(lambda gradient: self.spend(self.backward_s))
        loss = output.square().mean()
        self.log("loss", loss, sync_dist=self.meets)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = super().configure_optimizers()
        optimizer.register_step_post_hook(lambda *_: self.spend(self.optimizer_s))
        return optimizer


# A step takes this long on each rank, and that much longer on the slow one.
_STEP_S, _SLOWER_S = 0.004, 0.025


def train_slow_ranks(
    folder: Path, rank: int, *, slow_ranks: Mapping[str, int | None], steps: int = 60, on_gpu: bool = False
) -> None:
    """Train once for each phase, and have rank 0 write which rank is blamed for what.

    Args:
        folder: Where to write ``blamed.json``.
        rank: This one.
        slow_ranks: By the phase in which it is slow.
        steps: How many each time.
        on_gpu: Whether each rank has a GPU.
    """
    blamed = {}
    for phase, slow_rank in slow_ranks.items():
        slower = {phase: _SLOWER_S if rank == slow_rank else 0.0}
        advisor = GPUUtilizationAdvisor(min_seconds=0.1, min_steps=20)
        callbacks = [
            GPUUtilizationMonitor(report=False),
            advisor,
            Spending(time.sleep, "on_train_batch_end", slower.get("callback", 0.0)),
            *([ModelCheckpoint(folder, every_n_train_steps=5, save_top_k=-1)] if phase == "checkpoint" else ()),
        ]
        trainer = quiet_trainer(
            folder,
            callbacks=callbacks,
            accelerator="cuda" if on_gpu else "cpu",
            devices=int(os.environ["WORLD_SIZE"]),
            strategy="ddp",
            max_steps=steps,
            enable_checkpointing=phase == "checkpoint",
            plugins=[_SlowSaving(5 * slower.get("checkpoint", 0.0))],
        )
        model = _Slow(
            _STEP_S + slower.get("forward", 0.0),
            slower.get("backward", 0.0),
            slower.get("optimizer", 0.0),
            on_gpu=on_gpu,
        )
        samples = Samples(10_000, time.sleep, slower.get("data_loading", 0.0) / 2)
        trainer.fit(model, loader(samples, batch_size=2))
        assert advisor.diagnosis is not None
        # A busy machine may slow a rank down by less.
        stragglers = [
            finding.evidence
            for finding in advisor.diagnosis.findings
            if finding.cause == "straggler" and finding.evidence["behind_ms_per_step"] > 500 * _SLOWER_S
        ]
        blamed[phase] = [[one["rank"], str(one.get("phase")).partition("/")[0]] for one in stragglers]
    if rank == 0:
        (folder / "blamed.json").write_text(json.dumps(blamed))
