"""The tests of this folder run on hardware, and on the simulated machine with torch's CUDA build."""

import pytest

from lightning_gpu_tools.errors import NvmlUnavailableError
from lightning_gpu_tools.gpus import nvml


@pytest.fixture(autouse=True)
def _needs_a_gpu() -> None:
    try:
        there = len(nvml.read_gpus()) > 0
    except NvmlUnavailableError:
        there = False
    if not there:
        pytest.skip("needs an NVIDIA GPU, or a simulated one: run .ci/simulated_gpu, which makes an environment for it")
