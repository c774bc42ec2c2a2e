"""What the workers of real loaders are seen doing."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import Dataset
from trainings import HandClock, Model, Samples, loader, quiet_trainer

from lightning_gpu_tools.trainer import compat
from lightning_gpu_tools.training import compat as torch_compat
from lightning_gpu_tools.training import stacks, worker_watch
from lightning_gpu_tools.training.run_measurements import LoadingFacts
from lightning_gpu_tools.training.worker_watch import WorkerWatch


class Watching(Callback):
    """Polls after every step."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.watch = WorkerWatch(lambda: compat.train_iterator(trainer))

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self.watch.poll(trainer.global_step)


def seen(folder: Path, dataset: Dataset[torch.Tensor], workers: int, *others: Callback) -> LoadingFacts:
    watching = Watching()
    quiet_trainer(folder, callbacks=[*others, watching]).fit(Model(), loader(dataset, num_workers=workers))
    return watching.watch.facts()


class Gated(Dataset[torch.Tensor]):
    """Delivers no sample before it may."""

    def __init__(self, count: int) -> None:
        self.gates = [multiprocessing.Event() for _ in range(count)]

    def __len__(self) -> int:
        return len(self.gates)

    def __getitem__(self, index: int) -> torch.Tensor:
        self.gates[index].wait()
        return torch.zeros(4)

    def open(self, *indices: int) -> None:
        for index in indices:
            self.gates[index].set()


@pytest.mark.parametrize("ready", [(2, 3, 5), ()])
def test_behind_one_slow_worker_batches_lie_ready(ready: tuple[int, ...]) -> None:
    """Of three workers the second one loads batches 1 and 4."""
    dataset = Gated(6)
    iterator = iter(loader(dataset, num_workers=3))
    watch = WorkerWatch(lambda: iterator)

    def open_the_slow_one() -> None:
        while (torch_compat.ready_share(iterator) or 0.0) < len(ready) / 5:
            time.sleep(0.001)
        dataset.open(1)

    dataset.open(0, *ready)
    next(iterator)
    opening = threading.Thread(target=open_the_slow_one)
    opening.start()
    next(iterator)
    watch.after_long_wait()
    facts = watch.facts()
    assert (facts.long_waits, facts.ready_out_of_order_share) == (1, len(ready) / 4)
    opening.join()
    dataset.open(*range(6))
    assert len(list(iterator)) == 4  # which also ends the workers


def test_batches_that_are_ready_are_seen() -> None:
    dataset = Gated(2)
    iterator = iter(loader(dataset, num_workers=1))
    watch = WorkerWatch(lambda: iterator)
    watch.before_fetch()
    assert watch.facts().ready_share == 0
    dataset.open(0, 1)
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
    monkeypatch.setattr(stacks, "_PROC", tmp_path)
    monkeypatch.setattr(worker_watch, "_INTERVAL_S", 0.0)
    return tmp_path


def test_workers_that_compute_are_told_from_workers_that_sleep(proc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that has run for 0.6 s of each second and found no core for 0.3 s."""
    clock = HandClock()
    monkeypatch.setattr(worker_watch, "monotonic", clock)

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


def test_the_wait_of_a_read_is_that_of_most_polls(proc: Path) -> None:
    """Four reads in each step: 20 ticks of waiting for storage in most steps, none in every fifth one."""
    io = Kernel(proc, "io", lambda step, pid: f"rchar: 5\nsyscr: {4 * step}\nread_bytes: {step}\n")
    fields = ["0"] * 38
    stat = Kernel(
        proc, "stat", lambda step, pid: f"{pid} (a) " + " ".join(["S", *fields, str(20 * (step - step // 5))])
    )
    facts = seen(proc / "run", Samples(20), 1, io, stat)
    assert facts.read_ms == pytest.approx(1e3 * 20 / stacks.TICKS_PER_S / 4)
    assert facts.read_samples == 19


def test_a_kernel_that_does_not_count_the_waits_says_nothing_of_them(proc: Path) -> None:
    io = Kernel(proc, "io", lambda step, pid: f"syscr: {4 * step}\n")
    stat = Kernel(proc, "stat", lambda step, pid: f"{pid} (a) " + " ".join(["S", *["0"] * 50]))
    facts = seen(proc / "run", Samples(20), 1, io, stat)
    assert (facts.read_ms, facts.read_samples) == (None, None)
