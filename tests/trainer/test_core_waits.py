"""Trainings that share their core with programs of others: both are on one core, so that they have to."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from trainings import Model, Samples, burn, loader, quiet_trainer

from lightning_gpu_tools import GPUUtilizationAdvisor, GPUUtilizationMonitor, load_report
from lightning_gpu_tools.training import cores
from lightning_gpu_tools.training.cores import CoreUsers, ThreadWait
from lightning_gpu_tools.training.stacks import added_times, thread_times
from lightning_gpu_tools.units import user_name

pytestmark = [
    pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the kernel does not count waits"),
    pytest.mark.usefixtures("core_waits"),
]

COMPUTE = f"import os\nwhile os.path.exists('/proc/{os.getpid()}'): sum(range(100_000))"


@pytest.fixture
def one_core() -> Iterator[None]:
    """This thread, and what it starts, on one core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    yield
    os.sched_setaffinity(0, before)


@contextmanager
def others(folder: Path, count: int) -> Iterator[list[int]]:
    """Programs named ``busy``, which are not this process's children and compute on its core all the time."""
    (folder / "busy").symlink_to(Path(sys.executable).resolve())
    start = f"subprocess.Popen([{str(folder / 'busy')!r}, '-c', {COMPUTE!r}], stdout=subprocess.DEVNULL).pid"
    command = [sys.executable, "-c", f"import subprocess\nfor _ in range({count}): print({start})"]
    pids = [int(pid) for pid in subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout.split()]
    try:
        yield pids
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)


def train(folder: Path, spend: Callable[[float], None], step_s: float, load_s: float = 0.0, workers: int = 0) -> Any:
    """Train 60 steps that take so long each, and return the report."""
    watching = [GPUUtilizationMonitor(), GPUUtilizationAdvisor(min_seconds=0, min_steps=20)]
    data = loader(Samples(60, burn, load_s), num_workers=workers)
    quiet_trainer(folder, callbacks=watching).fit(Model(spend, step_s), data)
    return load_report(folder)


def test_a_training_next_to_other_programs_names_them(
    one_core: None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with others(tmp_path, 2):
        report = train(tmp_path, burn, 0.02)
    first, printed = report.diagnosis.findings[0], " ".join(capfd.readouterr().out.split())
    assert (report.diagnosis.verdict, first.cause, first.evidence["kind"]) == (
        "low",
        "cpu_contention",
        "other_programs",
    )
    assert first.share == pytest.approx(report.core_wait_share)
    assert first.share > 0.3  # as each of the three gets a third
    assert report.others_cores > 0.3
    assert f"{user_name(os.getuid())}'s busy " in report.diagnosis.why
    assert re.search(r"Why: Waiting for a CPU core takes \d\d % of the wall time", printed)
    assert re.search(r"; other programs used \d\.\d cores;", printed)
    assert report.unseen == ()


@contextmanager
def children(folder: Path, count: int, *before: str) -> Iterator[None]:
    """Processes named ``simulator`` that this one has started, and that compute all the time."""
    program = folder / "simulator"
    if not program.is_symlink():
        program.symlink_to(Path(sys.executable).resolve())
    with ExitStack() as ends:
        for _ in range(count):
            child = ends.enter_context(subprocess.Popen([*before, program, "-c", COMPUTE], stdout=subprocess.DEVNULL))
            ends.callback(child.kill)
        yield


def of_cores(report: Any) -> Any:
    return next((one for one in report.diagnosis.findings if one.cause == "cpu_contention"), None)


@pytest.mark.follows("child processes of this job", "them with nice -n 19, so that training goes first.")
def test_a_programs_own_processes_are_named_and_go_last_with_nice(one_core: None, tmp_path: Path) -> None:
    with children(tmp_path, 5):
        report = train(tmp_path, burn, 0.03)
    finding = of_cores(report)
    assert (report.diagnosis.findings[0], finding.evidence["kind"]) == (finding, "own_children")
    assert finding.evidence["taken_by"].startswith("5 child processes of this job (simulator) use ")
    command = re.search(r"them with (nice -n 19), so", finding.advice)[1].split()  # type: ignore[index]
    with children(tmp_path, 5, *command):
        followed = train(tmp_path, burn, 0.03)
    assert followed.core_wait_share < report.core_wait_share
    assert of_cores(followed) is None or of_cores(followed).evidence["kind"] != "own_children"


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one core")
@pytest.mark.follows("Start at most {} of them (now {}), or start")
def test_as_many_processes_as_advised_leave_training_a_core(tmp_path: Path) -> None:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:2])
    try:
        with children(tmp_path, 7):
            report = train(tmp_path, burn, 0.03)
        most = int(re.search(r"Start at most (\d+) of them \(now 7\), or", of_cores(report).advice)[1])  # type: ignore[index]
        with children(tmp_path, most):
            followed = train(tmp_path, burn, 0.03)
    finally:
        os.sched_setaffinity(0, before)
    assert followed.core_wait_share < report.core_wait_share


