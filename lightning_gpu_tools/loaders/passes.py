"""Passes over a DataLoader whose settings can change at any batch, with the same batches and order.

A pass takes each index of the sampler once, and loads it with a plain DataLoader. When the settings change, the next
plain DataLoader goes on with the first batch that was not delivered.
"""

from __future__ import annotations

import functools
import itertools
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_gpu_tools.advice.workers_allowed import CHANGES
from lightning_gpu_tools.loaders.plan import Fetch
from lightning_gpu_tools.loaders.random_states import (
    bring_back,
    draw_seed,
    peek_seed,
    random_states,
    same_states,
    seed_all,
    set_aside,
)
from lightning_gpu_tools.loaders.settings import fingerprint, plain_loader, sampler_of, settings_of
from lightning_gpu_tools.loaders.workers import GRACE_S, Batches, in_one_line
from lightning_gpu_tools.training.run_measurements import LoaderSettings

# Our default: if no batch arrives for this long, new settings are abandoned.
MAX_BATCH_S = 120.0


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

    If ``fetches`` is a list, each fetch is appended to it; for the first fetch of a pass, which waits for workers to
    start, ``None`` is. ``as_own_work`` ends workers during a fetch, so that a timer can count this time separately.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.original = self.in_use = settings_of(loader)
        self.new_pass: Callable[[ContinuedLoader], Pass] = AsTorch
        self.fetches: list[Fetch | None] | None = None
        self.as_own_work: Callable[[Callable[[], object]], object] = lambda end: end()
        self.fault: str | None = None  # the reason that other settings were abandoned
        self.is_watched = False  # whether it is noted what the next two are about
        self.before: int | str | None = None  # contents of the dataset before the first batch
        self.drew = False  # whether the dataset drew random numbers in this process
        self.has_begun = self.has_changed = self.is_closed = False
        self.seeds = torch.Generator()  # of all iterators but those that torch would have, too
        self.living: Living | None = None
        self.passes: weakref.WeakSet[Pass] = weakref.WeakSet()
        self._dataset = loader.dataset
        self._shown_by = weakref.ref(loader)

    @property
    def moved_draws(self) -> bool:
        """Whether workers now draw the random numbers that the dataset drew in this process."""
        return self.drew and self.in_use.num_workers > 0

    def obstacle(self) -> str | None:
        """Return the reason not to change the settings, based on the batches so far, and stop watching."""
        self.is_watched = False
        if any(running.indices is not None and running.indices.drew_late for running in self.passes):
            return "its sampler draws random numbers during the epoch, and other settings would draw them earlier"
        after = self.contents()
        if isinstance(after, str):
            return f"worker processes cannot copy its dataset ({after})"
        return CHANGES if after != self.before else None

    def use(self, settings: LoaderSettings) -> None:
        """Use other settings, starting with the next batch. The batch size does not change."""
        self.in_use = replace(settings, batch_size=self.original.batch_size)
        self.has_changed = True
        living, self.living = self.living, None
        if living is not None and not self.is_loading_with(living):
            living.batches.close()
        self._show()

    def close(self) -> None:
        """End all workers. From now on, the loader is an ordinary one with its original settings."""
        for running in list(self.passes):
            running.release()
        if self.living is not None:
            self.living.batches.close()
        self.living, self.in_use, self.is_closed = None, self.original, True
        self._show()

    def _show(self) -> None:
        if (loader := self._shown_by()) is not None:
            vars(loader).update(asdict(self.in_use), batch_size=loader.batch_size)

    def is_loading_with(self, living: Living) -> bool:
        """Return whether a pass uses these workers."""
        return any(running.batches is living.batches for running in self.passes)

    def contents(self) -> int | str:
        """Return a number that changes with the dataset, or the reason that workers cannot copy it."""
        try:
            return fingerprint(self._dataset)
        except Exception as error:  # noqa: BLE001 - training continues after any error of a dataset
            return in_one_line(error)


class Living(NamedTuple):
    """Persistent workers that stay alive between passes."""

    batches: Batches
    feed: _Feed
    contents: int | str | None  # of the dataset at their start; None: the user chose persistent workers


class Indices:
    """The indices of one pass. Each is taken once, by one plain DataLoader or the next one."""

    def __init__(self, sampler: Iterable[Any], *, is_watched: bool = False) -> None:
        self.drew_late = False  # whether the sampler drew random numbers after its first index, while watched
        self._is_watched = is_watched
        self._sampler = sampler
        self._iterator: Iterator[Any] = iter(())
        self._count = 0
        self._waiting: deque[Any] = deque()
        self._under_way: deque[Any] = deque()  # taken, but their batches have not been delivered

    def start(self) -> None:
        """Create the sampler's iterator, which may draw random numbers."""
        self._iterator = iter(self._sampler)
        self._count = 0
        self._waiting.clear()
        self._under_way.clear()

    def has_more(self) -> bool:
        """Let the sampler draw the next index, and return whether there is one."""
        if not self._waiting:
            before = random_states() if self._is_watched and self._count else None
            self._waiting.extend(itertools.islice(self._iterator, 1))
            self._count += 1
            if before is not None:
                self.drew_late |= not same_states(before, random_states())
        return bool(self._waiting)

    def take(self) -> Any:
        """Return the next index, whose batch is in progress from now on."""
        if not self.has_more():
            raise StopIteration
        self._under_way.append(index := self._waiting.popleft())
        return index

    def delivered(self) -> None:
        """Forget the oldest batch in progress."""
        self._under_way.popleft()

    def give_back(self) -> None:
        """Let the next loader begin with the first batch that was not delivered."""
        self._waiting.extendleft(reversed(self._under_way))
        self._under_way.clear()


