"""What the workers of real loaders are seen doing."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import Dataset, get_worker_info
from trainings import Model, Samples, loader, quiet_trainer

from lightning_gpu_tools.trainer import compat
from lightning_gpu_tools.trainer.session import Session
from lightning_gpu_tools.training import worker_watch
from lightning_gpu_tools.training.run_measurements import LoadingFacts
from lightning_gpu_tools.training.worker_watch import LONG_WAIT_S, WorkerWatch


class Watching(Callback):
    """Looks after every step, the first ones of the epoch left out."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.clock = Session.of(trainer).clock

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


def seen(folder: Path, dataset: Dataset[torch.Tensor], workers: int) -> LoadingFacts:
    watching = Watching()
    quiet_trainer(folder, callbacks=[watching]).fit(Model(), loader(dataset, num_workers=workers))
    return watching.watch.facts()


def test_behind_one_slow_worker_the_batches_of_the_others_lie_ready(tmp_path: Path) -> None:
    facts = seen(tmp_path, OneSlow(), 3)
    assert facts.long_waits >= 10
    assert facts.ready_out_of_order_share is not None
    assert facts.ready_out_of_order_share >= 0.5


def test_behind_workers_that_are_alike_they_do_not(tmp_path: Path) -> None:
    facts = seen(tmp_path, Samples(60, time.sleep, 0.02), 3)
    assert facts.ready_out_of_order_share is not None
    assert facts.ready_out_of_order_share < 0.5


def test_batches_that_lie_ready_are_seen(tmp_path: Path) -> None:
    watching = Watching()
    fast = loader(Samples(60), num_workers=1)
    quiet_trainer(tmp_path, callbacks=[watching]).fit(Model(time.sleep, step_s=0.03), fast)
    ready = watching.watch.facts().ready_share
    assert ready is not None
    assert ready > 0.8
    slow = seen(tmp_path, Samples(60, time.sleep, 0.02), 1).ready_share
    assert slow is not None
    assert slow < 0.3


def test_workers_that_compute_are_told_from_workers_that_sleep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the kernel's count of a worker that has run for 0.6 s of each second and found no core for 0.3 s."""
    monkeypatch.setattr(worker_watch, "_PROC", tmp_path)
    monkeypatch.setattr(worker_watch, "_INTERVAL_S", 0.0)
    seconds = iter(range(1000))
    monkeypatch.setattr(worker_watch.time, "monotonic", lambda: now[0])
    now = [0.0]

    class Run(Callback):
        def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
            now[0] = float(next(seconds))
            (worker,) = trainer.fit_loop._data_fetcher._combined_loader._iterator.iterators[0]._workers
            (tmp_path / str(worker.pid)).mkdir(exist_ok=True)
            run_ns, delay_ns = (int(now[0] * share * 1e9) for share in (0.6, 0.3))
            (tmp_path / str(worker.pid) / "schedstat").write_text(f"{run_ns} {delay_ns} 77\n")

    watching = Watching()
    quiet_trainer(tmp_path / "run", callbacks=[Run(), watching]).fit(Model(), loader(Samples(20), num_workers=1))
    facts = watching.watch.facts()
    assert facts.runnable_share == pytest.approx(0.9)
    assert facts.delayed_share == pytest.approx(0.3)


def test_without_workers_nothing_is_known_of_them(tmp_path: Path) -> None:
    facts = seen(tmp_path, Samples(20), 0)
    assert (facts.samples, facts.storage_wait_share, facts.ready_out_of_order_share) == (0, None, None)


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="needs Linux")
def test_reads_from_storage_are_counted_for_each_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's own count of this process, as the test sets it."""
    process = tmp_path / str(os.getpid())
    process.mkdir()
    monkeypatch.setattr(worker_watch, "_PROC", tmp_path)
    monkeypatch.setattr(worker_watch, "_INTERVAL_S", 0.0)
    count = {"read_bytes": 0}

    class Reads(Callback):
        def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
            count["read_bytes"] += 1000 if trainer.global_step < 30 else 10
            (process / "io").write_text(f"rchar: 5\nread_bytes: {count['read_bytes']}\nwrite_bytes: 7\n")

    watching = Watching()
    quiet_trainer(tmp_path / "run", callbacks=[Reads(), watching]).fit(Model(), loader(Samples(57)))
    facts = watching.watch.facts()
    assert facts.early_storage_bytes_per_batch == pytest.approx(1000)
    assert facts.late_storage_bytes_per_batch == pytest.approx(10)


def test_workers_in_state_d_wait_for_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_watch, "_PROC", tmp_path)
    monkeypatch.setattr(worker_watch, "_INTERVAL_S", 0.0)

    class Wait(Callback):
        """Each worker is in state D at every second look."""

        def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
            combined = trainer.fit_loop._data_fetcher._combined_loader
            for worker in combined._iterator.iterators[0]._workers:
                (tmp_path / str(worker.pid)).mkdir(exist_ok=True)
                state = "D" if trainer.global_step % 2 else "S"
                (tmp_path / str(worker.pid) / "stat").write_text(f"{worker.pid} (a (b) c) {state} 1 2 3")

    watching = Watching()
    quiet_trainer(tmp_path / "run", callbacks=[Wait(), watching]).fit(Model(), loader(Samples(20), num_workers=2))
    facts = watching.watch.facts()
    assert facts.samples == 20
    assert facts.storage_wait_share == 0.5
