"""What a process waits for, from its current system call."""

from __future__ import annotations

import fcntl
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_gpu_tools.training.stacks import activity

LOCK = "import fcntl, sys; file = open(sys.argv[1], 'w'); print(flush=True); fcntl.{}(file, fcntl.LOCK_EX)"


@pytest.mark.parametrize("lock", [fcntl.flock, fcntl.lockf])
def test_a_wait_for_a_file_lock_is_no_wait_for_storage(lock: Callable[..., None], tmp_path: Path) -> None:
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
