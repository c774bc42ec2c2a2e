"""One set of workers for the user's loader: fed by hand, and safe to lose."""

from __future__ import annotations

import math
import os
import select
import signal
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch._C import _remove_worker_pids, _set_worker_pids
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from lightning_gpu_tools.loaders.index_source import IndexSource
from lightning_gpu_tools.loaders.random_state import PrivateRandomness
from lightning_gpu_tools.loaders.settings import copy_with
from lightning_gpu_tools.loaders.worker_probe import WorkerProbe
from lightning_gpu_tools.training.run_measurements import LoaderSettings

# A worker that is killed closes its sockets, which this process may be reading from, a moment before it is gone.
_DYING_MS = 200

# How often to check that the workers are alive while a batch is waited for. Our default; torch's is 5 s.
_POLL_S = 1.0

# How long workers may take to finish what they load when they are to end: torch gives each of them as long.
_END_TIMEOUT_S = 5.0
# How long they may then take to die of a signal. Our default: only a process that the kernel holds takes longer.
_SIGNAL_TIMEOUT_S = 1.0


class LostWorkerError(Exception):
    """A worker process is gone, or stuck."""


class InnerLoader:
    """Loads, with settings of its own, what a source of indices hands out, and knows what of it is still to come.

    Args:
        loader: The user's loader; it is copied, with everything but its settings and its sampler.
        settings: The copy's settings.
        source: Where the indices come from.
        seeds: The generator from which the copy draws the seed of its workers.
        probe: Measures the workers.
        trusted: Whether these are the user's own settings: then a failure is the user's, told in torch's own way.
        patience_s: How long to wait for a batch of settings that are not the user's own before its worker counts as
            stuck.
        randomness: Where the random numbers come from if the training process loads by itself and did not do so by the
            user's own settings.

    Attributes:
        settings: As given.
        probe: As given.
        alone_cpu_s: CPU time that the training process itself has spent on loading, where there are no workers.

    Raises:
        Exception: The workers could not be started: the dataset cannot be pickled, there are too many open files, ...
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        settings: LoaderSettings,
        source: IndexSource,
        *,
        seeds: torch.Generator,
        probe: WorkerProbe | None = None,
        trusted: bool = True,
        patience_s: float = math.inf,
        randomness: PrivateRandomness | None = None,
    ) -> None:
        self.settings = settings
        self.probe = probe
        self.alone_cpu_s = 0.0
        self._feed = _Feed(source)
        self._loader = copy_with(loader, settings)
        replaced = "sampler" if loader.batch_sampler is None else "batch_sampler"
        vars(self._loader).update({replaced: self._feed, "generator": seeds})
        if probe is not None:
            self._loader.worker_init_fn = probe.init_fn(loader.worker_init_fn)
        try:
            with warnings.catch_warnings():
                if not trusted:
                    warnings.filterwarnings("ignore", "Got pickle error")
                # Not iter(): a subclass may do more there, and does it around what this loader is a part of.
                self._iterator: Any = (
                    _Workers(self._loader, math.inf if trusted else patience_s)
                    if settings.num_workers
                    else self._loader._get_iterator()
                )
        except Exception:  # whatever it is goes on to the caller; the indices must not be lost with it
            source.put_back(self.take_pending())
            raise
        self._workers = self._iterator if isinstance(self._iterator, _Workers) else None
        self._around: Callable[[], AbstractContextManager[object]] = nullcontext
        if self._workers is not None and not trusted:
            self._around = _WorkerGuard(self._workers)
        elif not trusted and randomness is not None:
            self._around = randomness

    def restart(self, source: IndexSource) -> None:
        """Begin another epoch with the same, persistent workers.

        Raises:
            Exception: They are gone or stuck.
        """
        self._feed.begin(source)
        try:
            with self._around():
                self._iterator._reset(self._loader)
        except Exception:  # as above
            source.put_back(self.take_pending())
            raise

    def __next__(self) -> Any:
        """Return the next batch.

        Raises:
            StopIteration: The source has no more.
            LostWorkerError: A worker is gone or stuck, of settings that are not the user's own.
            Exception: The dataset has failed, in its own way.
        """
        alone = self._workers is None
        began_s = time.thread_time() if alone else 0.0
        with self._around():
            batch = next(self._iterator)
        if alone:
            self.alone_cpu_s += time.thread_time() - began_s
        self._feed.pending.popleft()
        return batch

    def stop_taking(self) -> None:
        """Take no more indices; what is taken is still loaded, and then the iteration ends."""
        self._feed.closed = True

    @property
    def pending(self) -> int:
        """How many indices were taken whose batches have not come out."""
        return len(self._feed.pending)

    @property
    def pids(self) -> list[int]:
        """The worker processes."""
        return [] if self._workers is None else self._workers.pids

    def iterator_attribute(self, name: str) -> Any:
        """Return an attribute of torch's iterator.

        Raises:
            AttributeError: It has none of this name.
        """
        return getattr(self._iterator, name)

    def take_pending(self) -> list[Any]:
        """Give up what was taken and not delivered."""
        pending = list(self._feed.pending)
        self._feed.pending.clear()
        return pending

    def close(self) -> None:
        """Load nothing more, end the workers and let go of them; nothing happens the second time."""
        self._feed.closed = True
        if self._workers is not None:
            self._workers.end()
        self._workers, self._iterator, self._around = None, iter(()), nullcontext


class _Workers(_MultiProcessingDataLoaderIter):
    """torch's iterator over worker processes, which end when :meth:`end` is called and at no other moment.

    torch ends them when the iterator is deleted. In a reference cycle, and a traceback that is kept makes one, the
    garbage collector does that, wherever it happens to run, and after multiprocessing's finalizers have closed the
    queues by which workers hear that they are to end: that stalls for 5 s a worker. A forked process inherits the
    garbage and would end the workers of its parent.

    Args:
        loader: What to iterate.
        patience_s: How long to wait for a batch. What a worker cannot hand over, because it cannot be pickled or too
            many files are open, it drops: then none comes.
    """

    def __init__(self, loader: DataLoader[Any], patience_s: float) -> None:
        self._patience_s = patience_s
        self._waited_s = 0.0
        self._ending: threading.Thread | None = None
        # torch sets both much the same, but not in time for a start that fails half-way.
        self._workers: list[Any] = []
        self._workers_status = [True] * loader.num_workers
        try:
            with _interrupt_deferred():
                super().__init__(loader)
        except BaseException:  # Ctrl-C too: nobody else knows of those that were started
            if self._workers:
                self.end()
            raise

    @property
    def pids(self) -> list[int]:
        """The worker processes."""
        return [worker.pid for worker in self._workers]

    def _try_get_data(self, timeout: float = _POLL_S) -> tuple[bool, Any]:
        """Wait for a batch; torch calls it until one comes."""
        came, batch = super()._try_get_data(timeout)  # type: ignore[no-untyped-call]
        self._waited_s = 0.0 if came else self._waited_s + timeout
        if self._waited_s >= self._patience_s:
            raise LostWorkerError(f"no batch came from the worker processes for {self._patience_s:g} s")
        return came, batch

    def _shutdown_workers(self) -> None:
        """Do nothing: torch calls it when it has no more batches, and when it is deleted."""

    def end(self) -> None:
        """End the workers when they have loaded what they are at, or after some seconds by force.

        It returns in any case. Some of torch's own steps have no time limit: waiting for its thread that pins memory,
        and for a lock that a killed worker may have held. Therefore another thread takes them.
        """
        self.report_deaths(False)
        if self._ending is None:
            ending = threading.Thread(target=super()._shutdown_workers, daemon=True)
            ending.start()
            self._ending = ending
        self._ending.join(_END_TIMEOUT_S)
        for by_force in ("terminate", "kill"):
            if self._ending.is_alive():
                for worker in self._workers:
                    getattr(worker, by_force)()
                self._ending.join(_SIGNAL_TIMEOUT_S)

    def report_deaths(self, wanted: bool) -> None:
        """Have torch raise an error in the training thread when a worker dies, whatever it does there; or not."""
        if wanted:
            _set_worker_pids(id(self), tuple(self.pids))
        elif self._worker_pids_set:
            _remove_worker_pids(id(self))
        self._worker_pids_set = wanted


class _Feed:
    """What stands in the place of the sampler."""

    def __init__(self, source: IndexSource) -> None:
        self.begin(source)

    def begin(self, source: IndexSource) -> None:
        self.source = source
        self.pending: deque[Any] = deque()
        self.closed = False

    def __iter__(self) -> _Feed:
        return self

    def __len__(self) -> int:
        return len(self.pending)

    def __next__(self) -> Any:
        if self.closed:
            raise StopIteration
        index = self.source.take()
        self.pending.append(index)
        return index


class _WorkerGuard:
    """Sees to it that a lost worker is noticed while a batch is asked for, and at no other moment.

    torch raises an error in the middle of whatever the training thread does when a worker dies, so that a training step
    would break because of settings that are only tried out. It does so for the workers in a list of its own, which they
    are on only inside of this block. Who died outside of it is seen at its start.
    """

    def __init__(self, workers: _Workers) -> None:
        self._workers = workers
        self._ends = select.poll()
        for worker in workers._workers:
            self._ends.register(worker.sentinel, select.POLLIN)
        workers.report_deaths(False)

    def __call__(self) -> _WorkerGuard:
        return self

    def __enter__(self) -> None:
        if self._ends.poll(0):
            raise LostWorkerError(self._why())
        self._workers.report_deaths(True)

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._workers.report_deaths(False)
        if isinstance(error, Exception) and not isinstance(error, StopIteration) and self._ends.poll(_DYING_MS):
            raise LostWorkerError(self._why()) from error

    def _why(self) -> str:
        for worker in self._workers._workers:
            if worker.exitcode is not None:
                return _how_it_ended(worker.exitcode)
        return "a worker process is gone"


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


def _how_it_ended(exitcode: int) -> str:
    if exitcode >= 0:
        return f"a worker process ended with exit code {exitcode}"
    name = signal.Signals(-exitcode).name
    likely = {
        "SIGKILL": ", most likely by the kernel because memory ran out",
        "SIGBUS": ", most likely because /dev/shm is full",
    }
    return f"a worker process was killed by {name}{likely.get(name, '')}"
