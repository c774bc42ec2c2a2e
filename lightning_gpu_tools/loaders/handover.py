"""Changes of DataLoader settings during iteration, with the same batches, order and random numbers.

The current loader gets no more indices, and delivers the batches in progress. A plain DataLoader with the new settings
then continues with the same sampler iterator. Later epochs also use plain DataLoaders.
"""

from __future__ import annotations

import copy
import functools
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from lightning_gpu_tools.advice.workers_allowed import CHANGES, why_not_searched, why_not_switched
from lightning_gpu_tools.loaders.facts import read_loader_facts
from lightning_gpu_tools.loaders.plan import Fetch
from lightning_gpu_tools.loaders.random_states import (
    draw_seed,
    peek_seed,
    put_back,
    random_states,
    same_states,
    seeded_states,
    undisturbed,
)
from lightning_gpu_tools.loaders.search import in_one_line
from lightning_gpu_tools.loaders.settings import GET_ITERATOR, fingerprint, plain_loader, settings_of
from lightning_gpu_tools.loaders.workers import Batches
from lightning_gpu_tools.training.run_measurements import LoaderFacts, LoaderSettings

# Our default: if no batch arrives for this long, new settings are abandoned.
MAX_BATCH_S = 120.0


class _Source:
    """The indices of one epoch. Each is taken once, by any loader."""

    def __init__(self, sampler: Any, *, watched: bool) -> None:
        self.drew_late = False  # whether the sampler drew random numbers after the first index, while watched
        self._watched = watched
        self._sampler = sampler
        self._indices: Iterator[Any] = iter(())
        self._ready: deque[Any] = deque()
        self._taken = 0

    def start(self) -> None:
        """Create the sampler's iterator, which may draw random numbers."""
        self._indices = iter(self._sampler)
        self._ready.clear()
        self._taken = 0

    def has_more(self) -> bool:
        """Fetch the next index from the sampler, and return whether there is one."""
        if not self._ready:
            before = random_states() if self._watched and self._taken else None
            try:
                self._ready.append(next(self._indices))
            except StopIteration:
                return False
            if before is not None:
                self.drew_late |= not same_states(before, random_states())
        return True

    def take(self) -> Any:
        if not self.has_more():
            raise StopIteration
        self._taken += 1
        return self._ready.popleft()

    def give_back(self, indices: deque[Any]) -> None:
        self._ready.extendleft(reversed(indices))


class _Rest:
    """The sampler of a plain DataLoader: the remaining indices of a source, until it is closed."""

    def __init__(self, source: _Source, *, starts: bool = False) -> None:
        self.source = source
        self.closed = False
        self.under_way: deque[Any] = deque()  # indices whose batches have not been delivered
        self._starts = starts

    def __iter__(self) -> _Rest:
        if self._starts:
            self.source.start()
        return self

    def __next__(self) -> Any:
        if self.closed:
            raise StopIteration
        self.under_way.append(index := self.source.take())
        return index


class _Living(NamedTuple):
    """Persistent workers that stay alive between epochs."""

    batches: Batches
    rest: _Rest
    contents: int | str | None  # fingerprint of the dataset at their start; None: the user chose persistent workers


