"""Passes over a DataLoader whose settings can change at any batch, with the same batches and order.

A pass takes each index of the sampler once, and loads it with a plain DataLoader. When the settings change, the next
plain DataLoader goes on with the first batch that was not delivered.
"""

from __future__ import annotations

import functools
import itertools
import random
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from lightning_gpu_tools.loaders.held import contents_of, held_by
from lightning_gpu_tools.loaders.plan import Step
from lightning_gpu_tools.loaders.settings import plain_loader, sampler_of, settings_of
from lightning_gpu_tools.loaders.workers import GRACE_S, Batches, in_one_line
from lightning_gpu_tools.training.run_measurements import LoaderSettings

# Our default: if no batch arrives for this long, new settings are abandoned.
MAX_BATCH_S = 120.0
_MAX_NUMPY_SEED = 2**32


class ContinuedLoader(DataLoader[Any]):
    """A stand-in for a DataLoader, with its attributes, whose iterators are passes; see :func:`continued`."""

    loading: Loading

    def __iter__(self) -> Any:
        if self.loading.is_closed:
            return super().__iter__()
        return self.loading.new_pass(self)


def continued(loader: DataLoader[Any]) -> ContinuedLoader:
    """Return a stand-in for a loader, of a subclass of its class. A stand-in is returned itself, and is open again."""
    if isinstance(loader, ContinuedLoader):
        if loader.loading.is_closed:
            loader.loading = Loading(loader)
        return loader
    kind = type(loader)
    # An own __iter__ of the class calls that of ContinuedLoader as super().__iter__().
    bases = (ContinuedLoader,) if kind is DataLoader else (kind, ContinuedLoader)
    name = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    made: ContinuedLoader = object.__new__(type(kind.__name__, bases, name))
    vars(made).update(vars(loader))
    made.loading = Loading(made)
    return made


