"""The tests of this folder run on hardware, and on the simulated machine with torch's CUDA build."""

import sys

import pytest

from lightning_gpu_tools.errors import NvmlUnavailableError
from lightning_gpu_tools.gpus import nvml


def gpus() -> int:
    try:
        return len(nvml.read_gpus())
    except NvmlUnavailableError:
        return 0


@pytest.fixture(autouse=True)
def _needs_a_gpu() -> None:
    if not gpus():
        # With other tests there is none: tests/conftest.py hides it.
        where = "benchmarks/on_gpu.sh tests, python -m pytest tests/on_gpu, or on a simulated one .ci/simulated_gpu"
        pytest.skip(f"needs an NVIDIA GPU: run {where}")


@pytest.fixture
def two_gpus(_needs_a_gpu: None) -> None:
    if gpus() < 2:
        pytest.skip("needs two NVIDIA GPUs, or simulated ones: .ci/simulated_gpu has them")


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave reports without a picture, which takes longer than most trainings here."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "bokeh", None)