def test_loading_without_a_core_is_not_taken_for_a_wait_for_storage(one_core: None, tmp_path: Path) -> None:
    with others(tmp_path, 2):
        report = train(tmp_path, time.sleep, 0.001, load_s=0.02)
    (finding,) = [one for one in report.diagnosis.findings if one.cause == "data_loading"]
    assert finding.evidence["wait_ms_per_step"] > 30  # as each of the three gets a third of the core
    assert finding.evidence["load_ms_per_batch"] < 30
    assert finding.evidence["kind"] == "cpu_bound"


def test_workers_without_a_core_are_no_fault_of_the_loader(one_core: None, tmp_path: Path) -> None:
    with others(tmp_path, 2):
        report = train(tmp_path, burn, 0.001, load_s=0.02, workers=1)
    findings = {one.cause: one for one in report.diagnosis.findings}
    assert findings["cpu_contention"].evidence["workers_percent"] > 10
    waiting_s = report.phase_s["data_loading"] / report.wall_s
    assert "data_loading" not in findings or findings["data_loading"].share < waiting_s


def test_a_training_is_told_that_it_lacks_cores_only_if_it_does(one_core: None, tmp_path: Path) -> None:
    report = train(tmp_path, time.sleep, 0.05)  # which needs a core now and then; a busy machine may have none
    said = any(one.cause == "cpu_contention" for one in report.diagnosis.findings)
    assert said == (report.core_wait_share >= 0.10)


def test_a_kernel_that_does_not_count_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, zeros = os.open, tmp_path / "zeros"
    zeros.write_text("0 0 0\n")  # what a kernel writes that was started without counting
    monkeypatch.setattr(os, "open", lambda path, *how: opened(zeros if "schedstat" in str(path) else path, *how))
    report = train(tmp_path, burn, 0.0)
    assert report.unseen == ("waiting for a CPU core (schedstat)",)
    assert report.core_wait_share is None


def test_a_thread_waits_while_others_compute_on_its_core(one_core: None, tmp_path: Path) -> None:
    wait = ThreadWait()
    with others(tmp_path, 1):
        began_s, threads = wait.seconds(), thread_times()
        burn(0.3)
        waited_s = wait.seconds() - began_s
    assert waited_s > 0.05
    assert sum(added_times(threads, thread_times())) > 0.29 + waited_s
    wait.close()
    assert wait.seconds() == 0.0
    wait.close()


def test_others_are_listed_only_while_the_thread_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "_MAX_USERS", 10_000)  # other programs of this machine may take more of it
    waited_s = 0.0
    users = CoreUsers(lambda: waited_s, list, list)
    (tmp_path / "mine").symlink_to(Path(sys.executable).resolve())
    with others(tmp_path, 1) as (pid,), subprocess.Popen([tmp_path / "mine", "-c", COMPUTE]) as mine:
        users.poll()
        until_cpu_s(pid, 0.2)
        users.poll()
        assert not users.found
        for _ in range(2):
            waited_s += 1000.0
            assert users.poll() >= 1.0
            until_cpu_s(pid, cpu_s(pid) + 0.2)
        mine.kill()
    shares = {one.name: one.cores for one in users.found if one.user == user_name(os.getuid())}
    assert "mine" not in shares
    assert 0 < shares["busy"] <= 1.1


def cpu_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def until_cpu_s(pid: int, seconds: float) -> None:
    while cpu_s(pid) < seconds:
        time.sleep(0.01)
