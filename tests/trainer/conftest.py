"""Trainings without the extra ``plot``, and Trainers on the fake driver's GPUs."""

import sys

import cpu_as_cuda
import pytest
from fake_driver import Driver, gpu
from trainings import HandClock


@pytest.fixture
def time() -> HandClock:
    return HandClock()


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw no report, which takes longer than most trainings here."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)


@pytest.fixture
def cuda(driver: Driver, claims_dir: object, monkeypatch: pytest.MonkeyPatch) -> Driver:
    """Four idle GPUs; the higher the number, the more free memory."""
    driver.gpus = [gpu(memory_free=f"{gib}GiB") for gib in (10, 20, 30, 40)]
    cpu_as_cuda.install(monkeypatch.setattr)
    return driver
