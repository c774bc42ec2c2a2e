"""DataLoader failures that end training: a dead worker, or an error in the dataset."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from typing import NamedTuple

from lightning_gpu_tools.units import format_bytes, printable


class WorkerExit(NamedTuple):
    """A DataLoader worker that exited on its own."""

    number: int  # in the loader
    pid: int
    exitcode: int  # negative = the signal that killed it


class Failure(NamedTuple):
    """The reason why training ended."""

    what: str  # a sentence without capital letter and period
    next_step: str

    def __str__(self) -> str:
        return f"{self.what[0].upper()}{self.what[1:]}. {self.next_step}"


# The note that a worker adds to an error of the dataset; see training.compat.
_INDEX = re.compile(r"At index (.{1,100}) of the dataset\.")
_IN_WORKER = re.compile(r"Caught (\w+) in DataLoader worker process (\d+)\.")
_NO_SPACE = re.compile(r"unable to (?:allocate|open|write) (?:to )?shared memory|No space left on device")

_MEMORY = (
    "Use fewer workers (num_workers), a smaller prefetch_factor, or smaller samples. Keep file names in arrays: each "
    "worker copies the Python objects that it reads."
)
SHARED_MEMORY = (
    "Start the container with --ipc=host or --shm-size=8g, use fewer workers (num_workers), or a smaller "
    "prefetch_factor."
)
# torch's own handler of this signal, in workers, replaces that of PYTHONFAULTHANDLER=1.
_CRASH = (
    "Check its last output on the terminal for the library. faulthandler.enable() in worker_init_fn prints its stack. "
    "Or set num_workers=0 and PYTHONFAULTHANDLER=1: the training process then crashes and prints its own."
)


def without_index(text: str) -> str:
    """Return the text of an error without the note of a worker."""
    return _INDEX.sub("", text)


def how_it_ended(exitcode: int, oom_kills: int = 0, shm_bytes: int | None = None) -> Failure:
    """Return why a worker process exited, as the end of a sentence; ``oom_kills`` is the kernel's count then."""
    if exitcode >= 0:
        return Failure(f"exited with exit code {exitcode}", "Search the dataset for os._exit and sys.exit.")
    number = -exitcode
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    if name == "SIGKILL":
        if oom_kills:
            return Failure("was killed by the kernel, because memory ran out", _MEMORY)
        return Failure(
            "was killed by SIGKILL, but not by the kernel for lack of memory",
            "Find out who sent it: a scheduler with its own limit, or a person.",
        )
    if name == "SIGBUS":
        size = "" if shm_bytes is None else f" (it has {format_bytes(shm_bytes)})"
        return Failure(f"was killed by SIGBUS: most likely /dev/shm is full{size}", SHARED_MEMORY)
    if name == "SIGTERM":
        return Failure("was terminated by SIGTERM", "A scheduler, a launcher or a person sent it.")
    return Failure(f"crashed ({name}) in native code", _CRASH)


def failure_of_workers(exits: Sequence[WorkerExit], oom_kills: int, shm_bytes: int | None) -> Failure | None:
    """Return the failure of training whose workers died; ``None`` if none did."""
    if not exits:
        return None
    # A signal to one worker makes torch end the others.
    first = min(exits, key=lambda worker: (worker.exitcode >= 0, worker.exitcode == -signal.SIGTERM, worker.number))
    how = how_it_ended(first.exitcode, oom_kills, shm_bytes)
    return how._replace(what=f"worker {first.number} of the DataLoader (PID {first.pid}) {how.what}")


def failure_of_dataset(text: str, index: str | None, shm_bytes: int | None) -> Failure | None:
    """Return the dataset's failure from an error's text; ``index`` is the sample that the training process loaded."""
    caught, noted = _IN_WORKER.search(text), _INDEX.search(text)
    if caught is not None and _NO_SPACE.search(text):
        size = "" if shm_bytes is None else f" of {format_bytes(shm_bytes)}"
        full = f"could not write to /dev/shm{size}, because it is full"
        return Failure(f"worker {caught[2]} of the DataLoader {full}", SHARED_MEMORY)
    index = noted[1] if noted is not None else index
    if caught is None and index is None:
        return None
    where = "" if index is None else f" at index {printable(index)}"
    sample = (
        "The error includes its traceback."
        if index is None
        else f"Load this sample alone: dataset[{printable(index)}]."
    )
    if caught is None:
        return Failure(f"the dataset failed{where}", sample)
    return Failure(f"the dataset raised {caught[1]}{where} in worker {caught[2]}", sample)


def not_picklable(text: str) -> Failure:
    """Return the failure of workers that could not start."""
    return Failure(
        f"the DataLoader's workers could not be started: {printable(text, 200)}",
        "Define functions and classes of the dataset at module level, without lambdas, and open files in the worker. "
        'Or set multiprocessing_context="fork".',
    )
