"""What a process waits for, from its current system call."""

from __future__ import annotations

import subprocess
import sys

from lightning_gpu_tools.training.stacks import WorkerStacks

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
