"""Starts and ends the worker processes of DataLoaders, in bounded time whatever they do."""

from __future__ import annotations

import multiprocessing.connection
import os
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from multiprocessing.process import BaseProcess
from typing import Any

from torch.utils.data import DataLoader

from lightning_gpu_tools.advice.failures import how_it_ended
from lightning_gpu_tools.host import oom_kills
from lightning_gpu_tools.loaders.settings import SHUT_DOWN_WORKERS

GRACE_S = 5.0  # for workers to finish what they load when they are to end; torch gives this to each of them
# Our defaults: SIGTERM can be ignored, SIGKILL waits only for a core, unless the kernel holds the process.
_SIGNAL_TIMEOUTS_S = {BaseProcess.terminate: 0.5, BaseProcess.kill: 5.0}
# A worker that is killed closes its sockets one after the other, which this process may be reading from, its sentinel
# among them, and only then has an exit code. Our defaults: it is microseconds, but for a busy core.
_CLOSING_S = 1.0
_DYING_S = 5.0
# What torch says of workers that are alive, for whose death nobody should wait.
OF_LIVING_WORKERS = ("DataLoader timed out after", "in DataLoader worker process")
# Of torch, which raises there, in whatever the main thread does, when a worker has died.
_SIGNAL_HANDLING = "torch/utils/data/_utils/signal_handling.py"

_of_parents: list[Batches] = []


class Batches:
    """Iterates over a DataLoader, and ends the workers that this has started.

    They have to be ended before the last reference is dropped: if a reference cycle holds the iterator, the garbage
    collector closes its queues first, and torch waits 5 s for each worker. Unless ``trusted``, as the user's own
    settings are, a worker that dies ends the fetch of a batch, not the training step.

    Raises:
        Exception: The workers could not be started: the dataset cannot be pickled, too many files are open, ...
    """

    def __init__(self, loader: DataLoader[Any], *, trusted: bool = False) -> None:
        self.loader = loader
        self._home = os.getpid()
        self.iterator: Any = None
        before = set(multiprocessing.active_children())
        try:
            with _interrupt_deferred(), warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Got pickle error|This DataLoader will create")
                self.iterator = iter(loader)
        finally:  # also where Ctrl-C came in between, or only some could be started
            self.workers = [process for process in multiprocessing.active_children() if process not in before]
            if self.iterator is None:
                _end_by_signal(self.workers)
        self._deaths = _Deaths([] if trusted else self.workers)

    def restart(self) -> None:
        """Begin another epoch with the same, persistent workers."""
        with self._deaths:
            self.iterator = iter(self.loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        with self._deaths:
            return next(self.iterator)

    def close(self, grace_s: float = GRACE_S) -> None:
        """End the workers; those that have not ended after ``grace_s`` seconds are killed."""
        if os.getpid() != self._home:  # a forked process must not end its parent's, nor let torch do so
            _of_parents.append(self)
            return
        iterator, self.iterator = self.iterator, None
        if iterator is None or not self.workers:
            return
        # In a thread, because a worker that is killed may hold a lock of torch's, for which this then waits forever.
        shut_down = threading.Thread(target=getattr(iterator, SHUT_DOWN_WORKERS, lambda: None), daemon=True)
        with deaths_ignored():  # torch's handler of SIGCHLD names the worker that was killed, which is known here
            shut_down.start()
            shut_down.join(grace_s)
            _end_by_signal(self.workers)
            shut_down.join(_CLOSING_S)
        self._deaths.undo()


def _end_by_signal(workers: Sequence[BaseProcess]) -> None:
    for end, timeout_s in _SIGNAL_TIMEOUTS_S.items():
        alive = [worker for worker in workers if worker.is_alive()]
        for worker in alive:
            end(worker)
        until_s = time.monotonic() + timeout_s
        for worker in alive:
            worker.join(max(0.0, until_s - time.monotonic()))


def wait_for_exit_codes(workers: Sequence[BaseProcess]) -> None:
    """Wait until workers that are about to end have exit codes, for at most some seconds."""
    closed = multiprocessing.connection.wait([worker.sentinel for worker in workers], _CLOSING_S)
    dying = [worker for worker in workers if worker.sentinel in closed]
    until_s = time.monotonic() + _DYING_S
    while any(worker.exitcode is None for worker in dying) and time.monotonic() < until_s:
        time.sleep(0.01)


@contextmanager
def _interrupt_deferred() -> Iterator[None]:
    """Let Ctrl-C take effect at the end of a block that forks processes.

    Most likely it comes during the fork, when Python raises KeyboardInterrupt in a function that the logging module has
    registered for after a fork, where exceptions are ignored.
    """
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    home, interrupts = os.getpid(), []

    def defer(*arguments: Any) -> None:
        if os.getpid() == home:
            interrupts.append(arguments)
        else:
            handler(*arguments)

    signal.signal(signal.SIGINT, defer)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if interrupts:
            handler(*interrupts[0])


def is_of_dead_worker(error: BaseException) -> bool:
    """Return whether torch raised an error because a worker died."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(frame.f_code.co_filename.endswith(_SIGNAL_HANDLING) for frame in frames)


@contextmanager
def deaths_ignored() -> Iterator[None]:
    """Keep torch from raising when a worker dies: one that has ended the training is known already."""
    if not hasattr(signal, "SIGCHLD") or threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL if handler is None else handler)


class _Deaths:
    """Takes the place of torch's handler of SIGCHLD, which raises in whatever the main thread does when a worker dies.

    Here this ends the fetch of a batch: the one that waits, or the next one.
    """

    def __init__(self, workers: Sequence[BaseProcess]) -> None:
        self._workers = workers
        self._oom_kills = oom_kills()
        self._fetching = False
        self._before: Any = None
        in_main_thread = threading.current_thread() is threading.main_thread()
        self._installed = bool(workers) and hasattr(signal, "SIGCHLD") and in_main_thread
        if self._installed:
            self._before = signal.signal(signal.SIGCHLD, self)

    def __call__(self, *arguments: Any) -> None:
        if callable(self._before):
            with suppress(RuntimeError) if self._workers else nullcontext():
                self._before(*arguments)
        if self._fetching:
            self._check()

    def __enter__(self) -> None:
        self._fetching = True
        self._check()

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._fetching = False
        if not self._workers or not isinstance(error, (RuntimeError, OSError, EOFError)):
            return
        if not any(words in str(error) for words in OF_LIVING_WORKERS):
            wait_for_exit_codes(self._workers)  # torch may have noticed a death first, and does not say why
            self._check()

    def _check(self) -> None:
        for worker in self._workers:
            if worker.exitcode:
                self._fetching = False
                how = how_it_ended(worker.exitcode, oom_kills() - self._oom_kills)
                raise DeadWorkerError(f"a worker process {how.what}")

    def undo(self) -> None:
        """Remove it; below a handler that somebody else has installed, it only passes the signal on."""
        self._workers = ()
        current: Any = signal.getsignal(signal.SIGCHLD) if self._installed else None
        if current is self:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL if self._before is None else self._before)


class DeadWorkerError(Exception):
    """A worker process is gone."""
