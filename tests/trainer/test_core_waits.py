"""Trainings that share their core with programs of others: both are on one core, so that they have to."""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from advised import code_in, finding_on
from trainings import Model, Samples, burn, loader, quiet_trainer

from lightning_gpu_tools import GPUUtilizationAdvisor, GPUUtilizationMonitor, load_report
from lightning_gpu_tools.units import user_name

pytestmark = [
    pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the kernel does not count waits"),
    pytest.mark.usefixtures("core_waits"),
]

CAUSE = "cpu_contention"
COMPUTE = f"import os\nwhile os.path.exists('/proc/{os.getpid()}'): sum(range(100_000))"


@pytest.fixture
def one_core() -> Iterator[set[int]]:
    """This thread, and what it starts, on one core; gives all that there are."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    yield cores
    os.sched_setaffinity(0, cores)


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
    """Train steps that take so long each, and return the report."""
    watching = [GPUUtilizationMonitor(), GPUUtilizationAdvisor(min_seconds=0, min_steps=20)]
    data = loader(Samples(60 + 4 * workers, burn, load_s), num_workers=workers)
    quiet_trainer(folder, callbacks=watching).fit(Model(spend, step_s), data)
    return load_report(folder)


def test_a_training_next_to_other_programs_names_them(
    one_core: None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with others(tmp_path, 4):  # more than what else may run on this core
        report = train(tmp_path, burn, 0.02)
    first, printed = report.diagnosis.findings[0], " ".join(capfd.readouterr().out.split())
    assert (report.diagnosis.verdict, first.cause, first.evidence["kind"]) == ("low", CAUSE, "other_programs")
    assert first.share > 0.3  # as each of the five gets a fifth
    assert report.others_cores > 0.3
    assert f"{user_name(os.getuid())}'s busy " in report.diagnosis.why
    assert re.search(r"Why: Waiting for a CPU core takes \d\d% of the wall time", printed)
    assert re.search(r"; other programs used \d\.\d cores;", printed)
    assert re.search(r"├─ training step [^├]* ◀ cause ", printed)
    assert report.unseen == ()


def train_beside_children(folder: Path, *before: str) -> tuple[Any, float]:
    """Train beside three processes named ``simulator`` that this one starts, and that compute all the time.

    Return the report, and the seconds that they have computed.
    """
    program, earlier = folder / "simulator", os.times()
    if not program.is_symlink():
        program.symlink_to(Path(sys.executable).resolve())
    started = [subprocess.Popen([*before, program, "-c", COMPUTE], stdout=subprocess.DEVNULL) for _ in range(3)]
    try:
        report = train(folder, burn, 0.03)
    finally:
        for child in started:
            child.kill()
            child.wait()
    return report, os.times().children_user - earlier.children_user


@pytest.mark.follows("Start fewer of them, or start them with nice -n 19, so that", "or with `nice -n 19`")
def test_a_programs_own_processes_are_named_and_go_last_with_nice(one_core: None, tmp_path: Path) -> None:
    report, taken_s = train_beside_children(tmp_path)
    finding = finding_on(report, CAUSE)
    assert (report.diagnosis.findings[0], finding.evidence["kind"]) == (finding, "own_children")
    assert finding.evidence["taken_by"].startswith("child processes of this job (simulator) use ")
    command = code_in(finding.advice, r"start them with (nice -n 19), so")
    _, taken_at_last_s = train_beside_children(tmp_path, *command.split())
    assert taken_at_last_s < taken_s / 2  # the training takes as much as before


def matrices(seconds: float) -> None:
    """Multiply matrices for some seconds, in torch's threads."""
    end_s = time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        torch.ones(300, 300) @ torch.ones(300, 300)


def runnable_threads(report: Any) -> float:
    """Return the number of runnable threads of a training that waited for a core; 0 if it did not wait."""
    finding = finding_on(report, CAUSE)
    return 0.0 if finding is None else float(finding.evidence["runnable_threads"])


def of_own_threads(report: Any) -> Any:
    """Return the finding of a training whose own threads take the cores; skip the test if other programs do."""
    finding = finding_on(report, CAUSE)
    if finding is not None and finding.evidence["kind"] == "other_programs":
        pytest.skip("other programs take the cores")
    return finding


@pytest.fixture
def many_threads() -> Iterator[int]:
    """Many more threads of torch than there are cores."""
    before, many = torch.get_num_threads(), 6 * len(os.sched_getaffinity(0))
    torch.set_num_threads(many)
    yield many
    torch.set_num_threads(before)


@pytest.mark.follows("torch.set_num_threads({}) (now {})")
def test_as_few_threads_of_torch_as_advised_are_runnable(many_threads: int, tmp_path: Path) -> None:
    before = train(tmp_path, matrices, 0.05)
    fewer = rf"^Use fewer threads: (torch\.set_num_threads\(\d+\)) \(now {many_threads}\)"
    eval(code_in(of_own_threads(before).advice, fewer))
    after = train(tmp_path, matrices, 0.05)
    assert runnable_threads(after) < torch.get_num_threads() + 1 < runnable_threads(before)


