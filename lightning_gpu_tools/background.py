"""A thread that runs small periodic jobs during training, and a reader of facts that may fail."""

import math
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic  # by name: a program's tests may replace those of `time`
from typing import TypeVar

from lightning_gpu_tools.units import printable

# Our defaults.
_RETRY_S = 60.0  # after that, a full disk may have space again
_TIMEOUT_S = 10.0  # for a job that hangs, for example on a dead file server

_Fact = TypeVar("_Fact")
_Job = Callable[[], float]


@dataclass(slots=True, eq=False)
class _Entry:
    what: str
    job: _Job
    due_s: float = 0.0
    has_failed: bool = False


class BackgroundJobs:
    """A scheduler that calls functions from one thread, each when it is due, until it is closed.

    The training thread may hang in a collective, hold torch's locks, or fork a worker at the same time. Therefore no
    job may call ``torch.cuda`` or a collective, use training's connection to a store, or import modules. No job may
    warn or print unless training is stalled or was asked to stop.
    """

    def __init__(self) -> None:
        self.faults: list[str] = []  # the first error of each job that failed
        self.cpu_s = 0.0  # CPU time of the thread so far
        self._entries: list[_Entry] = []
        self.is_closed = False
        self._changed = threading.Condition()  # guards the entries, the field above and the one below
        self._thread: threading.Thread | None = None

    def add(self, what: str, job: _Job) -> None:
        """Call a job now, then after the seconds that it returns (``inf`` = never). ``what`` is its name in faults."""
        with self._changed:
            self._entries.append(_Entry(what, job, monotonic()))
            self._changed.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="lightning-gpu-tools-background", daemon=True)
            self._thread.start()

    def run_now(self) -> None:
        """Make all jobs due now, except those that are never due again."""
        with self._changed:
            for entry in self._entries:
                entry.due_s = 0.0
            self._changed.notify()

    def close(self, timeout_s: float = _TIMEOUT_S) -> None:
        """End the thread, unless a job hangs."""
        with self._changed:
            self.is_closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while (entry := self._next()) is not None:
            try:
                again_s = entry.job()
            except Exception as error:  # noqa: BLE001 - training continues after any error
                again_s = _RETRY_S
                if not entry.has_failed:
                    self.faults.append(f"{entry.what} failed: {type(error).__name__}: {printable(error, 200)}.")
                entry.has_failed = True
            self.cpu_s = time.thread_time()
            with self._changed:
                if again_s == math.inf:
                    self._entries.remove(entry)
                entry.due_s = min(entry.due_s, monotonic() + again_s)

    def _next(self) -> _Entry | None:
        with self._changed:
            while not self.is_closed:
                entry = min(self._entries, key=lambda one: one.due_s, default=None)
                wait_s = math.inf if entry is None else entry.due_s - monotonic()
                if entry is not None and wait_s <= 0:
                    entry.due_s = math.inf  # until it has run, unless run_now() makes it due again
                    return entry
                self._changed.wait(min(wait_s, threading.TIMEOUT_MAX))
        return None


class SafeReader:
    """A reader of facts, for any thread: one that cannot be read is left out, and listed in the report."""

    def __init__(self) -> None:
        self.unread: dict[str, str] = {}  # names of facts that could not be read, and the reason

    def read(self, what: str, read: Callable[[], _Fact], missing: _Fact) -> _Fact:
        """Return a fact, or ``missing`` if reading it raises an error (a new torch, a driver, an odd batch)."""
        try:
            return read()
        except Exception as error:  # noqa: BLE001 - the rest can still be measured
            self.note_unread(what, error)
            return missing

    def note_unread(self, what: str, error: Exception) -> None:
        """Record a fact that could not be read."""
        # As text, because its frames would keep a batch; with this function, because str(error) may raise.
        self.unread[what] = printable("".join(traceback.format_exception_only(error)).strip(), 200)
