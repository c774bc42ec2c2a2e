"""The tests of this folder run on hardware, and on the simulated machine with torch's CUDA build."""

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lightning_gpu_tools.errors import NvmlUnavailableError
from lightning_gpu_tools.gpus import nvml

GIB = 2**30


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.gpu)


def gpus() -> int:
    try:
        return len(nvml.read_gpus())
    except NvmlUnavailableError:
        return 0


@pytest.fixture(autouse=True, scope="session")
def _needs_a_gpu() -> None:
    if not gpus():
        # With other tests there is none: tests/conftest.py hides it.
        where = "benchmarks/on_gpu.sh tests, python -m pytest tests/on_gpu, or on a simulated one .ci/simulated_gpu"
        pytest.skip(f"needs an NVIDIA GPU: run {where}")


@pytest.fixture(scope="session")
def two_gpus(_needs_a_gpu: None) -> None:
    if gpus() < 2:
        pytest.skip("needs two NVIDIA GPUs, or simulated ones: .ci/simulated_gpu has them")


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave reports without a picture, which takes longer than most trainings here."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)


@pytest.fixture
def two_gib(_needs_a_gpu: None) -> Iterator[None]:
    """Let torch use 2 GiB of the GPU, with nothing that other tests have left in its caches."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(2 * GIB / torch.cuda.get_device_properties(0).total_memory)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
