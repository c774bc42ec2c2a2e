"""Jobs whose GPUs are idle while another job waits are told, or end as agreed: real processes that poll fast."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from fake_driver import Driver, gpu, mig
from fake_driver.state import Call
from launched_jobs import torchrun, waiting
from slurm_cluster import wait_for

from lightning_gpu_tools import select_gpus
from lightning_gpu_tools.selection import claims, yielding

pytestmark = pytest.mark.usefixtures("claims_dir")

FAST = """
import os, signal, subprocess, sys, threading, time
from lightning_gpu_tools import select_gpus
from lightning_gpu_tools.cli import main
from lightning_gpu_tools.selection import claims, ranking, yielding
claims.KEEP_EVERY_S = yielding.CHECK_EVERY_S = yielding.POLL_EVERY_S = 0.1
yielding.REMIND_AFTER_S = 0.3
ranking.MIN_YIELD_AFTER_S = 0.0
"""
RUN = f"{FAST}sys.exit(main(['run', '--exclusive', *sys.argv[1:]]))"
QUICK, BUSY = gpu(sample_period_s=0.05), gpu(sample_period_s=0.05, utilization=1)
AGREED = ["--yield-after", "0.3s"]
STAY = ["--", "sh", "-c", "echo there; exec sleep 100"]
PLACE = f"""{FAST}
from lightning_gpu_tools.selection.placement import place
from lightning_gpu_tools.selection.ranking import Request
place(1, Request(yield_after=0.3, exclusive=True), list)
"""


@pytest.fixture
def driver(driver: Driver) -> Driver:
    """A machine with one idle GPU, unless a test gives it others."""
    driver.gpus = [QUICK]
    return driver


@contextmanager
def job(code: str, *arguments: str, env: dict[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
    """A job that has a claim once it has printed a line."""
    command = [sys.executable, "-c", code, *arguments]
    with subprocess.Popen(command, stdin=-1, stdout=-1, stderr=-1, text=True, env=env) as holder:
        try:
            assert holder.stdout.readline() == "there\n", holder.stderr.read()
            yield holder
        finally:
            holder.kill()


def let_poll(driver: Driver, polls: int = 6) -> None:
    """Wait until the holder has read the utilization so many times, which takes longer than what it agreed to."""
    driver.forget_calls()
    wait_for(lambda: [call.function for call in sampler_calls(driver)].count("nvmlDeviceGetSamples") >= polls)


def sampler_calls(driver: Driver) -> list[Call]:
    return [call for call in driver.calls() if call.thread == "lightning-gpu-tools-sampler"]


def test_an_idle_job_that_agreed_ends_for_one_that_waits(driver: Driver, claims_dir: Path) -> None:
    with job(RUN, *AGREED, *STAY) as holder:
        let_poll(driver)
        assert holder.poll() is None, "nobody waits"
        driver.gpus = [BUSY]
        let_poll(driver, 2)  # one may have begun before
        with waiting(claims_dir) as waiter:
            let_poll(driver)
            assert holder.poll() is None, "its GPU is busy"
            driver.gpus = [QUICK]
            assert waiter.communicate(timeout=60)[0] == "served\n"
        assert holder.wait() == -signal.SIGTERM
        before, after = holder.stderr.read().splitlines()
    assert "This job gets SIGTERM once its GPUs have been idle for 300 ms and another job waits" in before
    assert f"(pid {waiter.pid}) has waited " in after
    assert " for this GPU, which this job has left idle for " in after
    assert after.endswith(" This job gets SIGTERM now, as agreed (yield_after).")


def test_without_an_agreement_an_idle_job_is_told_once(driver: Driver, claims_dir: Path) -> None:
    driver.gpus = [BUSY]
    with job(RUN, *STAY) as holder:
        assert "Picked GPU 0" in holder.stderr.readline()
        with waiting(claims_dir) as waiter:
            let_poll(driver)
            driver.gpus = [QUICK]
            line = holder.stderr.readline()
            assert f"(pid {waiter.pid}) has waited " in line
            assert " for this GPU, which you have left idle for " in line
            assert line.endswith(" End this job with Ctrl-C, or use --yield-after 2h next time.\n")
            let_poll(driver)
        assert holder.poll() is None
        holder.kill()
        assert holder.stderr.read() == ""


def test_a_program_that_a_script_has_started_ends_after_the_script(driver: Driver, claims_dir: Path) -> None:
    # The shell ends at once, and does not pass the signal on.
    program = "trap 'echo ended; exit' TERM; echo there; for _ in $(seq 1200); do sleep 0.05; done"
    with job(RUN, *AGREED, "--", "sh", "-c", 'sh -c "$0"; true', program) as holder, waiting(claims_dir) as waiter:
        assert waiter.communicate(timeout=60)[0] == "served\n"
        assert holder.communicate()[0] == "ended\n"
        assert holder.returncode == -signal.SIGTERM


def test_a_program_under_run_can_agree_itself(driver: Driver, claims_dir: Path) -> None:
    program = f"{PLACE.replace('0.3', '0.8')}print('there', flush=True)\nsys.stdin.read()"
    with job(RUN, "--", sys.executable, "-c", program) as holder, waiting(claims_dir):
        assert holder.wait(60) == -signal.SIGTERM
        told = holder.stderr.read()
    assert "This job gets SIGTERM now, as agreed" in told
    # On a busy machine, `run` may look before the program has agreed.
    assert "End this job with Ctrl-C" not in told.partition("This job gets SIGTERM once")[2]


RANKS = f"""{PLACE}
yielding._SIGNAL_EVERY_S = 0.5
if "LOCAL_RANK" in os.environ:
    print("there", flush=True)
    sys.stdin.read()
    print("not signaled")
