"""Peaks of real trainings on a simulated Tesla T4, within fixed bounds of those measured on a real one."""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_gpu_tools.simulated import Machine

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "dry_run_peaks.py"
MISSING = [name for name in ("transformers", "torchvision") if importlib.util.find_spec(name) is None]


@pytest.mark.skipif(bool(MISSING), reason=f"needs {' and '.join(MISSING)}: run .ci/simulated_gpu, which installs them")
def test_peaks_of_real_networks_are_those_of_a_real_t4(
    make_machine: Callable[..., Machine], start: Callable[..., Any], tmp_path: Path
) -> None:
    output = tmp_path / "peaks.json"
    program = start(make_machine(["t4"]), BENCHMARK, "--output", str(output))
    _, errors = program.communicate(timeout=170)
    assert program.returncode == 0, errors
    found = json.loads(output.read_text())
    assert found["bounds"] == {"allocated": [-0.03, 0.08], "reserved": [-0.08, 0.12]}
    assert len(found["runs"]) == 8
    assert all(run["within"] for run in found["runs"]), [(run["model"], run["error"]) for run in found["runs"]]
