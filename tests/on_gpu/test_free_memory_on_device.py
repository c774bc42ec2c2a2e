"""Memory that is freed after a real out-of-memory error, and the variables that hold the rest."""

from __future__ import annotations

import sys
from code import InteractiveInterpreter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from trainings import Model, Samples, loader, quiet_trainer

from lightning_gpu_tools import GPUUtilizationAdvisor, GPUUtilizationMonitor, free_memory

pytestmark = pytest.mark.usefixtures("two_gib")

MIB = 2**20


def taken(mebibytes: int) -> torch.Tensor:
    """Return a tensor of so many MiB."""
    return torch.empty(mebibytes * MIB, dtype=torch.uint8, device="cuda")


@pytest.fixture
def prompt(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Run code as Python's prompt does, where the variables are those of ``__main__``."""

    def run(code: str, **names: object) -> None:
        for name, value in names.items():
            monkeypatch.setattr(sys.modules["__main__"], name, value, raising=False)
        InteractiveInterpreter(vars(sys.modules["__main__"])).runsource(code, symbol="exec")

    return run


def test_what_an_out_of_memory_error_keeps_is_freed(prompt: Callable[..., None]) -> None:
    def train() -> None:
        kept = []
        while True:
            kept.append(taken(256))

    mine = taken(128)
    prompt("train()", train=train, mine=mine)
    assert isinstance(sys.last_value, torch.OutOfMemoryError)
    elsewhere = taken(64)
    freed = free_memory()
    assert freed.allocated_bytes == mine.nbytes + elsewhere.nbytes
    assert str(freed).splitlines() == [
        "Freed 1.75 GiB of GPU memory.",
        "Released: the traceback of OutOfMemoryError.",
        "Still held:",
        "   128 MiB  mine",
        "  64.0 MiB  elsewhere",
        "To free the memory of variables: del mine",
    ]
    assert free_memory().freed_bytes == 0


def test_each_variable_has_its_own_share(prompt: Callable[..., None]) -> None:
    model = torch.nn.Linear(4096, 4096, bias=False, device="cuda")  # 64 MiB
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.zeros(1, 4096, device="cuda")).sum().backward()
    optimizer.step()
    loss = model(torch.zeros(2048, 4096, device="cuda")).relu().sum()  # 32 MiB each for input and output
    names = {"model": model, "optimizer": optimizer, "loss": loss, "both": [model, optimizer]}
    prompt("", batches=[taken(64), {"x": [taken(32)]}], cpu=torch.zeros(8), **names)
    freed = free_memory()
    held = {name: size // MIB for name, size in freed.held.items()}
    assert held == {"model": 128, "optimizer": 128, "batches": 96, "loss": 64, "both": 0}
    assert str(freed).endswith("To free the memory of variables: del model, optimizer, batches, loss, both")


class Fails(Model):
    """Makes a batch of 32 MiB, and runs out of memory with it at step 3."""

    def transfer_batch_to_device(self, batch: torch.Tensor, device: torch.device, dataloader_idx: int) -> torch.Tensor:
        return batch.to(device).repeat(2**21 // len(batch), 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        kept = [super().training_step(batch, batch_idx)]
        while batch_idx == 3:
            kept.append(taken(256))
        return kept[0]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


def test_a_fit_that_failed_keeps_nothing_but_its_last_batch(tmp_path: Path, prompt: Callable[..., None]) -> None:
    callbacks = [GPUUtilizationMonitor(), GPUUtilizationAdvisor()]
    trainer = quiet_trainer(tmp_path, accelerator="gpu", callbacks=callbacks)
    prompt("trainer.fit(model, loader)", trainer=trainer, model=Fails(), loader=loader(Samples(8)))
    assert isinstance(sys.last_value, torch.OutOfMemoryError)
    freed = free_memory()
    assert freed.held.keys() == {"trainer", "model"}  # each leads to the other
    assert sum(freed.held.values()) // MIB == 32
    assert freed.allocated_bytes < 100 * MIB


def test_a_failure_of_cuda_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("CUDA error: device-side assert triggered\nCUDA kernel errors might be ...")

    monkeypatch.setattr(torch.cuda, "empty_cache", fail)
    with pytest.raises(RuntimeError, match="until this process ends"):
        free_memory()
