"""The tests themselves on a machine with a GPU: only runs of those that need it see it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from lightning_gpu_tools.simulated import Machine

NEEDS_A_GPU = "on_gpu/test_nvml_on_device.py::test_index_and_uuid_are_those_of_nvidia_smi"
NEEDS_NONE = "selection/test_picking.py::test_apply_shows_this_process_and_its_children_the_gpus"


def test_only_tests_that_need_a_gpu_see_it(make_machine: Callable[..., Machine]) -> None:
    machine = make_machine()

    def run(*arguments: str) -> str:
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
        folder = Path(__file__).parents[1]
        return subprocess.run(command, env=machine.environment(), cwd=folder, capture_output=True, text=True).stdout

    assert "1 passed in" in run("-n1", NEEDS_A_GPU)
    output = run(NEEDS_A_GPU, NEEDS_NONE)
    assert "1 passed, 1 skipped in" in output
    assert "run benchmarks/on_gpu.sh tests" in output
