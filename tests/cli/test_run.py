"""``run``: the claim lives exactly as long as the job."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from fake_driver import Driver, gpu
from slurm_cluster import wait_for

from lightning_gpu_tools import select_gpus
from lightning_gpu_tools.errors import NotEnoughGpusError

pytestmark = pytest.mark.usefixtures("claims_dir")
RunCli = Callable[..., "subprocess.CompletedProcess[str]"]
RUN = [sys.executable, "-m", "lightning_gpu_tools", "run"]


@contextmanager
def running(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A job under ``run`` that prints a line when it is there."""
    with subprocess.Popen([*RUN, *arguments], stdin=-1, stdout=-1, stderr=-1, text=True) as job:
        yield job
        job.kill()


def is_free() -> bool:
    try:
        select_gpus(exclusive=True).release()
    except NotEnoughGpusError:
        return False
    return True


def test_the_command_sees_only_its_gpus_and_becomes_the_process(driver: Driver) -> None:
    driver.gpus = [gpu(memory_free="10GiB"), gpu(memory_free="30GiB"), gpu(memory_free="20GiB")]
    with running("-n", "2", "--", "sh", "-c", "echo $$ $CUDA_VISIBLE_DEVICES") as job:
        output, errors = job.communicate()
    assert output.split() == [str(job.pid), f"{driver.gpus[1].uuid},{driver.gpus[2].uuid}"]
    assert "Picked GPU 1" in errors


@pytest.mark.follows(
    "Example: gpus=$(lightning-gpu-tools pick -n 2 --min-free 8GiB)",
    "Example: lightning-gpu-tools run -n 2 --min-free 8GiB -- python train.py",
)
@pytest.mark.parametrize("command", ["pick", "run"])
def test_help_gives_an_example_that_works_and_the_exit_codes(
    driver: Driver, call: RunCli, in_shell: Callable[[str], subprocess.CompletedProcess[str]], command: str
) -> None:
    driver.gpus = [gpu(memory_free="7GiB"), gpu(), gpu()]
    text = " ".join(call(command, "--help").stdout.split())
    answer = in_shell(re.search(r"Example: (.*?) Exit code", text)[1].removesuffix("."))
    assert answer.stdout == f"{driver.gpus[2].uuid},{driver.gpus[1].uuid}\n"
    assert "3 not enough GPUs" in text
    assert "or `last`, 1.2 times what the last run needed, from the newest report below the current folder." in text


def test_the_exit_code_is_that_of_the_command(driver: Driver, run_cli: RunCli) -> None:
    driver.gpus = [gpu()]
    assert run_cli("run", "--", "sh", "-c", "exit 42").returncode == 42
    answer = run_cli("run", "--", "no-such\r\nFORGED\x1b[2J")
    assert (answer.returncode, r": no-such\r\nFORGED\x1b[2J: " in answer.stderr) == (127, True)
    # Options of the command are its own.
    assert run_cli("run", "--", "echo", "-n", "5", "--", "--exclusive").stdout == "5 -- --exclusive"
    assert run_cli("run", "echo", "--wait").stdout == "--wait\n"


def test_killing_the_wrapper_does_not_free_its_childrens_gpu(driver: Driver) -> None:
    driver.gpus = [gpu()]
    # The shell does not exec its last command, because something follows it.
    with running("--exclusive", "--", "sh", "-c", "sh -c 'echo $$; exec sleep 60'; true") as job:
        child = int(job.stdout.readline())
        job.kill()
        job.wait()
        assert os.path.exists(f"/proc/{child}")
        assert not is_free()
        os.kill(child, 9)
        wait_for(is_free)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["--", "echo", "started"], 3), (["-n", "1", "--"], 2), (["--advise", "-n", "1", "--", "echo", "started"], 3)],
)
def test_without_gpus_or_a_command_nothing_starts(
    driver: Driver, run_cli: RunCli, arguments: list[str], code: int
) -> None:
    driver.gpus = [gpu(lost=True)]
    answer = run_cli("run", *arguments)
    assert (answer.returncode, answer.stdout) == (code, "")
    assert code == 3 or ("no command given" in answer.stderr and driver.calls() == [])


def test_advise_needs_and_claims_no_gpu_unless_asked(driver: Driver, run_cli: RunCli) -> None:
    say = ("--", "sh", "-c", "echo $LIGHTNING_GPU_TOOLS $CUDA_VISIBLE_DEVICES")
    driver.gpus = [gpu()]
    assert run_cli("run", "--advise", "--name", "h200", *say).stdout == f"advise {driver.gpus[0].uuid}\n"
    with driver.change():
        driver.library_missing = True
    answer = run_cli("run", "--advise", *say)
    assert (answer.returncode, answer.stdout) == (0, "advise\n")


def test_a_command_is_as_old_as_its_own_start(driver: Driver, run_cli: RunCli) -> None:
    code = (
        "import os, time; from lightning_gpu_tools.processes import TICKS_PER_S, process_age_s, process_stat; "
        "began_s = process_stat(os.getpid()).started_ticks / TICKS_PER_S; "
        "print(time.clock_gettime(time.CLOCK_BOOTTIME) - began_s - process_age_s())"
    )
    answer = run_cli("run", "--advise", "--", sys.executable, "-c", code)
    assert float(answer.stdout) > 0.03  # Python's own start, before the command


def test_a_closed_stream_does_not_become_the_claim(driver: Driver, claims_dir: Path) -> None:
    driver.gpus = [gpu()]
    job = f"echo words >&2; cat {claims_dir}/*.json"
    answer = subprocess.run(
        ["sh", "-c", '"$@" 2>&-', "sh", *RUN, "--", "sh", "-c", job], capture_output=True, text=True
    )
    assert json.loads(answer.stdout)["uuids"] == [driver.gpus[0].uuid]


def test_ctrl_c_while_waiting_ends_without_a_traceback(driver: Driver, claims_dir: Path) -> None:
    driver.gpus = [gpu(utilization=90)]
    with running("--max-utilization", "5", "--wait", "1h", "--", "true") as job:
        assert "Waiting for up to" in job.stderr.readline()
        job.send_signal(signal.SIGINT)
        assert "Traceback" not in job.communicate()[1]
    assert job.returncode == 130
    assert [entry.name for entry in claims_dir.iterdir()] == []
