"""Start and end of DataLoader worker processes, in bounded time even if they hang."""

from __future__ import annotations

import multiprocessing.connection
import os
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch.utils.data import DataLoader

from lightning_gpu_tools.advice.workers import how_it_ended, without_index
from lightning_gpu_tools.host import oom_kills
from lightning_gpu_tools.loaders.settings import SHUT_DOWN_WORKERS
from lightning_gpu_tools.units import printable

GRACE_S = 5.0  # for workers to finish loading before they end; torch gives each worker this time
# Our defaults: SIGTERM can be ignored; SIGKILL only waits for a core, unless the kernel holds the process.
_SIGNAL_TIMEOUTS_S = {BaseProcess.terminate: 0.5, BaseProcess.kill: 5.0}
# A killed worker closes its sockets one by one, including its sentinel, and this process may be reading from them. Only
# then does it have an exit code. Our defaults: this takes microseconds, unless the core is busy.
_CLOSING_S = 1.0
_DYING_S = 5.0
# Messages of torch about live workers; do not wait for their death.
OF_LIVING_WORKERS = ("DataLoader timed out after", "in DataLoader worker process")
# The torch file that raises in the main thread, at any point, when a worker has died.
_SIGNAL_HANDLING = "torch/utils/data/_utils/signal_handling.py"

_of_parents: list[Batches] = []


class Batches:
    """An iterator over a DataLoader that can end the workers it has started.

    End the workers before dropping the last reference. If a reference cycle holds the iterator, the garbage collector
    closes its queues first, and torch waits 5 s for each worker. When a worker dies, torch raises an error in the main
    thread at any point. Here, it does so only during the fetch of a batch, not in the training step, unless the loader
    is ``trusted`` because it has the user's settings.

    Raises:
        Exception: The workers could not be started: the dataset cannot be pickled, too many files are open, ...
    """

    def __init__(self, loader: DataLoader[Any], *, trusted: bool = False) -> None:
        self.loader = loader
        self._home = os.getpid()
        self.iterator: Any = None
        before = set(multiprocessing.active_children())
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Got pickle error|This DataLoader will create")
                self.iterator = iter(loader)
        finally:  # also after Ctrl-C, and if only some were started
            self.workers = [process for process in multiprocessing.active_children() if process not in before]
            if self.iterator is None:
                _end_by_signal(self.workers)
        self._is_watched = getattr(self.iterator, "_worker_pids_set", False) and not trusted
        self._oom_kills = oom_kills()
        if self._is_watched:
            torch._C._remove_worker_pids(id(self.iterator))
            self.iterator._worker_pids_set = False  # or torch would remove them again

    def restart(self) -> None:
        """Begin another epoch with the same persistent workers."""
        self.iterator = self._watched(iter, self.loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._watched(next, self.iterator)

    def _watched(self, fetch: Callable[[Any], Any], source: Any) -> Any:
        """Fetch while torch watches the workers, and explain the death of one."""
        if not self._is_watched:
            return fetch(source)
        key, pids = id(self), tuple(worker.pid for worker in self.workers if worker.pid)
        try:
            try:
                torch._C._set_worker_pids(key, pids)
                self._raise_if_dead()
                return fetch(source)
            finally:
                torch._C._remove_worker_pids(key)
        except (RuntimeError, OSError, EOFError) as error:
            if not any(words in str(error) for words in OF_LIVING_WORKERS):
                wait_for_exit_codes(self.workers)  # torch may have noticed a death first, and does not report the cause
                self._raise_if_dead()
            raise

    def _raise_if_dead(self) -> None:
        code = next((worker.exitcode for worker in self.workers if worker.exitcode), 0)
        if code:
            how = how_it_ended(code, oom_kills() - self._oom_kills)
            raise RuntimeError(f"a worker process {how.what}")

    def close(self, grace_s: float = GRACE_S) -> None:
        """End the workers. Kill those that have not ended after ``grace_s`` seconds."""
        if os.getpid() != self._home:  # a forked process must not end its parent's workers; nor must torch
            _of_parents.append(self)
            return
        iterator, self.iterator = self.iterator, None
        if iterator is None or not self.workers:
            return
        # In a thread, because this waits forever if a killed worker holds a lock of torch.
        shut_down = threading.Thread(target=getattr(iterator, SHUT_DOWN_WORKERS, lambda: None), daemon=True)
        with deaths_ignored():  # torch's SIGCHLD handler would report a worker that was killed here
            shut_down.start()
            shut_down.join(grace_s)
            _end_by_signal(self.workers)
            shut_down.join(_CLOSING_S)


def _end_by_signal(workers: Sequence[BaseProcess]) -> None:
    for end, timeout_s in _SIGNAL_TIMEOUTS_S.items():
        alive = [worker for worker in workers if worker.is_alive()]
        for worker in alive:
            end(worker)
        until_s = time.monotonic() + timeout_s
        for worker in alive:
            worker.join(max(0.0, until_s - time.monotonic()))


def in_one_line(error: Exception) -> str:
    """Return an error as text; for an error from a worker, the last line of its traceback."""
    return printable(without_index(f"{type(error).__name__}: {error}").strip().splitlines()[-1], max_length=200)


def wait_for_exit_codes(workers: Sequence[BaseProcess]) -> None:
    """Wait for the exit codes of workers that are about to end, for at most a few seconds."""
    closed = multiprocessing.connection.wait([worker.sentinel for worker in workers], _CLOSING_S)
    dying = [worker for worker in workers if worker.sentinel in closed]
    until_s = time.monotonic() + _DYING_S
    while any(worker.exitcode is None for worker in dying) and time.monotonic() < until_s:
        time.sleep(0.01)


def is_of_dead_worker(error: BaseException) -> bool:
    """Return whether torch raised an error because a worker died."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(frame.f_code.co_filename.endswith(_SIGNAL_HANDLING) for frame in frames)


@contextmanager
def deaths_ignored() -> Iterator[None]:
    """Keep torch from raising an error when a worker dies."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL if handler is None else handler)
