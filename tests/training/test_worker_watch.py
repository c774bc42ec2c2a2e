"""What the workers of real loaders are seen doing."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import Dataset, get_worker_info
from trainings import HandClock, Model, Samples, loader, quiet_trainer

from lightning_gpu_tools.trainer import compat
from lightning_gpu_tools.trainer.session import FitSession
from lightning_gpu_tools.training import compat as torch_compat
from lightning_gpu_tools.training import worker_watch
from lightning_gpu_tools.training.run_measurements import LoadingFacts
from lightning_gpu_tools.training.worker_watch import LONG_WAIT_S, WorkerWatch


class Watching(Callback):
    """Polls after every step; waits count after the first ten."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.clock = FitSession.of(trainer).clock

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.watch = WorkerWatch(lambda: compat.train_iterator(trainer))

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step > 10 and self.clock.last_fetch_s > LONG_WAIT_S:
            self.watch.after_long_wait()
        self.watch.before_fetch()
        self.watch.poll(trainer.global_step)


class OneSlow(Dataset[torch.Tensor]):
    """Worker 1 takes 40 ms a sample, the others 1 ms."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> torch.Tensor:
        info = get_worker_info()
        time.sleep(0.04 if info is None or info.id == 1 else 0.001)
        return torch.zeros(4)


def seen(folder: Path, dataset: Dataset[torch.Tensor], workers: int, *others: Callback) -> LoadingFacts:
    watching = Watching()
    quiet_trainer(folder, callbacks=[*others, watching]).fit(Model(), loader(dataset, num_workers=workers))
    return watching.watch.facts()


@pytest.mark.parametrize(("dataset", "behind_one"), [(OneSlow(), True), (Samples(60, time.sleep, 0.02), False)])
def test_behind_one_slow_worker_batches_lie_ready(tmp_path: Path, dataset: Any, behind_one: bool) -> None:
    facts = seen(tmp_path, dataset, 3)
    assert facts.long_waits >= 10
    assert facts.ready_out_of_order_share is not None
    assert (facts.ready_out_of_order_share >= 0.5) is behind_one


class Gated(Dataset[torch.Tensor]):
    """Delivers nothing before it may."""

    def __init__(self) -> None:
        self.gate = multiprocessing.Event()

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> torch.Tensor:
        self.gate.wait()
        return torch.zeros(4)


def test_batches_that_are_ready_are_seen() -> None:
    dataset = Gated()
    iterator = iter(loader(dataset, num_workers=1))
    watch = WorkerWatch(lambda: iterator)
    watch.before_fetch()
    assert watch.facts().ready_share == 0
    dataset.gate.set()
    while not torch_compat.is_batch_ready(iterator):
        time.sleep(0.001)
    watch.before_fetch()
    assert watch.facts().ready_share == 0.5
    assert len(list(iterator)) == 2  # which also ends the worker


def test_without_workers_nothing_is_known_of_them(tmp_path: Path) -> None:
    facts = seen(tmp_path, Samples(20), 0)
    assert (facts.samples, facts.storage_wait_share, facts.ready_out_of_order_share) == (0, None, None)


class Kernel(Callback):
    """Writes after each step what the kernel is to say of the loader's workers, or without any of this process.

    Args:
        proc: In the place of ``/proc``.
        file: The name of the file of each process.
        text: Is given the step and the process, and returns what the file says.
    """

    def __init__(self, proc: Path, file: str, text: Callable[[int, int], str]) -> None:
        self.proc, self.file, self.text = proc, file, text

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        for pid in torch_compat.worker_pids(compat.train_iterator(trainer)) or [os.getpid()]:
            (self.proc / str(pid)).mkdir(exist_ok=True)
            (self.proc / str(pid) / self.file).write_text(self.text(trainer.global_step, pid))


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A ``/proc`` of the test's own, which is read after every step."""
    monkeypatch.setattr(worker_watch, "_PROC", tmp_path)
    monkeypatch.setattr(worker_watch, "_INTERVAL_S", 0.0)
    return tmp_path


def test_workers_that_compute_are_told_from_workers_that_sleep(proc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that has run for 0.6 s of each second and found no core for 0.3 s."""
    clock = HandClock()
    monkeypatch.setattr(worker_watch.time, "monotonic", clock)

    def schedstat(step: int, pid: int) -> str:
        clock.spend(1.0)
        return f"{6 * step * 10**8} {3 * step * 10**8} 77\n"

    facts = seen(proc / "run", Samples(20), 1, Kernel(proc, "schedstat", schedstat))
    assert facts.runnable_share == pytest.approx(0.9)
    assert facts.delayed_share == pytest.approx(0.3)


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="needs Linux")
def test_reads_from_storage_are_counted_for_each_batch(proc: Path) -> None:
    def io(step: int, pid: int) -> str:
        return f"rchar: 5\nread_bytes: {1000 * min(step, 29) + 10 * max(0, step - 29)}\nwrite_bytes: 7\n"

    facts = seen(proc / "run", Samples(57), 0, Kernel(proc, "io", io))
    assert facts.early_storage_bytes_per_batch == pytest.approx(1000)
    assert facts.late_storage_bytes_per_batch == pytest.approx(10)


def test_workers_in_state_d_wait_for_storage(proc: Path) -> None:
    stat = Kernel(proc, "stat", lambda step, pid: f"{pid} (a (b) c) {'D' if step % 2 else 'S'} 1 2 3")
    facts = seen(proc / "run", Samples(20), 2, stat)
    assert (facts.samples, facts.storage_wait_share) == (20, 0.5)
