"""Checks that hold for any NVIDIA driver.

test_fake_driver.py runs them on the fake one, and on_gpu/ on a real one, so that the fake cannot drift away from it.
"""

import contextlib
import itertools
import time
from collections.abc import Callable
from typing import Any

import pynvml
import pytest

from lightning_gpu_tools.gpus import nvml
from lightning_gpu_tools.gpus.nvml.probe import GpuProbe


def every_gpu() -> list[Any]:
    return [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]


def supported(function: Callable[..., Any], *arguments: Any) -> Any:
    """The answer, or None if this GPU has none; any other error is a failure of the test."""
    try:
        return function(*arguments)
    except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_NoPermission):
        return None


def check_handles() -> None:
    """A GPU is the same one by index and by UUID; what is not there is an error of its kind."""
    for handle in every_gpu():
        uuid = pynvml.nvmlDeviceGetUUID(handle)
        assert uuid.startswith("GPU-")
        assert pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByUUID(uuid)) == uuid
    with pytest.raises(pynvml.NVMLError_InvalidArgument):
        pynvml.nvmlDeviceGetHandleByIndex(pynvml.nvmlDeviceGetCount())
    with pytest.raises(pynvml.NVMLError_NotFound):
        pynvml.nvmlDeviceGetHandleByUUID("GPU-00000000-0000-0000-0000-000000000000")


def check_utilization_samples() -> None:
    """The buffer holds percents of the last minute, by the clock of this host; asked again it gives only newer ones."""
    for handle in every_gpu():
        try:
            answer = supported(pynvml.nvmlDeviceGetSamples, handle, pynvml.NVML_GPU_UTILIZATION_SAMPLES, 0)
        except pynvml.NVMLError_NotFound:  # nothing buffered: a GPU that sleeps
            continue
        if answer is None:
            continue
        value_type, samples = answer
        assert value_type == pynvml.NVML_VALUE_TYPE_UNSIGNED_INT
        newest_us = max(sample.timeStamp for sample in samples)
        assert abs(newest_us / 1e6 - time.time()) < 60
        assert all(0 <= sample.sampleValue.uiVal <= 100 for sample in samples)
        try:
            _, newer = pynvml.nvmlDeviceGetSamples(handle, pynvml.NVML_GPU_UTILIZATION_SAMPLES, newest_us)
        except pynvml.NVMLError_NotFound:
            continue
        assert all(sample.timeStamp > newest_us for sample in newer)


def check_counters() -> None:
    """Energy, throttle and PCIe counters answer one by one, and never run backwards within a moment."""
    for handle in every_gpu():
        before, after = (pynvml.nvmlDeviceGetFieldValues(handle, [74, 75, 83]) for _ in range(2))
        for first, second in zip(before, after, strict=True):
            assert first.nvmlReturn == second.nvmlReturn
            if first.nvmlReturn == pynvml.NVML_SUCCESS:
                assert second.value.ullVal >= first.value.ullVal
        (unknown,) = pynvml.nvmlDeviceGetFieldValues(handle, [9999])
        assert unknown.nvmlReturn != pynvml.NVML_SUCCESS


def check_readings() -> None:
    """Every GPU has a complete reading, in PCI order, and its parts agree with one another."""
    gpus = nvml.read_gpus()
    assert len(gpus) == pynvml.nvmlDeviceGetCount()
    assert [gpu.index for gpu in gpus] == list(range(len(gpus)))
    assert [gpu.pci_bus_id for gpu in gpus] == sorted(gpu.pci_bus_id or "" for gpu in gpus)
    for gpu in gpus:
        assert gpu.error is None
        assert gpu.name
        assert gpu.memory_total_bytes is not None
        assert gpu.memory_free_bytes is not None
        assert 0 <= gpu.memory_free_bytes <= gpu.memory_total_bytes
        if gpu.mig_mode:
            assert all((instance.uuid or "").startswith("MIG-") for instance in gpu.mig_instances)
            assert len({instance.number for instance in gpu.mig_instances}) == len(gpu.mig_instances)
        else:
            assert gpu.utilization_percent is not None
            assert 0 <= gpu.utilization_percent <= 100
        assert gpu.compute_mode is not None
        assert (gpu.compute_capability or (0, 0)) >= (3, 0)
    uuids = [gpu.uuid for gpu in gpus if gpu.uuid]
    links, nodes = nvml.read_connections(uuids)
    assert links <= set(itertools.combinations(sorted(uuids), 2))
    assert set(nodes) == set(uuids)


def check_memory() -> None:
    """The driver's own memory counts as used, and the newer call reports its size."""
    for handle in every_gpu():
        whole = pynvml.nvmlDeviceGetMemoryInfo(handle)
        parts = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
        assert parts.total == whole.total
        assert abs(parts.used + parts.reserved - whole.used) < 64 * 2**20  # others may come and go


CHECKS = [check_handles, check_utilization_samples, check_counters, check_readings, check_memory]


def check_probe(wait: Callable[[float], None]) -> None:
    """Two reads, a second apart, give samples and counters that fit together, without a problem."""
    for gpu in nvml.read_gpus():
        assert gpu.uuid is not None
        with contextlib.closing(GpuProbe(gpu.uuid)) as probe:
            first = probe.read()
            wait(1.2)
            second = probe.read()
        assert first.problems == second.problems == ()
        assert first.utilization == ()
        times = [sample.time_s for sample in second.utilization]
        assert times == sorted(set(times))
        counted = ("energy_joules", "power_capped_percent", "thermal_throttled_percent", "throttled_percent")
        assert not first.values.keys() & {*counted}
        assert all(second.values.get(name, 0.0) >= 0.0 for name in counted)
        # Counters of throttling advance in steps, so that of a moment may exceed 100 %.
        measured = second.values.keys() - {*counted}
        percents = {name: second.values[name] for name in measured if name.endswith("_percent")}
        assert all(0 <= value <= 100 for value in percents.values()), percents
