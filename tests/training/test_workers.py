"""Observations of the workers of real loaders, by torch's queues and by the kernel's files about them."""

import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from itertools import cycle
from pathlib import Path

import pytest
import torch
from torch.utils.data import Dataset
from trainings import HandClock, Samples, loader

from lightning_gpu_tools.processes import process_stat
from lightning_gpu_tools.training import compat, cores, stacks
from lightning_gpu_tools.training.cores import WorkerWatch
from lightning_gpu_tools.training.run_measurements import LoadingFacts


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
    """Let the second of three workers load batches 1 and 4."""
    dataset = Gated(6)
    iterator = iter(loader(dataset, num_workers=3))
    watch = WorkerWatch(lambda: iterator, lambda: 0)

    def open_the_slow_one() -> None:
        while (compat.ready_share(iterator) or 0.0) < len(ready) / 5:
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


class Kernel:
    """A ``/proc`` of the test's own, which is read after every step."""

    def __init__(self, proc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.proc, self.clock = proc, HandClock()
        monkeypatch.setattr(stacks, "_PROC", proc)
        monkeypatch.setattr(cores, "monotonic", self.clock)

    def observed(
        self,
        workers: int,
        steps: int = 20,
        threads: dict[int, Callable[[int], str]] | None = None,
        **files: Callable[[int], str],
    ) -> LoadingFacts:
        """Return what is seen of real workers, or without any of this process, in steps of a second.

        ``files`` has the text of each file of a process, by the step, and ``threads`` that of each thread's schedstat.
        """
        iterator = iter(loader(Samples(4), num_workers=workers))
        done = 0
        watch = WorkerWatch(lambda: iterator, lambda: done)
        for step in range(1, steps + 1):
            done = step
            for pid in compat.worker_pids(iterator) or [os.getpid()]:
                (self.proc / str(pid)).mkdir(exist_ok=True)
                for name, text in files.items():
                    (self.proc / str(pid) / name).write_text(text(step))
                for thread, text in (threads or {}).items():
                    folder = self.proc / str(pid) / "task" / str(pid + thread)
                    folder.mkdir(parents=True, exist_ok=True)
                    (folder / "schedstat").write_text(text(step))
            self.clock.spend(1.0)
            watch.poll()
        assert len(list(iterator)) == 4  # which also ends the workers
        return watch.facts()


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    return Kernel(tmp_path, monkeypatch)


def test_the_threads_of_a_pool_count_for_their_worker(kernel: Kernel) -> None:
    """Two workers whose main threads run for half of each second, with two more threads that also wait for a core."""
    pool = dict.fromkeys((1, 2), lambda step: f"{4 * step * 10**8} {4 * step * 10**8} 1\n")
    threads = {0: lambda step: f"{5 * step * 10**8} 0 1\n", **pool}
    facts = kernel.observed(workers=2, threads=threads)
    assert (facts.runnable_share, facts.delayed_share) == (pytest.approx(0.5), 0)
    assert facts.runnable_threads == pytest.approx(0.5 + 2 * 0.8)
    assert facts.worker_cores == pytest.approx(0.5 + 2 * 0.4)


def test_reads_from_storage_are_counted_for_each_batch(kernel: Kernel) -> None:
    def io(step: int) -> str:
        return f"rchar: 5\nread_bytes: {1000 * min(step, 29) + 10 * max(0, step - 29)}\nwrite_bytes: 7\n"

    facts = kernel.observed(workers=0, steps=57, io=io)
    assert facts.early_storage_bytes_per_batch == pytest.approx(1000)
    assert facts.late_storage_bytes_per_batch == pytest.approx(10)


def test_workers_in_state_d_wait_for_storage(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    states, stat = cycle("SSDD"), process_stat(os.getpid())
    assert stat is not None
    monkeypatch.setattr(cores, "process_stat", lambda pid: stat._replace(state=next(states)))
    facts = kernel.observed(workers=2)
    assert facts.storage_wait_share == 0.5
