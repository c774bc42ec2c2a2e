"""The fake driver, seen through the real nvidia-ml-py: the contract, and state that changes while programs run.

What the package reads of it (MIG, processes, links, events, errors) is tested where the package reads it.
"""

import nvml_contract
import pynvml
import pytest
from fake_driver import gpu, mig, process


@pytest.fixture
def machine(driver):
    """Two GPUs at a moment that does not pass, with NVML initialized."""
    driver.freeze()
    driver.gpus = [gpu(), gpu()]
    pynvml.nvmlInit()
    return driver


@pytest.mark.parametrize("check", nvml_contract.CHECKS)
def test_fake_keeps_the_contract_of_the_real_driver(machine, check):
    machine.gpus = [
        gpu(memory_free="21GiB", utilization=90, processes=[process()]),
        gpu(mig=[mig(), mig()], gpm={}),
        gpu(gpm={2: 80}),
    ]
    check()


def test_fake_probe_keeps_the_contract_of_the_real_driver(machine):
    machine.gpus = [gpu(utilization=90), gpu(gpm={2: 80}), gpu(mig=[mig()], gpm={})]
    nvml_contract.check_probe(machine.advance)
