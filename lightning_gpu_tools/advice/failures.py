"""Failures of a DataLoader that end a training: a dead worker, or an error in the dataset."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from typing import NamedTuple

from lightning_gpu_tools.units import format_bytes, printable


class WorkerExit(NamedTuple):
    """A worker of a DataLoader that ended on its own."""

    number: int  # in the loader
    pid: int
    exitcode: int  # negative = the signal that ended it


class Failure(NamedTuple):
    """The reason why a training ended."""

    what: str  # in words, without a period
    next_step: str

    def __str__(self) -> str:
        return f"{self.what[0].upper()}{self.what[1:]}. {self.next_step}"


# The note that a worker adds to an error of the dataset; see runs.ending.
INDEX_NOTE = "At index {} of the dataset."
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
_CRASH = (
    "Its last words on the terminal may name the library. PYTHONFAULTHANDLER=1 prints its stack, and num_workers=0 "
    "shows the crash in the training process."
)


def without_index(text: str) -> str:
    """Return the text of an error as the dataset raised it, without the note."""
    return _INDEX.sub("", text)


def how_it_ended(exitcode: int, oom_kills: int = 0, shm_bytes: int | None = None) -> Failure:
    """Return what ended a worker process, as the end of a sentence; ``oom_kills`` is the kernel's count meanwhile."""
    if exitcode >= 0:
        return Failure(f"ended with exit code {exitcode}", "Look for os._exit or sys.exit in the dataset.")
    number = -exitcode
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    if name == "SIGKILL":
        if oom_kills:
            return Failure("was killed by the kernel, because memory ran out", _MEMORY)
        return Failure(
            "was killed by SIGKILL from outside (the kernel counts no lack of memory)",
            "Ask who may kill processes here: a scheduler with its own limit, or a person.",
        )
    if name == "SIGBUS":
        size = "" if shm_bytes is None else f" (it has {format_bytes(shm_bytes)})"
        return Failure(f"was killed by SIGBUS: most likely /dev/shm is full{size}", SHARED_MEMORY)
    if name == "SIGTERM":
        return Failure("was ended by SIGTERM", "A scheduler, a launcher or a person has sent it.")
    return Failure(f"crashed ({name}) in native code", _CRASH)


def failure_of_workers(exits: Sequence[WorkerExit], oom_kills: int, shm_bytes: int | None) -> Failure | None:
    """Return what ended a training whose workers died; ``None`` if none did."""
    if not exits:
        return None
    # A signal to one worker makes torch end the others.
    first = min(exits, key=lambda one: (one.exitcode >= 0, one.exitcode == -signal.SIGTERM, one.number))
    how = how_it_ended(first.exitcode, oom_kills, shm_bytes)
    return how._replace(what=f"worker {first.number} of the DataLoader (PID {first.pid}) {how.what}")


def failure_of_dataset(text: str, index: str | None, shm_bytes: int | None) -> Failure | None:
    """Return the dataset's failure from an error's text; ``index`` is the sample that the training process loaded."""
    caught, noted = _IN_WORKER.search(text), _INDEX.search(text)
    if caught is not None and _NO_SPACE.search(text):
        size = "" if shm_bytes is None else f" of {format_bytes(shm_bytes)}"
        return Failure(f"worker {caught[2]} of the DataLoader found /dev/shm{size} full", SHARED_MEMORY)
    index = noted[1] if noted is not None else index
    if caught is None and index is None:
        return None
    where = "" if index is None else f" at index {printable(index)}"
    sample = "Its traceback is in the error." if index is None else f"Load it alone: dataset[{printable(index)}]."
    if caught is None:
        return Failure(f"the dataset failed{where}", sample)
    return Failure(f"the dataset raised {caught[1]}{where} in worker {caught[2]}", sample)


def not_picklable(text: str) -> Failure:
    """Return the failure of workers that could not be started."""
    return Failure(
        f"the DataLoader's workers could not be started: {printable(text, 200)}",
        "Define what the dataset uses at the top of a module, without lambdas, and open files in the worker; or set "
        'multiprocessing_context="fork".',
    )
