"""What ends a training in a worker of its DataLoader is said in words, on the error and in the report."""

from __future__ import annotations

import multiprocessing.reduction
import os
import re
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from trainings import Model, Samples, loader, quiet_trainer

from lightning_gpu_tools import GPUUtilizationMonitor, load_report, watch
from lightning_gpu_tools.advice.failures import WorkerExit, failure_of_dataset, failure_of_workers, how_it_ended

AT = 17
HAS_NOTES = sys.version_info >= (3, 11)


class Failing(Samples):
    """Samples of which one does something else."""

    def __init__(self, act: Callable[[], Any]) -> None:
        super().__init__(40)
        self.act = act

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == AT:
            self.act()
        return super().__getitem__(index)


def kill_with(number: signal.Signals) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def fail(text: str = "no such sample") -> None:
    raise ValueError(text)


def fill_shared_memory() -> None:
    """Raise what torch does where ``/dev/shm`` is full, since 2.13."""
    raise RuntimeError("unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)")


@pytest.mark.parametrize(
    ("act", "what"),
    [
        (kill_with(signal.SIGTERM), "was terminated by SIGTERM"),
        (kill_with(signal.SIGBUS), "was killed by SIGBUS: most likely /dev/shm is full (it has "),
        (kill_with(signal.SIGSEGV), "crashed (SIGSEGV) in native code"),
        (lambda: os._exit(3), "exited with exit code 3"),
        (fill_shared_memory, "could not write to /dev/shm of "),
    ],
    ids=["SIGTERM", "SIGBUS", "SIGSEGV", "exit", "shm"],
)
def test_the_end_of_a_worker_is_told_with_what_to_do(tmp_path: Path, act: Callable[[], Any], what: str) -> None:
    trainer = quiet_trainer(tmp_path, callbacks=[GPUUtilizationMonitor()])
    with pytest.raises(Exception) as raised:  # noqa: PT011 - what the worker is doing at that moment decides
        trainer.fit(Model(), loader(Failing(act), num_workers=2))
    report = load_report(tmp_path)
    assert report.failure is not None
    assert what in report.failure
    assert f": {report.failure[0].lower()}{report.failure[1:].partition('. ')[0]}" in report.outcome
    assert report.failure.endswith(report.diagnosis.next_step)
    assert re.match(r"Worker 1 of the DataLoader (\(PID \d+\) )?", report.failure)
    if HAS_NOTES:
        assert raised.value.__notes__ == [report.failure]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_error_of_the_dataset_has_its_index(tmp_path: Path, num_workers: int) -> None:
    trainer = quiet_trainer(tmp_path, callbacks=[GPUUtilizationMonitor()])
    with pytest.raises(ValueError, match="no such sample"):
        trainer.fit(Model(), loader(Failing(fail), num_workers=num_workers, batch_size=2))
    failure = load_report(tmp_path).failure
    if num_workers == 0:
        assert failure == f"The dataset failed at index {AT}. Load this sample alone: dataset[{AT}]."
    elif HAS_NOTES:
        assert (
            failure
            == f"The dataset raised ValueError at index {AT} in worker 0. Load this sample alone: dataset[{AT}]."
        )
    else:
        assert failure == "The dataset raised ValueError in worker 0. The error includes its traceback."


def test_a_loop_of_ones_own_is_told_the_same(tmp_path: Path) -> None:
    fetch = torch.utils.data._utils.fetch._MapDatasetFetcher.fetch
    with pytest.raises(ValueError, match="no such sample"), watch(folder=str(tmp_path)) as run:
        for _ in run.batches(loader(Failing(fail))):
            pass
    assert f"at index {AT}" in load_report(tmp_path).outcome
    assert torch.utils.data._utils.fetch._MapDatasetFetcher.fetch is fetch


def test_what_cannot_be_pickled_for_a_worker_is_told(tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path, callbacks=[GPUUtilizationMonitor()])
    dataset = Failing(lambda: None)
    with pytest.raises((AttributeError, RuntimeError)) as raised:  # Lightning fails again where it ends the fit
        trainer.fit(Model(), loader(dataset, num_workers=1, multiprocessing_context="spawn"))
    report = load_report(tmp_path)
    assert "the DataLoader's workers could not be started: " in report.outcome
    if HAS_NOTES:
        assert report.failure in (raised.value.__context__ or raised.value).__notes__


def receive_from_the_dead() -> None:
    """Fail as receiving a tensor from a worker does if the worker has died meanwhile."""
    ours, theirs = socket.socketpair()
    theirs.close()
    with ours:
        multiprocessing.reduction.recvfds(ours, 1)


def test_a_lost_connection_is_not_taken_for_what_cannot_be_pickled(tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path, callbacks=[GPUUtilizationMonitor()])
    with pytest.raises(EOFError):
        trainer.fit(Model(), loader(Failing(receive_from_the_dead), batch_size=2))
    assert load_report(tmp_path).failure == f"The dataset failed at index {AT}. Load this sample alone: dataset[{AT}]."


def test_errors_of_other_kinds_are_left_alone(tmp_path: Path) -> None:
    class Wrong(Model):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            raise ValueError("a mistake")

    trainer = quiet_trainer(tmp_path, callbacks=[GPUUtilizationMonitor()])
    with pytest.raises(ValueError, match="a mistake") as raised:
        trainer.fit(Wrong(), loader(Samples(40), num_workers=1))
    report = load_report(tmp_path)
    assert report.outcome == "stopped by ValueError at step 0"
    assert report.failure is None
    assert not hasattr(raised.value, "__notes__")


def test_of_several_dead_workers_the_first_cause_is_told() -> None:
    exits = [WorkerExit(0, 100, -signal.SIGTERM), WorkerExit(1, 101, -signal.SIGKILL), WorkerExit(2, 102, 1)]
    failure = failure_of_workers(exits, oom_kills=1, shm_bytes=None)
    assert failure is not None
    assert failure.what == "worker 1 of the DataLoader (PID 101) was killed by the kernel, because memory ran out"
    assert failure_of_workers([], oom_kills=1, shm_bytes=None) is None
    assert how_it_ended(-64).what == "crashed (SIGRTMAX) in native code"
    assert failure_of_dataset("At index 3 of a list", None, None) is None
