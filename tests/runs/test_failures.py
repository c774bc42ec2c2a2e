"""The reason that ended a training is in words on the error and in the report; a GPU's memory runs out in on_gpu/."""

import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from trainings import ActingSamples, Model, loader, quiet_trainer

from lightning_gpu_tools import GPUUtilizationMonitor, load_report
from lightning_gpu_tools.advice.workers import failure_of_dataset, failure_of_workers, how_it_ended
from lightning_gpu_tools.runs import ending
from lightning_gpu_tools.types import Report

AT = 17
HAS_NOTES = sys.version_info >= (3, 11)
# What a worker is doing when it dies decides what is raised in the training process.
OF_DEAD_WORKER = (RuntimeError, ConnectionResetError, EOFError, FileNotFoundError)


def fail() -> None:
    raise ValueError("no such sample")


def fit(folder: Path, act: Callable[[], Any], model: Model | None = None, **options: Any) -> None:
    trainer = quiet_trainer(folder, callbacks=[GPUUtilizationMonitor()])
    trainer.fit(model or Model(), loader(ActingSamples(40, AT, act), **options))


def test_the_end_of_a_worker_is_told_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(OF_DEAD_WORKER) as raised:
        fit(tmp_path, partial(signal.raise_signal, signal.SIGBUS), num_workers=2)
    report = load_report(tmp_path)
    assert "was killed by SIGBUS: most likely /dev/shm is full" in report.failure
    assert f": {report.failure[0].lower()}{report.failure[1:].partition('. ')[0]}" in report.outcome
    assert report.failure.endswith(report.diagnosis.next_step)
    assert re.match(r"Worker 1 of the DataLoader (\(PID \d+\) )?", report.failure)
    if HAS_NOTES:
        assert raised.value.__notes__ == [report.failure]


@pytest.mark.parametrize("by_the_kernel", [True, False])
def test_a_worker_that_the_kernel_killed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_the_kernel: bool
) -> None:
    counted = iter([3, 3 + by_the_kernel])
    monkeypatch.setattr(ending, "oom_kills", lambda: next(counted))
    with pytest.raises(OF_DEAD_WORKER):
        fit(tmp_path, partial(signal.raise_signal, signal.SIGKILL), num_workers=1)
    report = load_report(tmp_path)
    if by_the_kernel:
        assert report.outcome.startswith("out of memory in ")
        assert "The kernel killed worker " in report.diagnosis.why
    else:
        killed = r"worker 0 of the DataLoader \(PID \d+\) was killed by SIGKILL, but not by the kernel .*"
        assert re.fullmatch(rf"stopped by \w+ at step \d+: {killed}", report.outcome)


def test_the_hosts_allocator_is_told_with_the_size_of_the_request(tmp_path: Path) -> None:
    class TakesTooMuch(Model):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return torch.empty(2**50)

    with pytest.raises(RuntimeError, match="allocate"):
        fit(tmp_path, lambda: None, TakesTooMuch())
    report = load_report(tmp_path)
    assert report.outcome == "out of memory in forward at step 0"
    assert "asked for 4096 TiB" in report.diagnosis.why


def test_errors_of_other_kinds_are_left_alone(tmp_path: Path) -> None:
    class Wrong(Model):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            raise ValueError("a mistake")

    with pytest.raises(ValueError, match="a mistake") as raised:
        fit(tmp_path, lambda: None, Wrong(), num_workers=1)
    report = load_report(tmp_path)
    assert (report.outcome, report.failure) == ("stopped by ValueError at step 0", None)
    assert not hasattr(raised.value, "__notes__")


# A loop in a process of its own, without Lightning, whose import takes longer than all else here.
LOOP = """
import ctypes, torch
from lightning_gpu_tools import watch
class Odd(torch.utils.data.Dataset):
    def __len__(self):
        return 40
    def __getitem__(self, index):
        return {sample}
def with_stack(worker):
    {call}
with watch(folder={folder!r}) as run:
    for batch in run.batches(torch.utils.data.DataLoader(Odd(), {options})):
        pass
"""


