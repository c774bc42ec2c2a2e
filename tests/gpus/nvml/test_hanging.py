"""A driver that hangs in a call for one GPU, which nothing can interrupt: it is named, and everyone else goes on."""

import pytest
from fake_driver import gpu

from lightning_gpu_tools import select_gpus
from lightning_gpu_tools.errors import LightningGpuToolsError, NotEnoughGpusError, NvmlUnavailableError
from lightning_gpu_tools.gpus import limits, nvml
from lightning_gpu_tools.selection import cuda

TIMEOUT_S = 30.0


@pytest.fixture
def hanging(driver, monkeypatch):
    """Have the driver hang in one call for GPU 1 of 3 until the test ends."""
    monkeypatch.setattr(limits, "LIMIT_S", 0.3)
    driver.gpus = [gpu(memory_free="10GiB"), gpu(memory_free="30GiB"), gpu(memory_free="20GiB")]

    def hang(function):
        driver.gpus[1].hangs = function

    yield hang
    driver.hangs = driver.gpus[1].hangs = None
    for call in [*limits._late.values()]:
        call.join(TIMEOUT_S)


@pytest.mark.parametrize("function", ["nvmlDeviceGetUUID", "nvmlDeviceGetMemoryInfo"])
def test_a_hanging_gpu_is_listed(driver, hanging, function):
    hanging(function)
    first, broken, last = nvml.read_gpus()
    assert "the driver has not answered within" in broken.error
    assert "dmesg" in broken.error
    assert broken.uuid == (None if function == "nvmlDeviceGetUUID" else driver.gpus[1].uuid)
    assert first.memory_free_bytes == 10 * 2**30
    assert last.memory_free_bytes == 20 * 2**30
    assert first.error is last.error is None


def test_it_is_not_asked_again_until_it_has_answered(driver, hanging):
    hanging("nvmlDeviceGetMemoryInfo")
    uuid = driver.gpus[1].uuid
    for _ in range(3):
        assert nvml.read_gpus()[1].uuid == uuid
    asked = [call for call in driver.calls() if call.uuid == uuid and call.function == "nvmlDeviceGetMemoryInfo"]
    assert len(asked) == 1
    (late,) = [call for call in limits._late.values() if call.is_alive()]
    hanging(None)
    late.join(TIMEOUT_S)
    assert nvml.read_gpus()[1].memory_free_bytes == 30 * 2**30


def test_the_others_are_picked(driver, hanging, claims_dir):
    hanging("nvmlDeviceGetMemoryInfo")
    with select_gpus(2) as selection:
        assert selection.uuids == (driver.gpus[2].uuid, driver.gpus[0].uuid)
    with pytest.raises(NotEnoughGpusError, match=r"GPU 1 \(GPU-.*\): the driver has not answered within"):
        select_gpus(3)


def test_a_pick_ends_although_a_call_does_not(driver, hanging, claims_dir, run_python):
    hanging("nvmlDeviceGetMemoryInfo")
    code = "from lightning_gpu_tools.gpus import limits; limits.LIMIT_S = 0.3\n"
    code += "from lightning_gpu_tools.cli import main; print(main(['pick']))"
    result = run_python("-c", code)
    assert (result.stdout, result.stderr) == (f"{driver.gpus[2].uuid}\n0\n", "")


@pytest.mark.parametrize("function", ["nvmlInitWithFlags", "nvmlDeviceGetCount_v2"])
def test_a_driver_that_answers_nothing_is_unavailable(driver, hanging, function):
    driver.hangs = function
    name = function.removesuffix("WithFlags").removesuffix("_v2")
    with pytest.raises(NvmlUnavailableError, match=rf"The NVIDIA driver has not answered {name} within .* s. Check"):
        nvml.read_gpus(limit_s=0.3)


def test_cuda_that_does_not_start_keeps_no_claims_locked(monkeypatch):
    cuda.device_order.cache_clear()
    monkeypatch.setattr(cuda, "_LIMIT_S", 0.3)
    monkeypatch.setattr(cuda, "_PRINT_UUIDS", "import signal; signal.pause()")
    with pytest.raises(LightningGpuToolsError, match=r"the order of its devices within .* CUDA_DEVICE_ORDER"):
        cuda.device_order()