class Loading:
    """How the passes over one loader load, through which its settings are changed.

    If ``steps`` is a list, the steps between the batches of a pass are appended to it, from its second batch on.
    ``as_own_work`` ends workers during a fetch, so that a timer can count this time separately.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.original = self.in_use = settings_of(loader)
        self.new_pass: Callable[[ContinuedLoader], Pass] = Pass
        self.steps: list[Step] | None = None
        self.as_own_work: Callable[[Callable[[], object]], object] = lambda end: end()
        self.fault: str | None = None  # the reason that other settings were abandoned
        self.has_begun = self.is_closed = False
        self.seeds = torch.Generator()  # of the iterators
        self.living: Batches | None = None  # persistent workers, which stay alive between passes
        self.contents: int | None = None  # of the dataset at their start; None: the user chose persistent workers
        self.passes: weakref.WeakSet[Pass] = weakref.WeakSet()
        self._shown_by = weakref.ref(loader)

    def use(self, settings: LoaderSettings) -> None:
        """Use other settings, starting with the next batch. The batch size does not change."""
        self.in_use = replace(settings, batch_size=self.original.batch_size)
        living, self.living = self.living, None
        if living is not None and not self.is_loading_with(living):
            living.close()
        self._show()

    def close(self) -> None:
        """End all workers. From now on, the loader is an ordinary one with its original settings."""
        for running in list(self.passes):
            running.release()
        if self.living is not None:
            self.living.close()
        self.living, self.in_use, self.is_closed = None, self.original, True
        self._show()

    def _show(self) -> None:
        if (loader := self._shown_by()) is not None:
            vars(loader).update(asdict(self.in_use), batch_size=loader.batch_size)

    def is_loading_with(self, batches: Batches) -> bool:
        """Return whether a pass uses these workers."""
        return any(running.batches is batches for running in self.passes)


class Indices:
    """The indices of one pass, as the sampler of plain DataLoaders. Each is taken once, by one of them or the next."""

    def __init__(self, drawn: Iterator[Any]) -> None:
        self.arrive: Callable[[Any], Any] | None = None  # called with an index that this process loads
        self._drawn = drawn
        self._waiting: deque[Any] = deque()
        self._under_way: deque[Any] = deque()  # taken, but their batches have not been delivered

    def draw(self, count: int = 1) -> bool:
        """Let the sampler draw until so many indices wait, and return whether any does."""
        self._waiting.extend(itertools.islice(self._drawn, max(0, count - len(self._waiting))))
        return bool(self._waiting)

    def __iter__(self) -> Indices:
        return self

    def __next__(self) -> Any:
        index = self._waiting.popleft() if self._waiting else next(self._drawn)
        self._under_way.append(index)
        return index if self.arrive is None else self.arrive(index)

    def delivered(self) -> None:
        """Forget the oldest batch in progress."""
        self._under_way.popleft()

    def give_back(self) -> None:
        """Let the next loader begin with the first batch that was not delivered."""
        self._waiting.extendleft(reversed(self._under_way))
        self._under_way.clear()


class Pass:
    """The iterator of one pass. It starts and ends workers, and must not be part of a reference cycle.

    Its random numbers are those that torch draws with the original settings.
    """

    arrive: Callable[[Any], Any] | None = None  # of the indices

    def __init__(self, loader: ContinuedLoader) -> None:
        self.loader, self.loading = loader, loader.loading
        self.batches: Batches | None = None
        self.settings = self.loading.in_use  # of the batches
        self._is_first = True
        self._wait_s = 0.0
        self._got: tuple[float, float] | None = None  # the times of the last batch, if steps are measured
        self.indices = self._start()
        self.loading.passes.add(self)
        self.loading.has_begun = True

    def _start(self) -> Indices:
        """Draw what torch draws here. Workers start with the first batch, after the end of those of the last pass."""
        loading, original, generator = self.loading, self.loading.original, self.loader.generator
        indices = iter(sampler_of(self.loader))
        # torch draws a seed for each new iterator, but not for later passes of persistent workers.
        if not (original.persistent_workers and loading.has_begun):
            loading.seeds.set_state(torch.get_rng_state() if generator is None else generator.get_state())
            draw_seed(generator)
            if original.num_workers:
                indices = iter(sampler_of(self.loader))
        started = Indices(indices)
        started.draw(original.num_workers * (original.prefetch_factor or 0))
        return started

    def _load(self) -> None:
        """Load with the settings in use."""
        loading = self.loading
        settings = self.settings = loading.in_use
        living = loading.living
        # In torch, a second iteration would take the workers away from the first one.
        if living is not None and not loading.is_loading_with(living):
            # These workers lack changes of the dataset since they were started.
            if loading.contents is None or loading.contents == self._contents():
                indices: Indices = sampler_of(living.loader)
                vars(indices).update(vars(self.indices), arrive=None)
                self.batches, self.indices = living, indices
                living.restart()
                return
            living.close()
            living = loading.living = None
        self.indices.arrive = None if settings.num_workers else self.arrive
        is_original = settings == loading.original
        limit = {} if is_original else {"timeout": self.loader.timeout or MAX_BATCH_S}
        inner = plain_loader(self.loader, settings, self.indices, generator=loading.seeds, **limit)
        self.batches = Batches(inner, trusted=is_original)
        loading.seeds.manual_seed(draw_seed(loading.seeds))  # the next number would be the seed of the next pass
        if settings.persistent_workers and living is None:
            loading.living = self.batches
            loading.contents = None if loading.original.persistent_workers else self._contents()

    def _contents(self) -> int:
        return contents_of(held_by(self.loader.dataset))

    def __iter__(self) -> Pass:
        return self

    def __getattr__(self, name: str) -> Any:
        # Other code looks for the loader's workers on torch's iterator.
        batches = vars(self).get("batches")
        if batches is None or batches.iterator is None:
            raise AttributeError(name)
        return getattr(batches.iterator, name)

    def __next__(self) -> Any:
        steps = self.loading.steps
        if steps is None:
            self._got = None
            return self._next()
        asked_s, asked_cpu_s = time.perf_counter(), time.process_time()
        if self._got is not None:
            steps.append(Step(asked_s - self._got[0], asked_cpu_s - self._got[1], self._wait_s))
        batch = self._next()
        if not self._is_first:  # which waits for workers to start
            self._got = time.perf_counter(), time.process_time()
        self._is_first = False
        return batch

    def _next(self) -> Any:
        loading = self.loading
        if self.settings is not loading.in_use:
            loading.as_own_work(self.release)
        try:
            if self.batches is None:
                if not self.indices.draw():
                    raise StopIteration
                self._load()
            asked_s = time.perf_counter()
            batch = self._fetch()
            self._wait_s = time.perf_counter() - asked_s
        except StopIteration:
            raise
        except Exception as error:
            if self.settings == loading.original:
                raise
            self._fall_back(error)
            return self._next()
        self.indices.delivered()
        return batch

    def _fetch(self) -> Any:
        assert self.batches is not None
        if self.settings.num_workers or not self.loading.original.num_workers:
            return next(self.batches)
        with undisturbed():  # because workers drew the numbers of the dataset
            seed_cpu(draw_seed(self.loading.seeds))
            return next(self.batches)

    def _fall_back(self, error: Exception) -> None:
        """Restore the original settings, and reload the batches that were in progress."""
        loading = self.loading
        loading.as_own_work(functools.partial(self.release, 0.0))
        if loading.fault is None:
            loading.fault = in_one_line(error)
            warnings.warn(
                f"Loading with num_workers={self.settings.num_workers} failed ({loading.fault}). The original settings "
                f"were restored (num_workers={loading.original.num_workers}). No batch was lost.",
                stacklevel=2,
            )
        if loading.in_use != loading.original:
            loading.use(loading.original)

    def release(self, grace_s: float = GRACE_S) -> None:
        """End the workers, except persistent ones. The batches in progress are loaded again."""
        batches, self.batches = self.batches, None
        self.indices.give_back()
        if batches is not None and batches is not self.loading.living:
            batches.close(grace_s)

    def __del__(self) -> None:
        if "indices" in vars(self):  # else its sampler has failed
            self.release()


# The global random generators


def random_states() -> tuple[Any, Any, Any]:
    """Return the states of torch's (CPU), NumPy's and Python's global generators."""
    return torch.get_rng_state(), np.random.get_state(), random.getstate()


@contextmanager
def undisturbed() -> Iterator[None]:
    """Restore the global random states when the block ends."""
    of_torch, of_numpy, of_python = random_states()
    try:
        yield
    finally:
        torch.set_rng_state(of_torch)
        np.random.set_state(of_numpy)
        random.setstate(of_python)


def draw_seed(generator: torch.Generator | None) -> int:
    """Draw the seed of a new iterator like torch's DataLoader; ``None`` means the global generator."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())


def seed_cpu(seed: int) -> None:
    """Seed the global generators of torch (CPU), NumPy and Python."""
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed % _MAX_NUMPY_SEED)
    random.seed(seed)