@pytest.mark.follows("num_workers={} (now {})")
def test_as_few_workers_as_advised_leave_the_training_thread_a_core(one_core: None, tmp_path: Path) -> None:
    before = train(tmp_path, burn, 0.03, load_s=0.03, workers=6)
    ((option, fewer),) = re.findall(r"(num_workers)=(\d+) \(now 6\)", of_own_threads(before).advice)
    after = train(tmp_path, burn, 0.03, load_s=0.03, workers=int(fewer))
    assert option in after.settings
    assert runnable_threads(after) < runnable_threads(before)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2 or not shutil.which("taskset"), reason="one core, or no taskset")
@pytest.mark.follows("Or give it more of the {} cores: sbatch --cpus-per-task, docker run --cpus, taskset.")
def test_taskset_allows_more_cores(many_threads: int, one_core: set[int], tmp_path: Path) -> None:
    before = of_own_threads(train(tmp_path, matrices, 0.05))
    program = code_in(before.advice, r"Or give it more of the \d+ cores: .*, (\w+)\.$")
    command = [program, "-a", "-p", "-c", ",".join(map(str, one_core)), str(os.getpid())]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    after = finding_on(train(tmp_path, matrices, 0.05), CAUSE)
    assert before.evidence["cores"] == 1
    assert after is None or after.evidence["cores"] == len(one_core)


@pytest.mark.follows("Find which threads compute: top -H -p PID, or py-spy dump --pid PID.")
def test_the_threads_that_compute_are_found_as_advised(tmp_path: Path) -> None:
    over, count = threading.Event(), 4 * len(os.sched_getaffinity(0))

    def compress() -> None:
        while not over.is_set():
            hashlib.pbkdf2_hmac("sha256", b"", b"", 50_000)

    threads = [threading.Thread(target=compress) for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        advice = of_own_threads(train(tmp_path, burn, 0.003)).advice
        commands = re.findall(r"(?:top|py-spy) [\w -]*PID", advice)
        assert [command.split()[0] for command in commands] == ["top", "py-spy"]
        top, stacks = (answer_of(command.replace("PID", str(os.getpid())).split()) for command in commands)
    finally:
        over.set()
        for thread in threads:
            thread.join()
    if top is not None:
        assert len(re.findall(r"^ *\d+ .* R +\d", top, re.MULTILINE)) > 2
    if stacks is not None:
        assert stacks.count("compress (") == count


def answer_of(command: list[str]) -> str | None:
    """Return what a program prints; ``None`` if it is not installed, or may not look into this process."""
    if shutil.which(command[0]) is None:
        return None
    once = ["-b", "-n", "1", "-w", "200"] if command[0] == "top" else []
    answer = subprocess.run([*command, *once], capture_output=True, text=True, check=False, timeout=100)
    return None if answer.returncode else answer.stdout


# Thread pools of libraries inside a loader's workers

MAX_OTHERS_CORES = 0.3  # from there on, other programs decide how many threads can run
TRAIN = """
import importlib, json, os, re, sys, time
sys.path.append("../benchmarks")  # the folder of the script is tests/
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
import cv2, numpy, torch
from trainings import Model, Samples, loader, quiet_trainer
from lightning_gpu_tools import GPUUtilizationAdvisor, GPUUtilizationMonitor, load_report

class Photos(Samples):
    def __getitem__(self, index):
        cv2.GaussianBlur(numpy.zeros((300, 300, 3), numpy.uint8), (31, 31), 0)
        numpy.ones((200, 200)) @ numpy.ones((200, 200))
        return super().__getitem__(index)

def train(calls):
    def one_thread(worker):
        for call in calls:
            exec(f"import {call.partition('.')[0]}; {call}")

    callbacks = [GPUUtilizationMonitor(), GPUUtilizationAdvisor(min_seconds=0, min_steps=20)]
    workers = loader(Photos(100_000), num_workers=2, worker_init_fn=one_thread)
    quiet_trainer(sys.argv[1], callbacks=callbacks, max_steps=120).fit(Model(time.sleep, 0.001), workers)
    report = load_report(sys.argv[1])
    found = {one.cause: [one.advice, one.evidence] for one in report.diagnosis.findings}
    print("FOUND", json.dumps({**found, "others_cores": report.others_cores}), flush=True)
    return found

torch.set_num_threads(1)
advice, _ = train([])["data_loading"]
train(re.findall(r"[\\w.]+\\(\\d\\)", advice))
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core has no thread pools")
@pytest.mark.follows("Each worker keeps {} threads runnable, on {}. Limit libraries to one thread")
def test_thread_pools_in_workers_are_named_and_end_as_advised(
    tmp_path: Path, run_python: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    for needed in ("cv2", "threadpoolctl"):
        pytest.importorskip(needed)
    environ: dict[str, str | None] = {"OMP_NUM_THREADS": None}
    answer = run_python("-c", TRAIN, str(tmp_path), env=environ, cwd=Path(__file__).parents[1])
    found = [json.loads(line[6:]) for line in answer.stdout.splitlines() if line.startswith("FOUND ")]
    assert found, answer.stderr
    try:
        (before, evidence), (after, evidence_after) = (one["data_loading"] for one in found)
        assert evidence["kind"] == "cpu_bound"
        assert "threads runnable, on 2 cores. Limit libraries to one thread in worker_init_fn: " in before
        assert "cv2.setNumThreads(0)" in before
        assert evidence_after["workers_runnable_threads"] < evidence["workers_runnable_threads"]
        assert "worker_init_fn" not in after
    except (AssertionError, KeyError):
        if any((one["others_cores"] or 0) > MAX_OTHERS_CORES for one in found):
            pytest.skip(f"other programs have the cores: {found}")
        raise
