"""What happens when memory runs out in a training: the report, and then torch's error as it was."""

from __future__ import annotations

import os
import pickle
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_driver import Driver
from lightning.pytorch.callbacks import BatchSizeFinder
from limited_memory import LimitedMemory
from out_of_memory_texts import MIB
from torch.utils.data import DataLoader, Dataset
from trainings import Model, loader, quiet_trainer

from lightning_gpu_tools import GPUUtilizationAdvisor, GPUUtilizationMonitor, load_report, watch
from lightning_gpu_tools.runs import ending
from lightning_gpu_tools.training import memory_failures

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from out_of_memory import Batches, CatchesErrors, Layers, taken


class FailsAt(Layers):
    """Needs more than there is in one step, and keeps the error that it gets."""

    error: BaseException | None = None

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if batch_idx == 3:
            try:
                taken(6144)
            except torch.OutOfMemoryError as error:
                self.error = error
                raise
        return super().training_step(batch, batch_idx)


def batches(**options: Any) -> DataLoader[torch.Tensor]:
    return DataLoader(Batches(**{"count": 8, **options}), batch_size=None)


def test_torchs_own_error_goes_on_after_the_report(
    driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with LimitedMemory().gpu(driver, monkeypatch.setattr):
        advisor, model = GPUUtilizationAdvisor(), FailsAt()
        trainer = quiet_trainer(tmp_path, accelerator="cuda", callbacks=[advisor, GPUUtilizationMonitor()])
        with pytest.raises(torch.OutOfMemoryError) as caught:
            trainer.fit(model, batches())
    assert caught.value is model.error
    report = load_report(tmp_path)
    assert report.outcome == "out of memory in forward at step 3"
    assert advisor.diagnosis is not None
    assert advisor.diagnosis.verdict == report.diagnosis.verdict == "out_of_memory"
    first = report.diagnosis.findings[0]
    assert first.evidence["requested_bytes"] == 6 * MIB
    assert first.evidence["total_bytes"] == 4 * MIB
    assert report.allocator_failures == 0  # the one that ended the run is not one of them
    printed = capsys.readouterr().out
    assert "Verdict: OUT OF MEMORY (out of memory in forward at step 3" in printed
    assert "Why:     Out of memory in forward at step 3: torch asked for 6.00 MiB" in printed


@pytest.mark.parametrize("part", ["forward", "backward", "optimizer"])
def test_a_loop_of_ones_own_says_where_it_ran_out(
    driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    def fail(*args: Any) -> None:
        taken(6144)

    with LimitedMemory().gpu(driver, monkeypatch.setattr):
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 1)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        layer = torch.nn.Linear(128, 128)
        optimizer = torch.optim.SGD(layer.parameters(), lr=1e-6)
        if part == "optimizer":
            optimizer.register_step_post_hook(fail)

        def train() -> None:
            with watch(folder=str(tmp_path)) as run:
                for number, batch in enumerate(run.batches(batches())):
                    loss = layer(batch).mean()
                    if number == 3 and part == "forward":
                        fail()
                    if number == 3 and part == "backward":
                        loss.register_hook(fail)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()

        with pytest.raises(torch.OutOfMemoryError):
            train()
    report = load_report(tmp_path)
    assert report.diagnosis.verdict == "out_of_memory"
    name = "the optimizer" if part == "optimizer" else part
    assert report.outcome.startswith(f"out of memory in {name} at step ")


def test_errors_that_are_caught_are_counted_and_told(
    driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with LimitedMemory().gpu(driver, monkeypatch.setattr):
        trainer = quiet_trainer(tmp_path, accelerator="cuda", callbacks=[GPUUtilizationMonitor()])
        trainer.fit(CatchesErrors(), batches(count=12))
    report = load_report(tmp_path)
    assert report.outcome == "completed"
    assert report.diagnosis.verdict == "too_short"
    assert report.allocator_failures == 2
    assert "torch's allocator failed 2 times, and the run went on." in capsys.readouterr().out


class Growing(Layers):
    """Has batches of the size that BatchSizeFinder sets."""

    batch_size = 32

    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        return DataLoader(Rows(), batch_size=self.batch_size)


class Rows(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(4, 128)


def test_a_search_for_the_batch_size_is_no_end(driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LimitedMemory().gpu(driver, monkeypatch.setattr):
        finder = BatchSizeFinder(init_val=64, steps_per_trial=1)
        trainer = quiet_trainer(
            tmp_path, accelerator="cuda", callbacks=[GPUUtilizationMonitor(), finder], limit_train_batches=6
        )
        model = Growing()
        monkeypatch.delattr(Layers, "validation_step")
        trainer.fit(model)
    report = load_report(tmp_path)
    assert model.batch_size >= 64
    assert report.diagnosis.verdict != "out_of_memory"
    assert report.allocator_failures > 0


def test_a_snapshot_of_what_is_allocated_is_written_on_request(
    driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recording: list[dict[str, Any]] = []

    def dump(path: str) -> None:
        Path(path).write_bytes(pickle.dumps({"segments": []}))

    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **options: recording.append(options))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", dump)
    snapshot = tmp_path / "gpu_report" / "cuda_memory_snapshot.pickle"
    snapshot.parent.mkdir()
    snapshot.write_bytes(b"of an earlier run")
    with LimitedMemory().gpu(driver, monkeypatch.setattr):
        monitor = GPUUtilizationMonitor(memory_history=True)
        trainer = quiet_trainer(tmp_path, accelerator="cuda", callbacks=[monitor])
        with pytest.raises(torch.OutOfMemoryError):
            trainer.fit(FailsAt(), batches())
    assert recording == [{"max_entries": 100_000}, {"enabled": None}]
    assert pickle.loads(snapshot.read_bytes()) == {"segments": []}
    assert f"Memory snapshot: {snapshot}\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("module", "gone"),
    [
        (torch._C, "_cuda_attach_out_of_memory_observer"),
        (torch.cuda.memory, "_record_memory_history"),
        (torch.cuda.memory, "_dump_snapshot"),
    ],
)
def test_a_torch_without_a_private_name_still_says_what_the_error_says(
    driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any, gone: str
) -> None:
    with LimitedMemory().gpu(driver, monkeypatch.setattr):
        for name in ("_record_memory_history", "_dump_snapshot"):  # which need a build for CUDA
            monkeypatch.setattr(torch.cuda.memory, name, lambda *args, **options: None)
        monkeypatch.delattr(module, gone)
        trainer = quiet_trainer(tmp_path, accelerator="cuda", callbacks=[GPUUtilizationMonitor(memory_history=True)])
        with pytest.raises(torch.OutOfMemoryError):
            trainer.fit(FailsAt(), batches())
    report = load_report(tmp_path)
    assert report.outcome == "out of memory in forward at step 3"
    assert report.diagnosis.findings[0].evidence["requested_bytes"] == 6 * MIB


def test_an_allocator_that_cannot_be_observed_costs_no_verdict(
    driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise RuntimeError("cudaMallocAsync does not yet support this")

    with LimitedMemory().gpu(driver, monkeypatch.setattr):
        monkeypatch.setattr(memory_failures, "_is_attached", False)
        monkeypatch.setattr(torch._C, "_cuda_attach_out_of_memory_observer", refuse)
        monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", refuse)
        trainer = quiet_trainer(tmp_path, accelerator="cuda", callbacks=[GPUUtilizationMonitor(memory_history=True)])
        with (
            pytest.warns(UserWarning, match="memory_history=True has no effect: cudaMallocAsync does not"),
            pytest.raises(torch.OutOfMemoryError),
        ):
            trainer.fit(FailsAt(), batches())
    assert load_report(tmp_path).outcome == "out of memory in forward at step 3"


def test_what_fails_while_it_is_noted_never_takes_the_errors_place(
    driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise KeyError("counters with other names")

    with LimitedMemory().gpu(driver, monkeypatch.setattr):
        trainer = quiet_trainer(tmp_path, accelerator="cuda", callbacks=[GPUUtilizationMonitor()])
        monkeypatch.setattr(memory_failures.MemoryFailures, "note", fail)
        with pytest.raises(torch.OutOfMemoryError):
            trainer.fit(FailsAt(), batches())
    report = load_report(tmp_path)  # by the message and the traceback alone
    assert report.outcome == "out of memory in forward at step 3"
    assert report.diagnosis.findings[0].evidence["requested_bytes"] == 6 * MIB


class Killed(Dataset[torch.Tensor]):
    """Samples of which one has the worker that loads it killed, as the kernel does when memory runs out."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.ones(4)


@pytest.mark.parametrize("by_the_kernel", [True, False])
def test_a_worker_that_the_kernel_killed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_the_kernel: bool
) -> None:
    counted = iter([3, 3 + by_the_kernel])
    monkeypatch.setattr(ending, "oom_kills", lambda: next(counted))
    trainer = quiet_trainer(tmp_path, callbacks=[GPUUtilizationMonitor()])
    # What the worker is doing at that moment decides what is raised here.
    with pytest.raises((RuntimeError, ConnectionResetError, EOFError)):
        trainer.fit(Model(), loader(Killed(), num_workers=1))
    report = load_report(tmp_path)
    if by_the_kernel:
        assert report.outcome.startswith("out of memory in ")
        assert "The kernel killed worker " in report.diagnosis.why
    else:
        assert re.fullmatch(
            r"stopped by \w+ at step \d+: worker 0 of the DataLoader \(PID \d+\) was killed by SIGKILL from outside .*",
            report.outcome,
        )


def test_the_hosts_allocator_is_told_with_what_was_left(tmp_path: Path) -> None:
    class TakesTooMuch(Model):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            torch.empty(2**50)
            return super().training_step(batch, batch_idx)

    trainer = quiet_trainer(tmp_path, callbacks=[GPUUtilizationMonitor()])
    with pytest.raises(RuntimeError, match="allocate"):
        trainer.fit(TakesTooMuch(), loader(Killed()))
    report = load_report(tmp_path)
    assert report.outcome == "out of memory in forward at step 0"
    assert "4096 TiB were asked for at once" in report.diagnosis.why
