"""The tests of this folder run on real hardware only."""

import pytest

from lightning_gpu_tools.errors import NvmlUnavailableError
from lightning_gpu_tools.gpus import nvml


@pytest.fixture(autouse=True)
def _needs_a_gpu() -> None:
    try:
        gpus = nvml.read_gpus()
    except NvmlUnavailableError as error:
        pytest.skip(f"needs an NVIDIA GPU: {error}")
    if not gpus:
        pytest.skip("needs an NVIDIA GPU: the driver lists none")
