"""What happens when the host's memory runs out in a training; that of a GPU runs out in tests/on_gpu/."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
import torch
from torch.utils.data import Dataset
from trainings import Model, loader, quiet_trainer

from lightning_gpu_tools import GPUUtilizationMonitor, load_report
from lightning_gpu_tools.runs import ending


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
    assert "4096 TiB were requested at once" in report.diagnosis.why
