"""The contract of nvml_contract.py on a real driver, and facts that only hardware can show."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator

import nvml_contract
import pytest
import torch

from lightning_gpu_tools.gpus import nvml
from lightning_gpu_tools.gpus.nvml.probe import GpuProbe
from lightning_gpu_tools.gpus.sampler import Sampler


@pytest.fixture(autouse=True)
def session() -> Iterator[None]:
    with nvml.session():
        yield


@pytest.mark.parametrize("check", nvml_contract.CHECKS)
def test_driver_keeps_the_contract(check):
    check()


def test_probe_keeps_the_contract():
    nvml_contract.check_probe(time.sleep)


def test_index_and_uuid_are_those_of_nvidia_smi():
    lines = subprocess.run(
        ["nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert [(gpu.index, gpu.uuid) for gpu in nvml.read_gpus()] == [
        (int(index), uuid) for index, uuid in (line.split(", ") for line in lines)
    ]


def test_a_busy_gpu_is_seen_as_busy_and_the_process_is_ours():
    uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    matrix = torch.randn(8192, 8192, device="cuda:0")
    with contextlib.closing(Sampler([uuid], interval_s=0.5)) as sampler:
        sampler.whole(wait_s=10)
        sampler.take()
        deadline, done = time.monotonic() + 5, torch.cuda.Event()
        while time.monotonic() < deadline:  # what is queued outlasts the host, however busy its cores are
            for _ in range(10):
                matrix @ matrix
            done.synchronize()
            done.record()
        sampler.whole(wait_s=10)
        window = sampler.take()[uuid]
    assert sampler.failure is None
    assert window.utilization_percent_mean > 70
    assert window.utilization_observed_s > 3
    assert window.memory_used_bytes >= matrix.numel() * 4
    assert window.energy_joules is None or window.energy_joules > 0
    (gpu,) = (gpu for gpu in nvml.read_gpus() if gpu.uuid == uuid)
    assert gpu.processes
    assert gpu.utilization_percent > 10
    if nvml.pids_are_ours():
        assert os.getpid() in {process.pid for process in gpu.processes}


def test_a_poll_is_cheap():
    """A poll a second takes at most 2 % of a core."""
    for gpu in nvml.read_gpus():
        with contextlib.closing(GpuProbe(gpu.uuid)) as probe:
            probe.read()
            time.sleep(0.2)
            begin_s, begin_cpu_s = time.perf_counter(), time.thread_time()
            probe.read()
            wall_s, cpu_s = time.perf_counter() - begin_s, time.thread_time() - begin_cpu_s
        print(f"{gpu.name}: a poll takes {wall_s * 1e3:.2f} ms, {cpu_s * 1e3:.2f} ms of them on the CPU")
        assert cpu_s < 0.02
