"""One set of workers for the user's loader: fed by hand, and safe to lose."""

from __future__ import annotations

import math
import select
import signal
import time
import warnings
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch._C import _remove_worker_pids, _set_worker_pids
from torch.utils.data import DataLoader

from lightning_gpu_tools.loaders.index_source import IndexSource
from lightning_gpu_tools.loaders.random_state import PrivateRandomness
from lightning_gpu_tools.loaders.settings import copy_with
from lightning_gpu_tools.loaders.worker_probe import WorkerProbe
from lightning_gpu_tools.readings import LoaderSettings

# A worker that is killed closes its sockets, which this process may be reading from, a moment before it is gone.
_DYING_MS = 200


# How often to look whether a worker that was not asked for by the user is still alive. A choice: torch takes 5 s.
_LOOK_S = 1.0


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
                    warnings.filterwarnings("ignore", "This DataLoader will create|Got pickle error")
                # Not iter(): a subclass may do more there, and does it around what this loader is a part of.
                self._iterator: Any = self._loader._get_iterator()
        except Exception:  # whatever it is goes on to the caller; the indices must not be lost with it
            source.put_back(self.take_pending())
            raise
        self._workers: list[Any] = getattr(self._iterator, "_workers", [])
        self._around: Callable[[], AbstractContextManager[object]] = nullcontext
        if self._workers and not trusted:
            self._around = _WorkerGuard(self._iterator)
            iterator: Any = self._iterator
            iterator._try_get_data = _Patience(iterator._try_get_data, patience_s)
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
        began_s = 0.0 if self._workers else time.thread_time()
        with self._around():
            batch = next(self._iterator)
        if not self._workers:
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
        return [worker.pid for worker in self._workers]

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
        """End the workers."""
        self._feed.closed = True
        if self._workers:
            self._iterator._shutdown_workers()


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

    def __init__(self, iterator: Any) -> None:
        self._iterator = iterator
        self._ends = select.poll()
        for worker in iterator._workers:
            self._ends.register(worker.sentinel, select.POLLIN)
        self._remove()

    def __call__(self) -> _WorkerGuard:
        return self

    def __enter__(self) -> None:
        # A worker that ends in peace does so only when the iterator has ended, too.
        if not self._iterator._shutdown and self._ends.poll(0):
            raise LostWorkerError(self._why())
        _set_worker_pids(id(self._iterator), tuple(worker.pid for worker in self._iterator._workers))
        self._iterator._worker_pids_set = True

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._remove()
        if isinstance(error, Exception) and not isinstance(error, StopIteration) and self._ends.poll(_DYING_MS):
            raise LostWorkerError(self._why()) from error

    def _remove(self) -> None:
        if self._iterator._worker_pids_set:
            _remove_worker_pids(id(self._iterator))
            self._iterator._worker_pids_set = False

    def _why(self) -> str:
        for worker in self._iterator._workers:
            if worker.exitcode is not None:
                return _how_it_ended(worker.exitcode)
        return "a worker process is gone"


class _Patience:
    """Stands in the place of the method by which torch's iterator waits for a batch, which it calls until one comes.

    What a worker cannot hand over, because it cannot be pickled or too many files are open, it drops: then none comes.
    """

    def __init__(self, wait: Callable[[float], tuple[bool, Any]], patience_s: float) -> None:
        self._wait = wait
        self._patience_s = patience_s
        self._waited_s = 0.0

    def __call__(self, timeout: float = _LOOK_S) -> tuple[bool, Any]:
        came, batch = self._wait(timeout)
        self._waited_s = 0.0 if came else self._waited_s + timeout
        if self._waited_s >= self._patience_s:
            raise LostWorkerError(f"no batch came from the worker processes for {self._patience_s:g} s")
        return came, batch


def _how_it_ended(exitcode: int) -> str:
    if exitcode >= 0:
        return f"a worker process ended with exit code {exitcode}"
    name = signal.Signals(-exitcode).name
    likely = {
        "SIGKILL": ", most likely by the kernel because memory ran out",
        "SIGBUS": ", most likely because /dev/shm is full",
    }
    return f"a worker process was killed by {name}{likely.get(name, '')}"