@pytest.mark.follows("faulthandler.enable() in worker_init_fn", "Or set num_workers=0 and PYTHONFAULTHANDLER=1")
def test_a_crash_in_native_code_prints_its_stack_as_advised(
    tmp_path: Path, run_python: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    def run(options: str = "num_workers=1", call: str = "pass", **env: str) -> subprocess.CompletedProcess[str]:
        sample = "ctypes.string_at(0) if index == 17 else index"
        script = LOOP.format(folder=str(tmp_path), options=options, call=call, sample=sample)
        return run_python("-c", script, env={"PYTHONFAULTHANDLER": "", **env})

    advice = str(failure_of_workers([(0, 100, -signal.SIGSEGV)], oom_kills=0))
    (call,), (option, variable) = re.findall(r"faulthandler\.\w+\(\)", advice), re.findall(r"\w+=[01]", advice)
    in_worker = run("num_workers=1, worker_init_fn=with_stack", f"import faulthandler; {call}")
    in_training = run(option, **dict([variable.split("=")]))
    assert (in_worker.returncode, in_training.returncode) == (1, -signal.SIGSEGV)
    for stack in (in_worker.stderr, in_training.stderr):
        assert "Fatal Python error: Segmentation fault" in stack
        assert "in __getitem__" in stack


@pytest.mark.follows('Or set multiprocessing_context="fork".')
def test_a_dataset_that_cannot_be_pickled_trains_with_the_advised_context(tmp_path: Path) -> None:
    with pytest.raises((AttributeError, RuntimeError)):  # Lightning fails again where it ends the fit
        fit(tmp_path, lambda: None, num_workers=1, multiprocessing_context="spawn")
    assert "the DataLoader's workers could not be started: " in load_report(tmp_path).outcome
    (option,) = re.findall(r'(multiprocessing_context)="(\w+)"', load_report(tmp_path).failure)
    fit(tmp_path, lambda: None, num_workers=1, **dict([option]))
    assert load_report(tmp_path).outcome == "completed"


@pytest.mark.follows("Load this sample alone: dataset[{}].")
@pytest.mark.parametrize(("workers", "whose"), [(0, "failed"), (2, "raised ValueError")])
def test_the_sample_that_is_named_fails_alone(tmp_path: Path, workers: int, whose: str) -> None:
    with pytest.raises(ValueError, match="no such sample"):
        fit(tmp_path, fail, batch_size=2, num_workers=workers)
    failure = load_report(tmp_path).failure
    if workers and not HAS_NOTES:
        assert failure == "The dataset raised ValueError in worker 0. The error includes its traceback."
        return
    assert failure.startswith(f"The dataset {whose} at index {AT}{' in worker 0' * (workers > 0)}. Load ")
    (code,) = re.findall(r"dataset\[\d+\]", failure)
    with pytest.raises(ValueError, match="no such sample"):
        eval(code, {"dataset": ActingSamples(40, AT, fail)})


# In a mount namespace of its own, as a container has: /dev/shm of another size.
WITH_SHM = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size="$0" tmpfs /dev/shm && exec "$@"']


@pytest.mark.follows(
    "Start the container with --ipc=host or --shm-size=8g, use fewer workers (num_workers), or a smaller"
)
def test_workers_have_room_in_shared_memory_of_the_advised_size(tmp_path: Path) -> None:
    if shutil.which("unshare") is None or subprocess.run([*WITH_SHM, "1m", "true"], check=False).returncode:
        pytest.skip("this process may not mount /dev/shm")

    def train(*command: str) -> Report:
        script = LOOP.format(folder=str(tmp_path), options="num_workers=1", call="pass", sample="torch.zeros(1 << 22)")
        subprocess.run([*command, sys.executable, "-c", script], check=False)
        return load_report(tmp_path)

    advice = train(*WITH_SHM, "8m").failure
    (size,) = re.findall(r"--shm-size=(\w+)", advice)
    assert train(*WITH_SHM, size).outcome == "completed"


def test_of_several_dead_workers_the_first_cause_is_told() -> None:
    exits = [(0, 100, -signal.SIGTERM), (1, 101, -signal.SIGKILL), (2, 102, 1)]
    failure = failure_of_workers(exits, oom_kills=1)
    assert failure.what == "worker 1 of the DataLoader (PID 101) was killed by the kernel, because memory ran out"
    assert failure_of_workers([], oom_kills=1) is None
    assert how_it_ended(-64).what == "crashed (SIGRTMAX) in native code"
    assert failure_of_dataset("At index 3 of a list", None) is None
