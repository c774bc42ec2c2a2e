"""The fake driver, seen through the real nvidia-ml-py: the contract, and state that changes while programs run.

What the package reads of it (MIG, processes, links, events, errors) is tested where the package reads it.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time

import fake_driver
import nvml_contract
import pynvml
import pytest
from fake_driver import GIB, gpu, mig, process


@pytest.fixture
def machine(driver):
    """Two GPUs at a moment that does not pass, with NVML initialised."""
    with driver.change():
        driver.now_s = time.time()
        driver.start_s = driver.now_s - 100
    driver.gpus = [gpu(), gpu()]
    pynvml.nvmlInit()
    return driver


def handle(index: int = 0):
    return pynvml.nvmlDeviceGetHandleByIndex(index)


@pytest.mark.parametrize(
    "check",
    [
        nvml_contract.check_handles,
        nvml_contract.check_memory,
        nvml_contract.check_utilization_samples,
        nvml_contract.check_counters,
        nvml_contract.check_readings,
    ],
)
def test_fake_keeps_the_contract_of_the_real_driver(machine, check):
    machine.gpus = [
        gpu(memory_free="21GiB", utilization=90, memory_reserved=GIB, processes=[process()]),
        gpu(mig=[mig(), mig()], gpm={}),
        gpu(gpm={2: 80}),
    ]
    check()


def test_fake_probe_keeps_the_contract_of_the_real_driver(machine):
    machine.gpus = [gpu(utilization=90), gpu(gpm={2: 80}), gpu(mig=[mig()], gpm={})]
    nvml_contract.check_probe(machine.advance)


def test_a_change_is_seen_by_the_next_call(machine):
    gpu_0 = handle()
    with machine.change():
        machine.gpus[0].memory_free = "7GiB"
    assert pynvml.nvmlDeviceGetMemoryInfo(gpu_0).free == 7 * GIB


def test_a_running_child_process_sees_a_change(machine):
    code = """
import sys, pynvml
pynvml.nvmlInit()
for _ in sys.stdin:
    print(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).free, flush=True)
"""
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with child:
        child.stdin.write("\n")
        child.stdin.flush()
        assert int(child.stdout.readline()) == 80 * GIB
        with machine.change():
            machine.gpus[0].memory_free = "1GiB"
        child.stdin.write("\n")
        child.stdin.flush()
        assert int(child.stdout.readline()) == GIB
        child.stdin.close()


def test_calls_are_counted_by_gpu_and_process(machine, run_python):
    machine.forget_calls()
    pynvml.nvmlDeviceGetName(handle(1))
    assert machine.calls()[-1] == (
        os.getpid(),
        "nvmlDeviceGetName",
        machine.gpus[1].uuid,
        "MainThread",
    )
    assert machine.calls_by_gpu() == {machine.gpus[1].uuid: 1}
    assert run_python("-c", "import pynvml; pynvml.nvmlInit()").returncode == 0
    assert machine.calls()[-1].function == "nvmlInitWithFlags"
    assert machine.calls()[-1].pid != os.getpid()


def test_another_sitecustomize_still_runs(driver, run_python, tmp_path):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("import sys; sys.ours = 42")
    path = os.pathsep.join([os.environ["PYTHONPATH"], str(tmp_path / "site")])
    code = "import sys, pynvml; pynvml.nvmlInit(); print(sys.ours, pynvml.nvmlDeviceGetCount())"
    assert run_python("-c", code, env={"PYTHONPATH": path}).stdout == "42 0\n"


def test_without_the_variable_the_real_library_is_loaded(driver, run_python):
    code = "import ctypes; print(ctypes.CDLL.__module__)"
    assert run_python("-c", code, env={fake_driver.VARIABLE: None}).stdout == "ctypes\n"


def test_other_libraries_are_the_real_ones(driver):
    assert ctypes.CDLL(None).getpid() == os.getpid()


# Errors


def test_calls_before_init_and_after_shutdown_are_refused(machine):
    gpu_0 = handle()
    pynvml.nvmlInit()
    pynvml.nvmlShutdown()
    pynvml.nvmlDeviceGetName(gpu_0)  # still open: it was opened twice
    pynvml.nvmlShutdown()
    with pytest.raises(pynvml.NVMLError_Uninitialized):
        pynvml.nvmlDeviceGetName(gpu_0)
    with pytest.raises(pynvml.NVMLError_Uninitialized):
        pynvml.nvmlShutdown()


def test_a_forked_child_has_to_init_again(driver, run_python):
    driver.gpus = [gpu()]
    code = """
