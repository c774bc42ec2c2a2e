"""Memory that is freed after a real out-of-memory error, and the variables that hold the rest."""

import sys
from code import InteractiveInterpreter
from collections.abc import Callable

import pytest
import torch

from lightning_gpu_tools import free_memory

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
