"""Starts and ends the worker processes of DataLoaders, in bounded time whatever they do."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess
from typing import Any

from torch.utils.data import DataLoader

from lightning_gpu_tools.loaders.settings import SHUT_DOWN_WORKERS

# How long workers may take to finish what they load when they are to end. torch gives each of them 5 s.
GRACE_S = 5.0
# How long they may then take to end by a signal. Our default: only a process that the kernel holds takes longer.
_SIGNAL_TIMEOUT_S = 0.5


class Batches:
    """Iterates over a DataLoader, and ends the workers that this has started.

    Whoever starts workers has to end them before the last reference is dropped: if a reference cycle holds the iterator
    the garbage collector closes its queues first, and torch waits 5 s for each worker.

    Args:
        loader: The loader.

    Raises:
        Exception: The workers could not be started: the dataset cannot be pickled, too many files are open, ...
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader
        self._home = os.getpid()
        self.workers: Sequence[BaseProcess] = ()
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

    def restart(self) -> None:
        """Begin another epoch with the same, persistent workers."""
        self.iterator = iter(self.loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self.iterator)

    def close(self, grace_s: float = GRACE_S) -> None:
        """End the workers; those that have not ended after ``grace_s`` seconds are killed."""
        iterator, self.iterator = self.iterator, None
        if iterator is None or os.getpid() != self._home:  # a forked process must not end its parent's
            return
        shut_down: Callable[[], None] = getattr(iterator, SHUT_DOWN_WORKERS, lambda: None)
        if not self.workers:
            return
        timer = threading.Timer(grace_s, _end_by_signal, [self.workers])
        timer.daemon = True
        timer.start()
        try:
            # torch's handler of SIGCHLD names the worker that was killed, which is known here.
            with suppress(RuntimeError):
                shut_down()
        finally:
            timer.cancel()
        vars(self.loader)["_iterator"] = None  # torch keeps that of persistent workers there
        with suppress(RuntimeError):
            _end_by_signal([worker for worker in self.workers if worker.is_alive()])


def _end_by_signal(workers: Sequence[BaseProcess]) -> None:
    for end in (BaseProcess.terminate, BaseProcess.kill):
        alive = [worker for worker in workers if worker.is_alive()]
        for worker in alive:
            end(worker)
        for worker in alive:
            worker.join(_SIGNAL_TIMEOUT_S / len(alive))


@contextmanager
def _interrupt_deferred() -> Iterator[None]:
    """Let Ctrl-C take effect at the end of a block in which processes are forked.

    Most likely it comes during the fork itself, which takes milliseconds. Python then raises KeyboardInterrupt in a
    function that the logging module has registered for after a fork, where exceptions are ignored.
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


class _DeathsHeardAtTheFetch:
    """In the place of torch's handler of SIGCHLD, which raises in whatever the main thread does at that moment.

    A worker that dies ends the training step then. The fetch of the next batch notices it, too, within 5 s.
    """

    def __init__(self, handler: Callable[..., Any]) -> None:
        self.handler = handler

    def __call__(self, *arguments: Any) -> None:
        with suppress(RuntimeError):
            self.handler(*arguments)


def keep_deaths_out_of_the_step() -> Callable[[], None] | None:
    """Let a dead worker be noticed at the next fetch instead of in the training step; return what undoes it, if so."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGCHLD"):
        return None
    handler = signal.getsignal(signal.SIGCHLD)
    if not callable(handler) or isinstance(handler, _DeathsHeardAtTheFetch):
        return None
    ours = _DeathsHeardAtTheFetch(handler)
    signal.signal(signal.SIGCHLD, ours)

    def undo() -> None:
        if signal.getsignal(signal.SIGCHLD) is ours:
            signal.signal(signal.SIGCHLD, handler)

    return undo
