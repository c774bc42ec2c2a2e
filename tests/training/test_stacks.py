"""What a process waits for, from its current system call."""

from __future__ import annotations

import fcntl
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_gpu_tools.training.stacks import WorkerStacks, activity

LOCK = "import fcntl, sys; file = open(sys.argv[1], 'w'); print(flush=True); fcntl.{}(file, fcntl.LOCK_EX)"


@pytest.mark.parametrize("lock", [fcntl.flock, fcntl.lockf])
def test_waiting_for_a_file_lock_is_no_storage_wait(lock: Callable[..., None], tmp_path: Path) -> None:
    path = tmp_path / "index.lock"
    with path.open("w") as file:
        lock(file, fcntl.LOCK_EX)
        process = subprocess.Popen(
            [sys.executable, "-c", LOCK.format(lock.__name__), path], stdout=subprocess.PIPE, text=True
        )
        try:
            assert process.stdout is not None
            process.stdout.readline()
            until_s = time.monotonic() + 20
            while activity(process.pid)[0] != "S" and time.monotonic() < until_s:
                time.sleep(0.01)
            assert activity(process.pid) == ("S", None, None)
        finally:
            process.kill()
            process.communicate()


SLEEPER = """
import sys, time
from lightning_gpu_tools.training.stacks import write_stack_at_signal
if sys.argv[1:]: write_stack_at_signal(sys.argv[1])
def hang():
    print(flush=True)
    time.sleep(60)
hang()
"""


def test_only_listening_processes_get_the_signal_for_stacks() -> None:
    stacks = WorkerStacks()
    for paths, functions in ([[stacks.path], ["<module>", "hang"]], [[], []]):
        with subprocess.Popen([sys.executable, "-c", SLEEPER, *paths], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            process.stdout.readline()
            try:
                assert [frame.function for frame in stacks.ask(process.pid)] == functions
                assert process.poll() is None
            finally:
                process.kill()
    stacks.close()
