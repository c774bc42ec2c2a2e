"""Memory that is freed after a real out-of-memory error, and the names of those that hold the rest."""

from __future__ import annotations

import builtins
import contextlib
import subprocess
import sys
import weakref
from code import InteractiveInterpreter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from trainings import Model, Samples, loader, quiet_trainer

from lightning_gpu_tools import GPUUtilizationAdvisor, GPUUtilizationMonitor, free_memory
from lightning_gpu_tools.types import FreedMemory

pytestmark = pytest.mark.usefixtures("two_gib")

MIB, GIB = 2**20, 2**30


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


def held(freed: FreedMemory) -> dict[str, tuple[str, int]]:
    return {one.name: (one.type_name, one.size_bytes // MIB) for one in freed.held}


def test_what_an_out_of_memory_error_keeps_is_freed(prompt: Callable[..., None]) -> None:
    def train() -> None:
        kept = []
        while True:
            kept.append(taken(256))

    mine = taken(128)
    prompt("train()", train=train, mine=mine)
    assert isinstance(sys.last_value, torch.OutOfMemoryError)
    freed = free_memory()
    (gpu,) = freed.gpus
    assert (gpu.index, gpu.allocated_after_bytes, gpu.reserved_after_bytes) == (0, 128 * MIB, 128 * MIB)
    assert gpu.allocated_before_bytes == gpu.reserved_before_bytes > 1.5 * GIB
    assert freed.freed_bytes == gpu.reserved_before_bytes - 128 * MIB
    assert str(freed).splitlines() == [
        "Freed 1.75 GiB on GPU 0 (1.88 GiB -> 128 MiB reserved).",
        "Released: the traceback of OutOfMemoryError.",
        "Still held:",
        "   128 MiB  mine (Tensor)",
        "To free the memory of variables: del mine",
    ]
    assert free_memory().freed_bytes == 0


class Store:
    kept: Any = None
    error: Any = None


def test_each_variable_has_its_own_share(prompt: Callable[..., None]) -> None:
    model = torch.nn.Linear(4096, 4096, bias=False, device="cuda")  # 64 MiB
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.zeros(1, 4096, device="cuda")).sum().backward()
    optimizer.step()
    loss = model(torch.zeros(2048, 4096, device="cuda")).relu().sum()  # 32 MiB each for input and output
    user = Store()
    user.kept = (model, optimizer)
    names = {"model": model, "net": model, "optimizer": optimizer, "loss": loss, "user": user}
    prompt("", batches=[taken(64), {"x": [taken(32)]}], cpu=torch.zeros(8), other=Store(), **names)
    freed = free_memory()
    assert held(freed) == {
        "model, net": ("Linear", 128),
        "optimizer": ("Adam", 128),
        "batches": ("list", 96),
        "loss": ("Tensor", 64),
        "user": ("Store", 0),
    }
    assert str(freed).endswith("To free the memory of variables: del model, net, optimizer, batches, loss, user")
    assert "user (Store)" not in str(freed)


def test_the_largest_of_what_is_held_elsewhere_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def closure() -> Callable[[], torch.Tensor]:
        closed_over = taken(512)
        return lambda: closed_over

    def fail() -> None:
        failed = taken(256)
        raise KeyError(failed.shape)

    monkeypatch.setattr(Store, "kept", {"k": [taken(256), taken(128)]})
    monkeypatch.setattr(contextlib, "kept", [closure()], raising=False)
    monkeypatch.setattr(contextlib, "also", taken(64), raising=False)
    with pytest.raises(KeyError) as raised:
        fail()
    monkeypatch.setattr(Store, "error", raised.value)
    del raised
    local = taken(32)
    freed = free_memory()

    file = Path(__file__).name
    line = closure.__code__.co_firstlineno
    running = f"the running {test_the_largest_of_what_is_held_elsewhere_is_named.__name__} ({file}:{line + 16})"
    assert held(freed) == {
        f"local variable local of {running}": ("Tensor", 32),
        f"function <lambda> ({file}:{line + 2})": ("function", 512),
        "attribute kept of Store": ("dict", 384),
        f"local variable failed of fail ({file}:{line + 6})": ("Tensor", 256),
    }
    assert freed.elsewhere_bytes == 64 * MIB
    assert "  64.0 MiB  elsewhere\n" in f"{freed}\n"
    assert "del" not in str(freed)
    del local

    Store.kept = Store.error = None
    assert held(free_memory())["contextlib.also"] == ("Tensor", 64)


def test_a_function_that_is_running_can_still_let_go() -> None:
    def run() -> None:
        batch = taken(64)
        batch_is = weakref.ref(batch)
        assert any("local variable batch of the running run" in one.name for one in free_memory().held)
        del batch
        assert batch_is() is None

    run()
    mine = taken(1)
    here = locals()  # before Python 3.13 this is what reading a frame's variables gives, too
    here["added"] = mine
    assert any("local variable mine of the running" in one.name for one in free_memory().held)
    assert here["added"] is mine


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
    assert held(freed) == {"trainer": ("Trainer", 32), "model": ("Fails", 0)}  # each leads to the other
    assert freed.gpus[0].allocated_after_bytes < 100 * MIB


NOTEBOOK = """
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance()
names = shell.user_ns

def cell(code):
    return shell.run_cell(code, store_history=True).result

cell("import torch; from lightning_gpu_tools import free_memory")
cell("mine = torch.zeros(2**20, device='cuda'); mine.shape")
cell("iter([torch.zeros(2**24, device='cuda')])")
cell("3")
shell.kept = names["mine"]  # to which the hidden variable get_ipython leads
freed = cell("free_memory()")
assert freed.released == ("Out[3]",), freed
assert freed.freed_bytes == 2**26
assert sorted(names["Out"]) == [2, 4, 5]
assert names["_3"] == "" and names["__"] == 3
assert [(one.name, one.size_bytes) for one in freed.held] == [("mine", 2**22)]
"""


def test_stored_results_on_a_gpu_are_let_go_of(
    run_python: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    pytest.importorskip("IPython")
    child = run_python("-c", NOTEBOOK, env={"IPYTHONDIR": str(tmp_path)})
    assert child.returncode == 0, child.stdout + child.stderr


def test_the_last_result_at_a_prompt_is_let_go_of(capsys: pytest.CaptureFixture[str]) -> None:
    sys.displayhook(taken(64).storage_offset)
    try:
        freed = free_memory()
        assert (freed.released, freed.freed_bytes) == (("_",), 64 * MIB)
        sys.displayhook(42)
        assert free_memory().released == ()
        assert vars(builtins)["_"] == 42
    finally:
        del vars(builtins)["_"]


@pytest.mark.usefixtures("two_gpus")
def test_each_gpu_is_named(prompt: Callable[..., None]) -> None:
    prompt("", pair=[taken(64), taken(64).to("cuda:1")])
    freed = free_memory()
    assert [gpu.index for gpu in freed.gpus] == [0, 1]
    assert held(freed)["pair"] == ("list", 128)


def test_a_failure_of_cuda_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("CUDA error: device-side assert triggered\nCUDA kernel errors might be ...")

    taken(1)
    monkeypatch.setattr(torch.cuda, "empty_cache", fail)
    freed = free_memory()
    assert freed.failure == "CUDA error: device-side assert triggered"
    assert str(freed).startswith(
        "CUDA failed, and cannot free memory until this process ends. Restart it. (CUDA error: device-side assert"
    )
