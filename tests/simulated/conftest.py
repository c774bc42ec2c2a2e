"""Fixtures for tests of the simulated machine, which run programs on it with torch's CUDA build."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_gpu_tools.simulated import Machine, SimulatedCudaError

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def make_machine(tmp_path: Path) -> Callable[..., Machine]:
    """``make_machine(["h100-80gb"] * 2)``: a machine; the test is skipped where none can be built."""

    def make(*arguments: Any, **options: Any) -> Machine:
        try:
            return Machine(tmp_path / "machine", *arguments, **options)
        except SimulatedCudaError:
            pytest.skip("needs torch's CUDA build and gcc: run .ci/simulated_gpu, which makes an environment for it")

    return make


@pytest.fixture
def start() -> Iterator[Start]:
    """``start(machine, code, NAME="value")``: a program on it, in a process that ends with the test.

    In the place of code there can be a file with its arguments.
    """
    programs = []

    def run(machine: Machine, code: str | Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        # One thread for computations on the host, of which these programs have none.
        environ = machine.environment({**os.environ, "OMP_NUM_THREADS": "1", **environment})
        program = ["-c", code] if isinstance(code, str) else [code]
        command = [sys.executable, *program, *arguments]
        pipe = subprocess.PIPE
        programs.append(subprocess.Popen(command, env=environ, stdin=pipe, stdout=pipe, stderr=pipe, text=True))
        return programs[-1]

    yield run
    for program in programs:
        program.kill()
        program.communicate()


@pytest.fixture
def answer(start: Start) -> Callable[..., Any]:
    """``answer(machine, code)``: what a program prints in its last line, as JSON."""
    return lambda *arguments, **environment: ended(start(*arguments, **environment))


def ended(program: subprocess.Popen[str]) -> Any:
    output, errors = program.communicate(timeout=150)
    assert program.returncode == 0, errors
    return json.loads(output.splitlines()[-1])
