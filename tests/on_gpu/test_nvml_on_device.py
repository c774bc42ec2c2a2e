"""The contract of nvml_contract.py on a real driver, and facts that only hardware can show."""

import contextlib
import shutil
import subprocess
import time
from collections.abc import Iterator

import nvml_contract
import pytest

from lightning_gpu_tools.gpus import nvml
from lightning_gpu_tools.gpus.nvml.probe import GpuProbe


@pytest.fixture(autouse=True)
def session() -> Iterator[None]:
    with nvml.session():
        yield


@pytest.mark.parametrize("check", nvml_contract.CHECKS)
def test_driver_keeps_the_contract(check):
    check()


def test_probe_keeps_the_contract():
    nvml_contract.check_probe(time.sleep)


@pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="simulated machines have none")
def test_index_and_uuid_are_those_of_nvidia_smi():
    lines = subprocess.run(
        ["nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert [(gpu.index, gpu.uuid) for gpu in nvml.read_gpus()] == [
        (int(index), uuid) for index, uuid in (line.split(", ") for line in lines)
    ]


def test_a_poll_is_cheap():
    """A poll a second takes at most 2% of a core."""
    for gpu in nvml.read_gpus():
        with contextlib.closing(GpuProbe(gpu.uuid)) as probe:
            probe.read()
            time.sleep(0.2)
            begin_s, begin_cpu_s = time.perf_counter(), time.thread_time()
            probe.read()
            wall_s, cpu_s = time.perf_counter() - begin_s, time.thread_time() - begin_cpu_s
        print(f"{gpu.name}: a poll takes {wall_s * 1e3:.2f} ms, {cpu_s * 1e3:.2f} ms of them on the CPU")
        assert cpu_s < 0.02