import os, pynvml
pynvml.nvmlInit()
if os.fork() == 0:
    try:
        pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError_Uninitialized:
        pynvml.nvmlInit()
        print("again", pynvml.nvmlDeviceGetCount(), flush=True)
    os._exit(0)
os.wait()
"""
    assert run_python("-W", "ignore", "-c", code).stdout == "again 1\n"


def test_an_error_of_one_call_hurts_no_other(machine):
    gpu_0 = handle()
    with machine.change():
        machine.gpus[0].errors = {"nvmlDeviceGetMemoryInfo": "UNKNOWN"}
    with pytest.raises(pynvml.NVMLError_Unknown):
        pynvml.nvmlDeviceGetMemoryInfo(gpu_0)
    with pytest.raises(pynvml.NVMLError_Unknown):  # the name without a suffix means every version
        pynvml.nvmlDeviceGetMemoryInfo(gpu_0, version=pynvml.nvmlMemory_v2)
    pynvml.nvmlDeviceGetName(gpu_0)
    pynvml.nvmlDeviceGetMemoryInfo(handle(1))


def test_a_foreign_handle_is_an_invalid_argument(machine):
    with pytest.raises(pynvml.NVMLError_InvalidArgument):
        pynvml.nvmlDeviceGetName(pynvml.c_nvmlDevice_t())


def test_a_call_can_take_its_time(machine):
    with machine.change():
        machine.latency_s = {"nvmlDeviceGetName": 0.05}
    begin_s = time.monotonic()
    pynvml.nvmlDeviceGetName(handle())
    assert time.monotonic() - begin_s >= 0.05


# Quantities


def percents(gpu_0, last_us: int = 0) -> list[int]:
    _, samples = pynvml.nvmlDeviceGetSamples(gpu_0, pynvml.NVML_GPU_UTILIZATION_SAMPLES, last_us)
    return [sample.sampleValue.uiVal for sample in samples]


def test_utilization_samples_are_means_of_their_periods(machine):
    with machine.change():
        machine.start_s, machine.now_s = 1000.0, 1010.0
        machine.gpus[0].utilization = [(0, 100), (9.25, 0), (9.75, 40)]
        machine.gpus[0].sample_period_s = 0.5
    assert percents(handle(), last_us=1008_000_000) == [100, 100, 50, 20]
    machine.advance(0.49)
    with pytest.raises(pynvml.NVMLError_NotFound):
        percents(handle(), last_us=1010_000_000)
    machine.advance(0.01)
    assert percents(handle(), last_us=1010_000_000) == [40]


def test_buffer_is_as_deep_as_told_and_keeps_the_newest(machine):
    with machine.change():
        machine.start_s, machine.now_s = 0.0, 1000.0
        machine.gpus[0].utilization = [(0, 10), (990, 20)]
        machine.gpus[0].sample_period_s, machine.gpus[0].sample_depth = 1.0, 12
    assert percents(handle()) == [10, 10, *[20] * 10]


def test_counters_grow_with_what_they_count(machine):
    with machine.change():
        machine.start_s, machine.now_s = 0.0, 10.0
        machine.gpus[0].power_watts = [(0, 100), (5, 300)]
        machine.gpus[0].throttled_thermal = 0.5
        machine.gpus[0].field_values = {"197": "UNKNOWN"}
    assert pynvml.nvmlDeviceGetTotalEnergyConsumption(handle()) == 2_000_000
    energy, thermal, broken = pynvml.nvmlDeviceGetFieldValues(handle(), [83, 75, 197])
    assert (energy.value.ullVal, thermal.value.ullVal) == (2_000_000, 5_000_000_000)
    assert broken.nvmlReturn == pynvml.NVML_ERROR_UNKNOWN