else:
    if sys.argv[1:]:
        signal.signal(signal.SIGTERM, lambda *_: print("passes it on", flush=True))
    subprocess.run([sys.executable, "-c", sys.argv[0], *sys.argv[1:]], env={{**os.environ, "LOCAL_RANK": "1"}})
    sys.stdin.read()  # so that it is still there when it gets its own signal
"""


@pytest.mark.parametrize("handler", [[], ["handler"]], ids=["default", "handler"])
def test_ranks_that_a_rank_has_started_are_left_to_its_handler(
    driver: Driver, claims_dir: Path, handler: list[str]
) -> None:
    code = RANKS.replace("sys.argv[0]", repr(RANKS))
    with job(code, *handler) as holder, waiting(claims_dir):
        if handler:
            assert holder.stdout.readline() == holder.stdout.readline() == "passes it on\n"
            assert "not signaled\n" in holder.communicate()[0]
        else:
            assert holder.wait(60) == -signal.SIGTERM
            said, told = holder.communicate()
            assert (said, told.count("This job gets SIGTERM once")) == ("", 1)


@pytest.mark.parametrize("agreed", [[], AGREED], ids=["told", "agreed"])
def test_one_of_the_commands_that_a_launcher_has_started_speaks_for_all(
    driver: Driver, claims_dir: Path, agreed: list[str]
) -> None:
    driver.gpus = [QUICK, gpu(sample_period_s=0.05)]
    with ExitStack() as jobs:
        ranks = [jobs.enter_context(job(RUN, "-n", "2", *agreed, *STAY, env=torchrun(rank))) for rank in (0, 1)]
        jobs.enter_context(waiting(claims_dir))
        assert "Picked GPU" in ranks[0].stderr.readline()
        assert "has waited" in ranks[0].stderr.readline()
        if agreed:
            assert [rank.wait(60) for rank in ranks] == [-signal.SIGTERM] * 2
        else:
            let_poll(driver, 6 * 4)  # of two commands, each of two GPUs
            ranks[1].kill()
        assert "has waited" not in ranks[1].stderr.read()


TWO_CLAIMS = f"""{FAST}
select_gpus(exclusive=True, yield_after=0.3), select_gpus()
print("there", flush=True)
sys.stdin.read()
"""


def test_a_process_goes_on_while_a_gpu_of_its_other_claim_is_busy(driver: Driver, claims_dir: Path) -> None:
    driver.gpus = [QUICK, gpu(sample_period_s=0.05, utilization=99)]
    with job(TWO_CLAIMS) as holder, waiting(claims_dir):
        let_poll(driver, 12)  # of two GPUs
        assert holder.poll() is None
        driver.gpus = [QUICK, gpu(sample_period_s=0.05)]
        assert holder.wait(60) == -signal.SIGTERM


RELEASE = f"""{FAST}
def wait_for(sampling):
    while any(thread.name == "lightning-gpu-tools-sampler" for thread in threading.enumerate()) is not sampling:
        time.sleep(0.02)
with select_gpus(yield_after=0.3):
    wait_for(sampling=True)
wait_for(sampling=False)
print("there", flush=True)
"""


def test_a_released_claim_is_no_longer_watched(driver: Driver) -> None:
    with job(RELEASE) as holder:
        assert holder.wait(60) == 0


@pytest.mark.parametrize("without", [gpu(utilization=None), gpu(mig=[mig()])], ids=["unsupported", "mig"])
def test_a_gpu_of_unknown_utilization_is_kept_which_is_said_once(
    driver: Driver, claims_dir: Path, without: object
) -> None:
    driver.gpus = [without]  # type: ignore[list-item]
    with job(RUN, *AGREED, *STAY) as holder, waiting(claims_dir):
        assert "This job gets SIGTERM once" in holder.stderr.readline()
        line = holder.stderr.readline()
        assert "The driver does not report the utilization of " in line
        assert "Until this changes, this job does not yield its GPUs (yield_after)." in line
        driver.forget_calls()
        wait_for(lambda: len(sampler_calls(driver)) > 50)
        assert holder.poll() is None
        holder.kill()
        assert holder.stderr.read() == ""


def test_a_driver_that_has_gone_is_named(driver: Driver) -> None:
    said: list[str] = []
    with select_gpus() as selection:
        agreement = yielding.Agreement(claims.held_claims()[-1], 60.0, said.append)
        driver.init_error = "DRIVER_NOT_LOADED"
        assert {agreement.check(), agreement.check()} == {yielding.CHECK_EVERY_S}
    assert selection.uuids
    (text,) = said
    assert "The NVIDIA driver is installed but not loaded." in text


def test_a_folder_of_claims_that_cannot_be_read_has_nobody_who_waits(driver: Driver, claims_dir: Path) -> None:
    claims_dir.write_text("not a folder")
    said: list[str] = []
    assert yielding.Reminder(["GPU-a"], lambda: 1e6, said.append).check() == yielding.CHECK_EVERY_S
    assert said == []


def test_a_child_that_waits_is_not_another_job(driver: Driver, claims_dir: Path) -> None:
    said: list[str] = []
    with select_gpus(exclusive=True) as selection, waiting(claims_dir):
        assert yielding.Reminder(selection.uuids, lambda: 1e6, said.append).check() == yielding.CHECK_EVERY_S
    assert said == []
