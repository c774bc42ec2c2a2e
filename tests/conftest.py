"""Fixtures for every test: a fake NVIDIA driver, in this process and in its children, and real child processes."""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fake_driver
import hypothesis
import pytest
import quiet_kernel
from slurm_cluster import slurm_cluster

from lightning_gpu_tools.processes import process_stat
from lightning_gpu_tools.selection import picking
from lightning_gpu_tools.selection.claims import held_claims

if TYPE_CHECKING:
    from fsspec.implementations.memory import MemoryFileSystem
    from trainings import HandClock

# Before torch is imported, here or in a child: on the tests' tiny tensors its threads only spin until the others are
# done, on cores that another test needs. It was a third of the CPU time of some files.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.pop("COLUMNS", None)  # of pytest-xdist: output that is not a terminal has 100 columns

# The same examples in every run, so that a failure is due to the change; --hypothesis-profile=thorough finds others.
# Examples have no time limit, because the machine may be shared.
_HYPOTHESIS = {"deadline": None, "suppress_health_check": list(hypothesis.HealthCheck)}
hypothesis.settings.register_profile("ci", max_examples=60, derandomize=True, **_HYPOTHESIS)
hypothesis.settings.register_profile("thorough", max_examples=2000, **_HYPOTHESIS)
hypothesis.settings.load_profile("ci")


_wait_for_its_end = subprocess.Popen.__exit__


def _end_if_the_test_fails(process: subprocess.Popen[Any], kind: Any, *error: Any) -> None:
    if kind is not None:
        process.kill()
    _wait_for_its_end(process, kind, *error)


# At the end of `with subprocess.Popen(...)`, Python waits for the program, also after a failed assertion.
subprocess.Popen.__exit__ = _end_if_the_test_fails  # type: ignore[method-assign]


def pytest_xdist_auto_num_workers() -> int:
    """Return how many processes ``-n logical`` starts: half of its time a test waits for another process or a clock."""
    return (os.cpu_count() or 1) * 3 // 2


def pytest_cmdline_main(config: pytest.Config) -> None:
    """Start pytest again with this machine's GPUs hidden, unless only tests that need them are asked for."""
    tests = Path(__file__).resolve().parent
    asked = [Path(config.invocation_params.dir, name.split("::")[0]).resolve() for name in config.args]
    if all(path.is_relative_to(tests / "on_gpu") or path.is_relative_to(tests / "simulated") for path in asked):
        return
    # The loader reads LD_LIBRARY_PATH when a process starts, and finds files there that it cannot load. This hides the
    # GPUs from CUDA and NVML, here and in every child. NVML ignores CUDA_VISIBLE_DEVICES, and tests change it.
    folders = [str(tests / "no_gpu"), *os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)]
    if folders[0] == folders[1] or not any(map(_can_be_loaded, ("libcuda.so.1", "libnvidia-ml.so.1"))):
        return
    os.environ["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, folders))
    # Users of GPUs set the first two. The others are those of a simulated machine, whose libcuda is preloaded.
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "SIMULATED_CUDA", "LD_PRELOAD"):
        os.environ.pop(name, None)
    config.pluginmanager.getplugin("capturemanager").stop_global_capturing()  # gives standard input back
    os.execv(sys.executable, sys.orig_argv)


