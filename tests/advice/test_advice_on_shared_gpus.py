"""Advice of causes that other jobs on the GPU have, followed on the fake driver."""

import contextlib
import dataclasses
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from cause_examples import TIME_EXAMPLES
from fake_driver import Driver, gpu, process
from launched_jobs import claims_in
from slurm_cluster import wait_for
from synthetic import FLAT, GIB, an_error

from lightning_gpu_tools import select_gpus
from lightning_gpu_tools.advice.causes.memory import leftover_process, other_processes
from lightning_gpu_tools.advice.causes.time import shared_gpu
from lightning_gpu_tools.advice.out_of_memory import ErrorFacts
from lightning_gpu_tools.gpus import nvml
from lightning_gpu_tools.gpus.readings import GpuProcess, GpuReading

pytestmark = pytest.mark.usefixtures("claims_dir")
InShell = Callable[[str], "subprocess.CompletedProcess[str]"]
RUN = TIME_EXAMPLES["shared_gpu"].sick


@pytest.mark.follows(
    "Use a free GPU (lightning-gpu-tools pick --exclusive, or", "use a free one: `lightning-gpu-tools pick"
)
def test_the_advised_ways_to_a_free_gpu_find_it(driver: Driver, in_shell: InShell) -> None:
    driver.gpus = [gpu(memory_free="10GiB"), gpu(utilization=40, processes=[process(1, "3GiB")])]
    free = str(driver.gpus[0].uuid)
    (finding,) = shared_gpu.find(dataclasses.replace(RUN, has_trainer=False))
    command, call = re.search(r"Use a free GPU \((.*), or (.*\))\), then", finding.advice).groups()
    assert in_shell(command).stdout == f"{free}\n"
    assert in_shell(re.search("`(.*)`", shared_gpu.CAUSE.change)[1]).stdout == f"{free}\n"
    assert eval(call, {"select_gpus": select_gpus}).uuids == (free,)


def advice(*gpus: GpuReading) -> str:
    run = dataclasses.replace(RUN, has_trainer=False)
    error = an_error(begins=FLAT, others=(GpuProcess(9, 6 * GIB),), gpus=gpus)
    (finding,) = other_processes.find(ErrorFacts(run, error))
    return finding.advice


@pytest.mark.follows(
    "lightning-gpu-tools run --min-free {} --wait 2h -- CMD",
    "CUDA_VISIBLE_DEVICES=$(lightning-gpu-tools pick --min-free {})",
)
def test_the_job_that_did_not_fit_gets_a_gpu_as_advised(driver: Driver, in_shell: InShell, claims_dir: Path) -> None:
    driver.gpus = [gpu(memory_total="24GiB", memory_free="1GiB"), gpu(memory_total="80GiB")]
    mask = re.search(
        r"(CUDA_VISIBLE_DEVICES=\$\(.*?\))\.", advice(*nvml.read_gpus(), GpuReading(index=2, uuid="GPU-0"))
    )[1]
    assert in_shell(f"{mask} python train.py").stdout == f"{driver.gpus[1].uuid}\n"
    driver.gpus = [gpu(memory_total="80GiB", memory_free="1GiB")]
    command = re.search("Wait for one: (.*) CMD", advice())[1]

    def others_leave_once_it_waits() -> None:
        wait_for(lambda: any(claims_dir.glob("wait-*.json")))
        driver.gpus[0].memory_free = 80 * GIB

    threading.Thread(target=others_leave_once_it_waits).start()
    answer = in_shell(f"{command} python train.py")
    assert answer.stdout == f"{driver.gpus[0].uuid}\n"
    assert "Waiting for up to" in answer.stderr


@pytest.mark.follows("{}(min_free='{}') claims it.")
def test_the_advised_size_is_claimed(driver: Driver, claims_dir: Path) -> None:
    driver.gpus = [gpu()]
    call = re.search(r"(select_gpus\(.*?\)) claims it", advice())[1]
    needed = int(re.search(r"This job needs (\d+)GiB", advice())[1])
    with eval(call, {"select_gpus": select_gpus}):
        assert [claim.memory_bytes for claim in claims_in(claims_dir)] == [needed * GIB]


@pytest.mark.follows("If it is not needed, end it: kill")
def test_the_advised_kill_ends_the_leftover_process(in_shell: InShell) -> None:
    script = "import subprocess as s; print(s.Popen(['sleep', '100'], stdout=s.DEVNULL).pid)"
    pid = int(subprocess.check_output([sys.executable, "-c", script]))
    error = an_error(begins=FLAT, others=(GpuProcess(pid, 6 * GIB),), orphans=(pid,))
    (finding,) = leftover_process.find(ErrorFacts(RUN, error))
    command = re.search(r"end it: (kill [\d ]+)\.", finding.advice)[1]
    assert in_shell(command).returncode == 0
    with contextlib.suppress(psutil.NoSuchProcess):
        process, end_s = psutil.Process(pid), time.monotonic() + 30
        while process.status() != psutil.STATUS_ZOMBIE:  # nobody may ask for its exit code
            assert time.monotonic() < end_s