class Switch:
    """The shared state of the epochs of one loader, through which its settings are changed.

    If ``fetches`` is a list, each fetch is appended to it; for the first fetch of an epoch, which waits for workers to
    start, ``None`` is. ``as_own_work`` ends workers during a fetch, so that a timer can count this time separately.
    """

    def __init__(self, made: DataLoader[Any], facts: LoaderFacts) -> None:
        self.original = settings_of(made)
        self._facts = facts  # before the first batch
        self.chosen: LoaderSettings | None = None
        self.fault: str | None = None  # the reason that the chosen settings were abandoned
        self.moved_draws = False  # whether other processes now draw the dataset's random numbers
        self.begun = False
        self.fetches: list[Fetch | None] | None = None
        self.as_own_work: Callable[[Callable[[], object]], object] = lambda end: end()
        self._shown_by = weakref.ref(made)
        self._dataset = made.dataset
        self._before: int | str | None = None
        self._drew = False
        self._watched = True
        self._epochs: weakref.WeakSet[_Epoch] = weakref.WeakSet()
        self._living: _Living | None = None
        self._seeds = torch.Generator()
        self._states: Any = None  # of generators for numbers that workers drew before, and this process draws now

    @property
    def in_use(self) -> LoaderSettings:
        """The settings for the next batches."""
        return self.chosen or self.original

    def obstacle(self) -> str | None:
        """Return the reason not to change the settings, based on the batches so far, and stop watching."""
        self._watched = False
        loader = self._shown_by()
        if loader is not None and (why := why_not_switched(self._facts, read_loader_facts(loader))) is not None:
            return why
        if any(epoch.source.drew_late for epoch in self._epochs):
            return "its sampler draws random numbers during the epoch, and other settings would draw them earlier"
        after = self._contents()
        if isinstance(after, str):
            return f"worker processes cannot copy its dataset ({after})"
        return CHANGES if after != self._before else None

    def use(self, settings: LoaderSettings) -> None:
        """Use other settings, starting with the next batch that is not in progress. The batch size does not change."""
        self.chosen = settings = replace(settings, batch_size=self.original.batch_size)
        self.moved_draws = self._drew and settings.num_workers > 0
        living, self._living = self._living, None
        if living is not None and not self._in_use(living):
            living.batches.close()
        if (loader := self._shown_by()) is not None:
            vars(loader).update(asdict(settings), persistent_workers=False)
        for epoch in self._epochs:
            epoch.rest.closed = True

    def end(self) -> None:
        """End all workers."""
        for epoch in list(self._epochs):
            epoch.release()
        if self._living is not None:
            self._living.batches.close()

    def _in_use(self, living: _Living) -> bool:
        return any(epoch.batches is living.batches for epoch in self._epochs)

    def _contents(self) -> int | str:
        try:
            return fingerprint(self._dataset)
        except Exception as error:  # noqa: BLE001 - training continues after any error of a dataset
            return in_one_line(error)