def _can_be_loaded(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


# A shell starts background jobs with Ctrl-C ignored, and children inherit that; the tests that press it need it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[fake_driver.Driver]:
    """A machine without GPUs, to which the test gives some, for this process and the children it starts."""
    import pynvml

    machine = fake_driver.Driver(tmp_path)
    for name, value in machine.variables().items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    # pynvml keeps the library it has loaded, and every function it has looked up, in these globals.
    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    monkeypatch.setattr(pynvml, "_nvmlLib_refcount", 0)
    fake_driver.install()
    yield machine
    fake_driver.uninstall()


@pytest.fixture
def run_python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """``run_python("-c", "print(1)", env={"A": "1", "B": None})``: a real child process, its output as text.

    With the fixture ``driver`` it sees the fake driver. ``env`` adds to the environment; a value of None removes.
    """

    def run(*arguments: str, env: dict[str, str | None] | None = None, **options: Any) -> Any:
        environ = {**os.environ, **(env or {})}
        return subprocess.run(
            [sys.executable, *arguments],
            env={name: value for name, value in environ.items() if value is not None},
            **{"capture_output": True, "text": True, "timeout": 120, **options},
        )

    return run


@pytest.fixture
def run_cli(run_python: Callable[..., Any]) -> Callable[..., subprocess.CompletedProcess[str]]:
    """``run_cli("pick", "-n", "1")``: the command line as a real child process."""
    return lambda *arguments, **options: run_python("-m", "lightning_gpu_tools", *arguments, **options)


@pytest.fixture
def in_shell(tmp_path: Path) -> Callable[[str], subprocess.CompletedProcess[str]]:
    """``in_shell("lightning-gpu-tools pick")``: a command as users type it, beside a train.py that prints its GPUs."""
    (tmp_path / "train.py").write_text("import os; print(os.environ['CUDA_VISIBLE_DEVICES'])")
    (tmp_path / "bin").mkdir()
    for name, arguments in (("python", ""), ("lightning-gpu-tools", "-m lightning_gpu_tools")):
        (tmp_path / "bin" / name).write_text(f'#!/bin/sh\nexec {sys.executable} {arguments} "$@"\n')
        (tmp_path / "bin" / name).chmod(0o755)

    def run(command: str) -> subprocess.CompletedProcess[str]:
        environ = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
        options: dict[str, Any] = {"cwd": tmp_path, "env": environ, "capture_output": True, "text": True}
        return subprocess.run(["sh", "-c", command], timeout=120, check=False, **options)

    return run


@pytest.fixture
def call(capfd: pytest.CaptureFixture[str]) -> Callable[..., subprocess.CompletedProcess[str]]:
    """``call("pick", "-n", "1")``: a command in this process, which saves the start of another one."""
    from lightning_gpu_tools.cli import main

    def run_here(*arguments: str) -> subprocess.CompletedProcess[str]:
        try:
            code = main([*arguments])
        except SystemExit as end:  # argparse
            code = int(end.code or 0)
        return subprocess.CompletedProcess(arguments, code, *capfd.readouterr())

    return run_here


@pytest.fixture
def run(call: Callable[..., subprocess.CompletedProcess[str]]) -> Callable[..., tuple[int, str, str]]:
    def run_checkpoint(*arguments: object) -> tuple[int, str, str]:
        answer = call("checkpoint", *map(str, arguments))
        return answer.returncode, answer.stdout, answer.stderr

    return run_checkpoint


@pytest.fixture(autouse=True)
def no_claim_is_left() -> Iterator[None]:
    """Release the claims of a test, such as those of a Trainer's accelerator, which last as long as this process."""
    picking._applied.clear()
    yield
    for claim in held_claims():
        claim.release()


@pytest.fixture
def kernel_thread() -> int:
    """Return the PID of a kernel thread, which uses no GPU: as if the driver named a process of another container."""
    pids = (int(name) for name in os.listdir("/proc") if name.isdecimal())
    found = next((pid for pid in pids if (stat := process_stat(pid)) is not None and stat.is_kernel_thread), None)
    return found or pytest.skip("no kernel thread is visible from here")


@pytest.fixture
def claims_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty place for claims, for this process and its children; not yet created."""
    directory = tmp_path / "claims"
    monkeypatch.setenv("LIGHTNING_GPU_TOOLS_CLAIMS_DIR", str(directory))
    for name in ("CUDA_VISIBLE_DEVICES", "LIGHTNING_GPU_TOOLS_JOB"):
        monkeypatch.setenv(name, "")  # so that it is put back, whatever a selection does with it
        monkeypatch.delenv(name)
    return directory


@pytest.fixture
def memory_files() -> Iterator[type[MemoryFileSystem]]:
    """The files behind ``memory://``, of which none is there before or after the test."""
    from fsspec.implementations.memory import MemoryFileSystem

    yield MemoryFileSystem
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


@pytest.fixture
def hand_clock(monkeypatch: pytest.MonkeyPatch) -> HandClock:
    """Return the clock that times everything in a session."""
    from trainings import HandClock  # which imports Lightning

    from lightning_gpu_tools.runs import session
    from lightning_gpu_tools.training.step_clock import StepClock

    clock = HandClock()
    monkeypatch.setattr(session, "StepClock", functools.partial(StepClock, clock))
    return clock


@pytest.fixture
def core_waits() -> None:
    """Have trainings of this process see their real waits for a core, which depend on other programs."""


@pytest.fixture(autouse=True)
def no_core_waits(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "core_waits" not in request.fixturenames:
        quiet_kernel.install(monkeypatch.setattr, tmp_path_factory.getbasetemp())


@pytest.fixture(scope="session")
def slurm() -> Iterator[dict[str, str]]:
    """Start a real SLURM, and yield the environment that its commands need."""
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder, slurm_cluster(Path(folder)) as environment:
        yield environment
