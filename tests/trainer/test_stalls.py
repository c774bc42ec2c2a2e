"""Trainings that hang, as real processes: what is said of each while it hangs."""

from __future__ import annotations

import re
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from lightning.pytorch import Trainer
from rank_processes import start_ranks

from lightning_gpu_tools import GPUUtilizationMonitor, StalledTrainingWarning, load_report, watch
from lightning_gpu_tools.advice.stalls import Stall
from lightning_gpu_tools.errors import ReportError
from lightning_gpu_tools.units import format_duration

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from stall_cases import AT, STALLS, Acting, Case, evaluation, fit

STALL_S = 3.0
BEFORE_TRAINING = "before training"
CASES = STALLS | {BEFORE_TRAINING: Case(evaluation, words="before it began at step 0.\nWorker 0 (PID ")}


def found(case: Case, folder: Path) -> Stall | str | None:
    """Return what is said of a case so far: in its report, or on the terminal where it has none yet."""
    if case.cause is None:
        file = folder / "stderr0"
        text = file.read_text() if file.exists() else ""
        return text if case.words in text else None
    with suppress(ReportError):
        return next((one for one in load_report(folder).stalls if one.cause == case.cause), None)
    return None


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Stall | str | None, Path]]:
    """What is said of each case: all of them hang at the same time, which costs nothing."""
    folders = {name: tmp_path_factory.mktemp("hangs") for name in CASES}
    started = []
    for name, case in CASES.items():
        started += start_ranks(folders[name], case.train, ranks=case.ranks, options={"stall_after_s": STALL_S})
    until_s = time.monotonic() + 60
    try:
        while time.monotonic() < until_s and not all(found(case, folders[name]) for name, case in CASES.items()):
            time.sleep(0.2)
    finally:
        for process in started:
            for one in [*psutil.Process(process.pid).children(recursive=True), process]:
                one.kill()  # a worker that hangs does not see that its parent has gone
            process.join()
    return {name: (found(case, folders[name]), folders[name]) for name, case in CASES.items()}


@pytest.mark.parametrize("name", STALLS)
def test_what_hangs_is_named_while_it_hangs(name: str, said: dict[str, tuple[Stall, Path]]) -> None:
    case, (stall, folder) = STALLS[name], said[name]
    assert stall is not None, (folder / "stderr0").read_text()
    assert case.words in stall.why
    assert stall.rank == case.rank
    assert not stall.is_over
    assert stall.lasted_s >= STALL_S
    assert stall.next_step
    assert stall.stack
    assert len(stall.ranks) == (case.ranks if case.ranks > 1 else 0)
    texts = [(folder / f"stderr{rank}").read_text() for rank in range(case.ranks)]
    assert [text.count(stall.why) for text in texts] == [1, *[0] * (case.ranks - 1)]  # one rank speaks for all
    assert "Training has made no progress for " in texts[0]
    assert "Stack of the training thread" in texts[0]
    assert stall.cause not in ("dataset", "callback") or " in hang" in " ".join(stall.stack)  # also of another rank


def test_a_sanity_check_that_hangs_is_named(said: dict[str, tuple[str, Path]]) -> None:
    assert said[BEFORE_TRAINING][0], (said[BEFORE_TRAINING][1] / "stderr0").read_text()


def test_a_training_that_goes_on_says_so(tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")

        def stalls() -> list[str]:
            return [str(one.message) for one in warned if one.category is StalledTrainingWarning]

        def wait(trainer: Trainer) -> None:
            while trainer.global_step == AT and not stalls():
                time.sleep(0.01)

        fit(tmp_path, 0.3, Acting("on_train_batch_end", wait))
    assert re.search(r"in Acting at step 12\.\nActing .* in wait \(", stalls()[0])
    (stall,) = load_report(tmp_path).stalls
    assert stall.is_over
    assert stall.lasted_s >= 0.3
    assert stalls()[1:] == [f"Training went on after {format_duration(stall.lasted_s)}."]


@pytest.mark.parametrize("stall_after_s", [0, -1.0, "never"])
def test_what_is_no_duration_is_refused(stall_after_s: Any) -> None:
    with pytest.raises(ValueError, match="stall_after_s must be"):
        GPUUtilizationMonitor(stall_after_s=stall_after_s)
    with pytest.raises(ValueError, match="stall_after_s must be"):
        watch(stall_after_s=stall_after_s)


def test_a_held_lock_of_python_shows_all_stacks(
    run_python: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    hold = "import ctypes\ndef hold():\n    ctypes.PyDLL(None).sleep(1)\n"
    alarm = "from lightning_gpu_tools.training.stacks import LockAlarm\nalarm = LockAlarm()\n"
    child = run_python("-c", f"{hold}{alarm}alarm.arm(0.1); hold(); alarm.arm(0.9); alarm.close()")
    assert child.stderr.count("Timeout") == 1
    assert "in hold" in child.stderr


def test_the_timer_of_somebody_else_stays(run_python: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    theirs = "import faulthandler, time\nfaulthandler.dump_traceback_later(0.3)\n"
    alarm = "from lightning_gpu_tools.training.stacks import LockAlarm\nalarm = LockAlarm()\n"
    child = run_python("-c", f"{theirs}{alarm}alarm.arm(100); alarm.close(); time.sleep(0.8)")
    assert child.stderr.count("Timeout") == 1


def test_a_forked_process_ends_while_the_timer_runs(
    run_python: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    """At its end Python waits for the thread of a timer that was set before the fork, and that is not there."""
    alarm = "from lightning_gpu_tools.training.stacks import LockAlarm\nalarm = LockAlarm()\nalarm.arm(100)\n"
    fork = "import os, sys\nchild = os.fork()\nif not child: sys.exit()\nos.waitpid(child, 0)\nalarm.close()\n"
    assert run_python("-c", alarm + fork, timeout=20).returncode == 0