class _Epoch:
    """The iterator used by training. It starts and ends workers, and must not be part of a reference cycle."""

    def __init__(self, loader: DataLoader[Any], switch: Switch) -> None:
        self.batches: Batches | None = None
        self._loader, self._switch = loader, switch
        self._settings = switch.in_use
        self._first = True
        self._wait_s = 0.0
        sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        self.source = _Source(sampler, watched=switch._watched)
        self.rest = _Rest(self.source)
        original = switch.original
        # torch draws a seed for each new iterator, but not for later epochs of persistent workers.
        new = not (original.persistent_workers and switch.begun)
        switch.begun = True
        switch._epochs.add(self)
        if switch.chosen is None:  # torch itself starts the sampler and draws the seed
            if new:
                switch._seeds.manual_seed(peek_seed(loader.generator))
            self._load_with(starts=True, generator=loader.generator)
            return
        # As in torch with the original settings. The new workers start with the first batch, after Lightning has
        # dropped the iterator of the last epoch.
        self.source.start()
        if new:
            switch._seeds.manual_seed(draw_seed(loader.generator))
            if original.num_workers:
                self.source.start()
        if original.num_workers:
            self.source.has_more()

    def _load_with(self, *, starts: bool, generator: torch.Generator | None) -> None:
        """Load with the current settings. With ``starts``, torch starts the sampler at its usual time."""
        switch = self._switch
        settings = self._settings = switch.in_use
        living = switch._living
        # In torch, a second iteration would take the workers away from the first one.
        if living is not None and (starts or not switch._in_use(living)):
            # These workers lack changes of the dataset since they were started.
            if living.contents is None or living.contents == switch._contents():
                self.batches, self.rest = living.batches, living.rest
                self.rest.source, self.rest.closed = self.source, False
                self.rest.under_way.clear()
                self.batches.restart()
                return
            living.batches.close()
            living = switch._living = None
        contents = None
        if settings.persistent_workers and not switch.original.persistent_workers:
            contents = switch._contents()
        self.rest = _Rest(self.source, starts=starts)
        trusted = settings == switch.original
        limit = {} if trusted else {"timeout": self._loader.timeout or MAX_BATCH_S}
        inner = plain_loader(self._loader, settings, self.rest, generator=generator, **limit)
        self.batches = Batches(inner, trusted=trusted)
        if settings.persistent_workers and living is None:
            switch._living = _Living(self.batches, self.rest, contents)

    def __iter__(self) -> _Epoch:
        return self

    def __getattr__(self, name: str) -> Any:
        # Other code looks for the loader's workers on torch's iterator.
        batches = vars(self).get("batches")
        if batches is None or batches.iterator is None:
            raise AttributeError(name)
        return getattr(batches.iterator, name)

    def __next__(self) -> Any:
        switch, asked = self._switch, (time.perf_counter(), time.process_time())
        if self._first and switch._watched:
            switch._before = switch._contents()
        batch = self._next()
        if switch.fetches is not None:
            got = time.perf_counter(), time.process_time()
            switch.fetches.append(None if self._first else Fetch(*asked, self._wait_s, *got))
        self._first = False
        return batch

    def _next(self) -> Any:
        try:
            if self.batches is None:
                self._load_with(starts=False, generator=self._switch._seeds)
            return self._fetch()
        except StopIteration:
            if not (self.rest.closed and self.source.has_more()):
                raise
            self._switch.as_own_work(self.release)  # the old loader is drained
        except Exception as error:
            if self._settings == self._switch.original:
                raise
            self._fall_back(error)
        return self._next()

    def _fetch(self) -> Any:
        switch, workers = self._switch, self._settings.num_workers
        assert self.batches is not None
        watched = switch._watched and not workers and not switch._drew and self.source.has_more()
        before = random_states() if watched else None  # the sampler has already drawn its numbers for this batch
        asked_s = time.perf_counter()
        if switch.original.num_workers and not workers:
            with undisturbed():
                put_back(switch._states or seeded_states(switch._seeds.initial_seed()))
                try:
                    batch = next(self.batches)
                finally:
                    switch._states = random_states()
        else:
            batch = next(self.batches)
        self._wait_s = time.perf_counter() - asked_s
        if before is not None:
            switch._drew |= not same_states(before, random_states())
        self.rest.under_way.popleft()
        return batch

    def _fall_back(self, error: Exception) -> None:
        """Restore the original settings, and reload the batches that were in progress."""
        switch = self._switch
        self.source.give_back(self.rest.under_way)
        self.rest.under_way = deque()
        if self.batches is not None:
            switch.as_own_work(functools.partial(self.batches.close, 0.0))
            self.batches = None
        if switch.fault is None:
            switch.fault = in_one_line(error)
            warnings.warn(
                f"Loading with num_workers={self._settings.num_workers} failed ({switch.fault}). The original settings "
                f"were restored (num_workers={switch.original.num_workers}). No batch was lost.",
                stacklevel=2,
            )
        if switch.chosen != switch.original:
            switch.use(switch.original)
        self._settings = switch.original

    def release(self) -> None:
        """End the workers, except persistent ones."""
        batches, self.batches = self.batches, None
        living = self._switch._living
        if batches is not None and (living is None or living.batches is not batches):
            batches.close()

    def __del__(self) -> None:
        self.release()


def switchable(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return a copy of a loader whose attribute ``switch`` can change its settings during an epoch.

    Raises:
        ValueError: This loader must not be changed; the message gives the reason.
    """
    facts = read_loader_facts(loader)
    fixed = why_not_searched(facts)
    if fixed is None and not hasattr(DataLoader, GET_ITERATOR):
        fixed = f"this version of torch has no DataLoader.{GET_ITERATOR}"
    if fixed is not None:
        raise ValueError(fixed)
    made = copy.copy(loader)
    kind = type(loader)
    own = getattr(kind, GET_ITERATOR)

    def get_iterator(self: DataLoader[Any]) -> Any:
        switch = vars(self).get("switch")  # missing on other objects that Lightning created from this class
        return own(self) if switch is None else _Epoch(self, switch)

    # Only one base class, because objects with a mixin as a second base have a different layout.
    made.__class__ = type(kind.__name__, (kind,), {GET_ITERATOR: get_iterator, "__module__": kind.__module__})
    # Without persistent workers, DataLoader.__iter__ requests a new iterator in each epoch.
    vars(made).update(switch=Switch(made, facts), persistent_workers=False)
    return made


def restore(made: DataLoader[Any]) -> None:
    """End the workers of a loader from :func:`switchable`, and restore its original class and settings."""
    switch: Switch = vars(made).pop("switch")
    switch.end()
    made.__class__ = type(made).__bases__[0]
    vars(made).update(asdict(switch.original))