class _Feed:
    """The sampler of a plain DataLoader: the indices that are left of a pass."""

    def __init__(self, indices: Indices, arrive: Callable[[Any], Any] | None, *, starts: bool) -> None:
        self.indices = indices
        self._arrive, self._starts = arrive, starts

    def __iter__(self) -> _Feed:
        if self._starts:
            self.indices.start()
        return self

    def __next__(self) -> Any:
        index = self.indices.take()
        return index if self._arrive is None else self._arrive(index)


class Pass:
    """The iterator of one pass. It starts and ends workers, and must not be part of a reference cycle."""

    arrive: Callable[[Any], Any] | None = None  # called with an index that this process loads

    def __init__(self, loader: ContinuedLoader) -> None:
        self.batches: Batches | None = None
        self.indices: Indices | None = None  # None: the dataset is iterable
        self.loader, self.loading = loader, loader.loading
        self.settings = self.loading.in_use  # of the batches
        self._is_first = True
        self._wait_s = 0.0
        self.loading.passes.add(self)

    def fetch(self) -> Any:
        """Return the next batch, with the random numbers that it should have."""
        raise NotImplementedError

    def load(self, generator: torch.Generator | None, *, starts: bool = False) -> None:
        """Load with the settings in use. With ``starts``, torch starts the sampler at its usual time."""
        loading = self.loading
        settings = self.settings = loading.in_use
        living = loading.living
        # In torch, a second iteration would take the workers away from the first one.
        if living is not None and self.indices is not None and (starts or not loading.is_loading_with(living)):
            # These workers lack changes of the dataset since they were started.
            if living.contents is None or living.contents == loading.contents():
                self.batches, living.feed.indices = living.batches, self.indices
                self.batches.restart()
                return
            living.batches.close()
            living = loading.living = None
        contents = None
        if settings.persistent_workers and not loading.original.persistent_workers:
            contents = loading.contents()
        feed = None
        if self.indices is not None:
            feed = _Feed(self.indices, None if settings.num_workers else self.arrive, starts=starts)
        is_original = settings == loading.original
        limit = {} if is_original else {"timeout": self.loader.timeout or MAX_BATCH_S}
        inner = plain_loader(self.loader, settings, feed, generator=generator, **limit)
        self.batches = Batches(inner, trusted=is_original)
        if settings.persistent_workers and living is None and feed is not None:
            loading.living = Living(self.batches, feed, contents)

    def __iter__(self) -> Pass:
        return self

    def __getattr__(self, name: str) -> Any:
        # Other code looks for the loader's workers on torch's iterator.
        batches = vars(self).get("batches")
        if batches is None or batches.iterator is None:
            raise AttributeError(name)
        return getattr(batches.iterator, name)

    def __next__(self) -> Any:
        loading = self.loading
        if loading.fetches is None and not self._is_first:
            return self._next()
        asked = time.perf_counter(), time.process_time()
        if self._is_first and loading.is_watched:
            loading.before = loading.contents()
        batch = self._next()
        if loading.fetches is not None:
            got = time.perf_counter(), time.process_time()
            loading.fetches.append(None if self._is_first else Fetch(*asked, self._wait_s, *got))
        self._is_first = False
        return batch

    def _next(self) -> Any:
        loading = self.loading
        if self.settings is not loading.in_use:
            loading.as_own_work(self.release)
        try:
            if self.batches is None:
                if self.indices is not None and not self.indices.has_more():
                    raise StopIteration
                self.load(loading.seeds)
            asked_s = time.perf_counter()
            batch = self.fetch()
            self._wait_s = time.perf_counter() - asked_s
        except StopIteration:
            raise
        except Exception as error:
            if self.settings == loading.original:
                raise
            self._fall_back(error)
            return self._next()
        if self.indices is not None:
            self.indices.delivered()
        return batch

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
        if self.indices is not None:
            self.indices.give_back()
        living = self.loading.living
        if batches is not None and (living is None or living.batches is not batches):
            batches.close(grace_s)

    def __del__(self) -> None:
        self.release()


class AsTorch(Pass):
    """A pass whose random numbers are those that torch draws with the original settings."""

    def __init__(self, loader: ContinuedLoader) -> None:
        super().__init__(loader)
        loading = self.loading
        self.indices = Indices(sampler_of(loader), is_watched=loading.is_watched)
        original = loading.original
        # torch draws a seed for each new iterator, but not for later passes of persistent workers.
        is_new = not (original.persistent_workers and loading.has_begun)
        loading.has_begun = True
        if not loading.has_changed:  # torch itself starts the sampler and draws the seed
            if is_new:
                loading.seeds.manual_seed(peek_seed(loader.generator))
            self.load(loader.generator, starts=True)
            return
        # As in torch with the original settings. The new workers start with the first batch, after Lightning has
        # dropped the iterator of the last epoch.
        self.indices.start()
        if is_new:
            loading.seeds.manual_seed(draw_seed(loader.generator))
            if original.num_workers:
                self.indices.start()
        if original.num_workers:
            self.indices.has_more()

    @override
    def fetch(self) -> Any:
        loading = self.loading
        assert self.batches is not None
        if self.settings.num_workers:
            return next(self.batches)
        if loading.original.num_workers:  # so workers drew the numbers of the dataset
            outside = set_aside()
            try:
                seed_all(draw_seed(loading.seeds))
                return next(self.batches)
            finally:
                bring_back(outside)
        assert self.indices is not None
        if not loading.is_watched or loading.drew or not self.indices.has_more():
            return next(self.batches)
        before = random_states()  # the sampler has already drawn its numbers for this batch
        batch = next(self.batches)
        loading.drew = not same_states(before, random_states())
        return batch
