"""Trainings whose GPUs are idle while another job waits: what their monitor says, and how their ranks end."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cpu_as_cuda
from fake_driver import Driver, gpu
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from rank_processes import start_ranks
from trainings import Model, Samples, loader, quiet_trainer

from lightning_gpu_tools import FreeMemoryCUDAAccelerator, GPUUtilizationMonitor
from lightning_gpu_tools.selection import ranking, yielding

WAIT = "from lightning_gpu_tools import select_gpus; select_gpus(exclusive=True, wait=60)"


class Idle(Model):
    """A model that stops in its third step, until it gets SIGTERM, or a file is there, or a minute is over."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 2:
            (self.folder / f"idle{self.global_rank}").touch()
            end_s = time.monotonic() + 60
            while not (self.trainer.received_sigterm or (self.folder / "go on").exists() or time.monotonic() > end_s):
                time.sleep(0.02)
        return super().training_step(batch, batch_idx)


def train(folder: Path, rank: int, *, claims: str, callback: Callable[..., Any], **options: Any) -> None:
    """Train on as many GPUs as there are ranks, with looks at those who wait that come fast."""
    os.environ["LIGHTNING_GPU_TOOLS_CLAIMS_DIR"] = claims.format(rank=rank)
    yielding.CHECK_EVERY_S = yielding.POLL_EVERY_S = 0.1
    yielding.REMIND_AFTER_S = 0.3
    ranking.MIN_YIELD_AFTER_S = 0.0
    cpu_as_cuda.install()
    trainer = quiet_trainer(
        folder,
        accelerator=FreeMemoryCUDAAccelerator(exclusive=True, **options),
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
        strategy="ddp",
        callbacks=[callback(folder)],
        enable_checkpointing=callback is checkpoint,
    )
    trainer.fit(Idle(folder), loader(Samples(8)))


def monitor(folder: Path) -> GPUUtilizationMonitor:
    return GPUUtilizationMonitor(interval_s=0.1, report=False)


def checkpoint(folder: Path) -> OnExceptionCheckpoint:
    return OnExceptionCheckpoint(folder, "saved")


@contextmanager
def ranks(folder: Path, **options: Any) -> Iterator[list[Any]]:
    """Processes that train, until the end of the block."""
    started = start_ranks(folder, train, **options)
    try:
        yield started
    finally:
        for rank in started:
            rank.kill()


@contextmanager
def waiting(claims: Path, ranks: int) -> Iterator[subprocess.Popen[str]]:
    """A job in the queue for a GPU, once so many ranks are idle."""
    deadline = time.monotonic() + 60
    environment = {**os.environ, "LIGHTNING_GPU_TOOLS_CLAIMS_DIR": str(claims)}
    while len(list(claims.parent.glob("idle*"))) < ranks:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    with subprocess.Popen([sys.executable, "-c", WAIT], env=environment, stderr=-1, text=True) as waiter:
        try:
            yield waiter
        finally:
            waiter.kill()


def until_said(file: Path, text: str) -> None:
    deadline = time.monotonic() + 60
    while not file.exists() or text not in file.read_text():
        assert time.monotonic() < deadline, file.read_text()
        time.sleep(0.02)


def test_the_monitor_tells_who_waits_once(driver: Driver, tmp_path: Path) -> None:
    driver.gpus = [gpu(sample_period_s=0.05)]
    options = {"claims": str(tmp_path / "claims"), "callback": monitor}
    job = ranks(tmp_path, ranks=1, machines=[driver], options=options)
    with job as (training,), waiting(tmp_path / "claims", 1) as waiter:
        until_said(tmp_path / "stderr0", "use --yield-after 2h next time.")
        driver.forget_calls()
        while sum(call.thread == "lightning-gpu-tools-sampler" for call in driver.calls()) < 100:
            time.sleep(0.02)
        (tmp_path / "go on").touch()
        training.join(60)
        assert training.exitcode == 0
    (line,) = (line for line in (tmp_path / "stderr0").read_text().splitlines() if "has waited" in line)
    assert f"(pid {waiter.pid}) has waited " in line
    assert " for this GPU, which you have left idle for " in line


def test_all_ranks_end_as_lightning_ends_them(driver: Driver, tmp_path: Path) -> None:
    driver.gpus = [gpu(sample_period_s=0.05), gpu(sample_period_s=0.05)]
    options = {"claims": str(tmp_path / "claims"), "callback": checkpoint, "yield_after": 0.3}
    job = ranks(tmp_path, machines=[driver, driver], options=options)
    with job as started, waiting(tmp_path / "claims", 2) as waiter:
        assert waiter.wait(60) == 0
        for rank in started:
            rank.join(60)
    assert (tmp_path / "saved.ckpt").exists()
    said = [(tmp_path / f"stderr{rank}").read_text() for rank in (0, 1)]
    assert [text.count("Received SIGTERM") for text in said] == [1, 1]
    assert sorted(text.count("has waited") for text in said) == [0, 1]
    assert sorted(text.count("This job gets SIGTERM once") for text in said) == [0, 1]


def test_a_job_on_several_machines_goes_on(driver: Driver, tmp_path: Path) -> None:
    driver.gpus = [gpu(sample_period_s=0.05)]
    options = {"claims": f"{tmp_path}/claims{{rank}}", "callback": checkpoint, "yield_after": 0.3}
    job = ranks(tmp_path, nodes=2, machines=[driver, driver], options=options)
    with job as started, waiting(tmp_path / "claims1", 2):
        until_said(tmp_path / "stderr1", "Only 1 of the 2 ranks can get SIGTERM, and the others would hang.")
        (tmp_path / "go on").touch()
        for rank in started:
            rank.join(60)
        assert [rank.exitcode for rank in started] == [0, 0]
    assert not (tmp_path / "saved.ckpt").exists()
