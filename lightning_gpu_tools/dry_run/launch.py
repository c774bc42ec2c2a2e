"""Start of a command on simulated GPUs, and collection of the records of its processes."""

import ctypes
import fcntl
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import msgspec
import psutil

from lightning_gpu_tools.dry_run import result
from lightning_gpu_tools.dry_run.result import PLAN, RECORD, VARIABLE, ProcessRecord
from lightning_gpu_tools.files import scratch_prefix
from lightning_gpu_tools.simulated import Machine

_GRACE_S = 5.0  # our default: time for a command to end after its ranks have ended
_POLL_S = 0.1
_TIMES_SPEED = 1e6  # no time is measured, so kernels need not take any
_SIGNAL_OF_PARENT = 1  # PR_SET_PDEATHSIG of <linux/prctl.h>
_LIBC = ctypes.CDLL(None)
_STARTUP = Path(__file__).parent / "startup"


def run(
    command: Sequence[str],
    gpu: str,
    count: int,
    *,
    steps: int,
    times_memory: int = 1,
    stdout: int | None = None,
    stderr: int | None = None,
) -> tuple[int, tuple[ProcessRecord, ...]]:
    """Run a command on GPUs of this model until its ranks have completed this number of steps, or until it ends.

    Return its exit code, negative for a signal, and the records of its processes. The code is 0 if the command was
    stopped after its ranks had ended.

    When this process ends, even by a signal, the command and its children end and their temporary folder is removed.
    ``times_memory`` multiplies each GPU's memory. ``stdout`` and ``stderr`` are as for ``subprocess.Popen``.

    Raises:
        SimulatedCudaError: The simulated machine cannot be built here.
        OSError: The command cannot be started.
    """
    with tempfile.TemporaryDirectory(prefix=scratch_prefix(), ignore_cleanup_errors=True) as name, ExitStack() as stack:
        folder = Path(name)
        # The kernel releases the lock when this process ends. The processes of the command wait for that, and then end.
        plan = stack.enter_context((folder / PLAN).open("w"))
        fcntl.flock(plan, fcntl.LOCK_EX)
        print(json.dumps([steps, result.certain_bytes(gpu) - result.context_bytes(gpu, count)]), file=plan, flush=True)
        machine = Machine(folder / "machine", [gpu] * count, times_memory=times_memory, times_speed=_TIMES_SPEED)
        for number in range(count if count > 1 else 0):
            machine.occupy(number, result.NCCL_BYTES)
        environ = {
            **os.environ,
            VARIABLE: name,
            "PYTHONPATH": os.pathsep.join(filter(None, (str(_STARTUP), os.environ.get("PYTHONPATH")))),
            "LIGHTNING_GPU_TOOLS_CLAIMS_DIR": str(folder / "claims"),  # not the claims on this machine's GPUs
            "SIMULATED_CUDA_WAITS_ASLEEP": "1",
            "TORCH_COMPILE_DISABLE": "1",  # compiled kernels cannot be simulated
        }
        environ.pop("CUDA_VISIBLE_DEVICES", None)
        process = subprocess.Popen(
            command,
            env=machine.environment(environ),
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
            preexec_fn=lambda: _LIBC.prctl(_SIGNAL_OF_PARENT, signal.SIGKILL),
        )
        stack.callback(_end, process)
        return _wait(process, folder), _records(folder)


def _wait(process: subprocess.Popen[bytes], folder: Path) -> int:
    """Wait until a command or all of its ranks have ended, and return its exit code."""
    give_up_s, code = None, 0
    while give_up_s is None or time.monotonic() < give_up_s:
        with suppress(subprocess.TimeoutExpired):
            return process.wait(_POLL_S)
        records = _records(folder)
        complete = [record for record in records if record.outcome == "complete"]
        has_failed = any(record.outcome == "broken" or (record.error and record.world_size > 1) for record in records)
        is_complete = bool(complete) and len(complete) >= complete[0].world_size
        if give_up_s is None and (is_complete or has_failed):
            give_up_s, code = time.monotonic() + _GRACE_S, 0 if is_complete else 1
    return code


def _records(folder: Path) -> tuple[ProcessRecord, ...]:
    files = sorted(folder.glob(RECORD.format("*")))
    return tuple(msgspec.convert(json.loads(file.read_text()), ProcessRecord) for file in files)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the command and its children, including those in their own sessions, such as torchrun's."""
    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                child.kill()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
