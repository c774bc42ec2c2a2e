"""Changes the settings of a DataLoader while it is iterated: same batches, same order, same random numbers.

The loader in use gets no more indices and delivers what it has begun. Then a plain DataLoader with the new settings
takes the remaining indices of the same sampler iterator. Later epochs are plain DataLoaders with the new settings.
"""

from __future__ import annotations

import copy
import functools
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils.data import DataLoader

from lightning_gpu_tools.loaders.contents import NotCopyableError, fingerprint
from lightning_gpu_tools.loaders.plan import Step
from lightning_gpu_tools.loaders.random_state import (
    PrivateRandomness,
    draw_seed,
    peek_seed,
    random_states,
    same_states,
)
from lightning_gpu_tools.loaders.settings import GET_ITERATOR, plain_loader, settings_of, why_fixed
from lightning_gpu_tools.loaders.trial import in_one_line
from lightning_gpu_tools.loaders.workers import Batches
from lightning_gpu_tools.training.run_measurements import LoaderSettings

# Workers that are not the user's own are given up if no batch comes for as long. Our default: no sample takes minutes.
MAX_BATCH_S = 120.0


class _Source:
    """The indices of one epoch: each is taken once, whoever delivers its batch."""

    def __init__(self, sampler: Any) -> None:
        self.drew_late = False
        self.watched = False
        self._sampler = sampler
        self._indices: Iterator[Any] = iter(())
        self._ready: deque[Any] = deque()
        self._taken = 0

    def start(self) -> None:
        """Ask the sampler for its iterator, which may draw random numbers."""
        self._indices = iter(self._sampler)
        self._ready.clear()
        self._taken = 0

    def has_more(self) -> bool:
        """Return whether there is another index; it is taken from the sampler for that."""
        if not self._ready:
            before = random_states() if self.watched and self._taken else None
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
    """The sampler of one plain DataLoader: what is left of a source, until it is closed."""

    def __init__(self, source: _Source, *, starts: bool) -> None:
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


class Switch:
    """What the epochs of one loader share; its settings are changed here.

    Args:
        loader: The user's loader.

    Attributes:
        original: The settings that it came with.
        chosen: The settings that it was given here; ``None`` = none so far.
        fault: Why settings that were given here were given up; ``None`` if they were not.
        moved_draws: Whether random numbers that the dataset draws now come from other processes than before.
        log: Takes the times of each step, if there is one.
        shown_by: The loader whose attributes show the settings in use.
        begun: Whether it was ever iterated.
        as_own_work: Ends workers in the middle of a fetch; whoever times the fetch can put in a function that counts
            this apart.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.original = settings_of(loader)
        self.chosen: LoaderSettings | None = None
        self.fault: str | None = None
        self.moved_draws = self.begun = False
        self.log: list[Step] | None = None
        self.shown_by: Callable[[], DataLoader[Any] | None] = lambda: None
        self.as_own_work: Callable[[Callable[[], object]], object] = lambda end: end()
        self._dataset = loader.dataset
        self._before: int | str | None = None
        self._drew = False
        self._watched = True
        self._ended = False
        self._epochs: weakref.WeakSet[_Epoch] = weakref.WeakSet()
        # Workers that live on between epochs: those of the original settings, and those of the settings chosen, with
        # what their dataset holds.
        self._own: tuple[Batches, _Rest] | None = None
        self._idle: tuple[Batches, _Rest, int | str | None] | None = None
        self._seeds = torch.Generator()
        self._randomness: PrivateRandomness | None = None

    @property
    def in_use(self) -> LoaderSettings:
        """The settings that the next batches are loaded with."""
        return self.chosen or self.original

    def obstacle(self) -> str | None:
        """Return why the settings had better not be changed, as far as the batches so far show; ends the watch."""
        self._watched = False
        if any(epoch.source.drew_late for epoch in self._epochs):
            return "its sampler draws random numbers during the epoch, which other workers would ask for earlier"
        after = self._contents()
        if isinstance(after, str):
            return f"worker processes cannot have copies of its dataset ({after})"
        if after != self._before:
            return (
                "its dataset changes while it is used (a cache, or a random generator of its own), which copies in "
                "worker processes would each do by themselves"
            )
        return None

    def use(self, settings: LoaderSettings) -> None:
        """Load with other settings from the next batch on that nobody loads yet."""
        self.moved_draws = self._drew and settings.num_workers > 0
        self._drop_idle()
        own, self._own = self._own, None
        if own is not None and not any(epoch.loads_with(own[0]) for epoch in self._epochs):
            own[0].close()
        self.chosen = settings
        loader = self.shown_by()
        if loader is not None:
            vars(loader).update(
                num_workers=settings.num_workers,
                prefetch_factor=settings.prefetch_factor,
                pin_memory=settings.pin_memory,
            )
        for epoch in self._epochs:
            epoch.close_rest()

    def end(self) -> None:
        """End all workers."""
        self._ended = True
        for epoch in list(self._epochs):
            epoch.release()
        self._drop_idle()
        if self._own is not None:
            self._own[0].close()
            self._own = None

    def begin_watch(self) -> None:
        """Take down what the dataset holds before the first batch of an epoch, as long as it is of interest."""
        if self._watched:
            self._before = self._contents()

    def _contents(self) -> int | str:
        try:
            return fingerprint(self._dataset)
        except NotCopyableError as error:
            return str(error)

    def _drop_idle(self) -> None:
        if self._idle is not None:
            self._idle[0].close()
            self._idle = None


class _Epoch:
    """The iterator that training gets. It starts workers and ends them; no reference cycle may hold it."""

    def __init__(self, loader: DataLoader[Any], switch: Switch) -> None:
        self._loader, self._switch = loader, switch
        self._settings = switch.in_use
        self._batches: Batches | None = None
        self._rest: _Rest | None = None
        self._contents: int | str | None = None  # of the dataset, when workers that live on were started
        self._asked = self._got = 0.0, 0.0  # when, and after how many CPU seconds; without what the watch takes
        sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        original = switch.original
        # torch draws a seed for each new iterator; persistent workers keep theirs.
        new = not (original.persistent_workers and switch.begun)
        switch.begun = True
        switch._epochs.add(self)
        if switch.chosen is None:
            self._begin_as_torch(sampler, new)
            return
        # What torch does with the original settings is done here. The new workers start at the first batch, when
        # Lightning has dropped the last epoch's iterator.
        self.source = _Source(sampler)
        self.source.start()
        if new:
            switch._seeds.manual_seed(draw_seed(loader.generator))
            if original.num_workers:
                self.source.start()
        if original.num_workers:
            self.source.has_more()

    def _begin_as_torch(self, sampler: Any, new: bool) -> None:
        """Let torch itself start the sampler and draw the seed."""
        switch = self._switch
        if new:
            switch._seeds.manual_seed(peek_seed(self._loader.generator))
        if switch._own is not None:
            self._batches, self._rest = switch._own
            self.source = self._rest.source
            self._rest.under_way.clear()
            self._batches.restart()
            return
        self.source = _Source(sampler)
        self.source.watched = switch._watched
        self._rest = _Rest(self.source, starts=True)
        inner = plain_loader(
            self._loader, self._settings, self._rest, generator=self._loader.generator, **_extras(self._loader)
        )
        self._batches = Batches(inner, trusted=True)
        if self._settings.persistent_workers:
            switch._own = self._batches, self._rest

    def __iter__(self) -> _Epoch:
        return self

    def __getattr__(self, name: str) -> Any:
        # Who watches a loader's workers finds them at torch's iterator.
        batches = vars(self).get("_batches")
        if batches is None or batches.iterator is None:
            raise AttributeError(name)
        return getattr(batches.iterator, name)

    def __next__(self) -> Any:
        log, first = self._switch.log, not self._asked[0]
        if log is not None and self._got[0]:
            now_s, now_cpu_s = time.perf_counter(), time.process_time()
            (asked_s, asked_cpu_s), (got_s, got_cpu_s) = self._asked, self._got
            log.append(Step(got_s - asked_s, got_cpu_s - asked_cpu_s, now_s - got_s, now_cpu_s - got_cpu_s))
        if first:
            self._switch.begin_watch()
        batch = self._next()
        if first or log is None:  # the first fetch waits for the workers to start: that is no step like the others
            self._got = 0.0, 0.0
        return batch

    def _next(self) -> Any:
        try:
            if self._batches is None:
                self._open()
            return self._fetch()
        except StopIteration:
            if self._rest is None or not (self._rest.closed and self.source.has_more()):
                raise
            self._switch.as_own_work(self.release)  # drained
        except Exception as error:
            if self._settings == self._switch.original:
                raise
            self._fall_back(error)
        return self._next()

    def _open(self) -> None:
        switch = self._switch
        settings = self._settings = switch.in_use
        idle, switch._idle = switch._idle, None
        if idle is not None:
            batches, rest, contents = idle
            # Workers that live on have not learned what changed in the dataset since they were started.
            if contents is None or contents == switch._contents():
                rest.source, rest.closed = self.source, False
                rest.under_way.clear()
                batches.restart()
                self._batches, self._rest, self._contents = batches, rest, contents
                return
            batches.close()
        self._contents = None
        if settings.persistent_workers and not switch.original.persistent_workers:
            self._contents = switch._contents()
        self._rest = _Rest(self.source, starts=False)
        trusted = settings == switch.original
        limit = {} if trusted else {"timeout": self._loader.timeout or MAX_BATCH_S}
        options = {**_extras(self._loader), **limit, "generator": switch._seeds}
        self._batches = Batches(plain_loader(self._loader, settings, self._rest, **options), trusted=trusted)

    def _fetch(self) -> Any:
        switch, settings = self._switch, self._settings
        assert self._batches is not None
        assert self._rest is not None
        watched = switch._watched and not settings.num_workers and not switch._drew and self.source.has_more()
        before = random_states() if watched else None  # what the sampler draws for this batch is drawn before
        with self._randomness():
            self._asked = time.perf_counter(), time.process_time()
            batch = next(self._batches)
            self._got = time.perf_counter(), time.process_time()
        if before is not None:
            switch._drew |= not same_states(before, random_states())
        self._rest.under_way.popleft()
        return batch

    def _randomness(self) -> Any:
        """Return where random numbers come from that were drawn in workers, and are drawn here now."""
        switch = self._switch
        if self._settings.num_workers or not switch.original.num_workers:
            return nullcontext()
        if switch._randomness is None:
            switch._randomness = PrivateRandomness(switch._seeds.initial_seed())
        return switch._randomness()

    def _fall_back(self, error: Exception) -> None:
        """Go back to the original settings; what was under way is loaded again."""
        switch = self._switch
        if self._rest is not None:
            self.source.give_back(self._rest.under_way)
            self._rest.under_way = deque()
        if self._batches is not None:
            switch.as_own_work(functools.partial(self._batches.close, 0.0))
            self._batches = None
        if switch.fault is None:
            switch.fault = in_one_line(error)
            warnings.warn(
                f"Loading with num_workers={self._settings.num_workers} failed ({switch.fault}). The original settings "
                f"are back: num_workers={switch.original.num_workers}. No batch is lost.",
                stacklevel=2,
            )
        if switch.chosen != switch.original:
            switch.use(switch.original)
        self._settings = switch.original

    def loads_with(self, batches: Batches) -> bool:
        """Return whether these are its batches."""
        return self._batches is batches

    def close_rest(self) -> None:
        """Take no more indices for the loader in use."""
        if self._rest is not None:
            self._rest.closed = True

    def release(self) -> None:
        """End the workers, or keep persistent ones for the next epoch."""
        batches, self._batches = self._batches, None
        switch = self._switch
        if batches is None or (switch._own is not None and switch._own[0] is batches):
            return
        lives_on = self._settings.persistent_workers and self._settings == switch.chosen and not switch._ended
        if lives_on and switch._idle is None and self._rest is not None:
            switch._idle = batches, self._rest, self._contents
        else:
            batches.close()

    def __del__(self) -> None:
        if hasattr(self, "_switch"):
            self.release()


def _extras(loader: DataLoader[Any]) -> dict[str, Any]:
    return {"pin_memory_device": device} if (device := getattr(loader, "pin_memory_device", "")) else {}


def switchable(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return a copy of a loader whose settings can be changed in mid-epoch, by its attribute ``switch``.

    Raises:
        ValueError: This loader has to be left alone; the message says why.
    """
    fixed = why_fixed(loader)
    if fixed is not None:
        raise ValueError(fixed)
    made = copy.copy(loader)
    kind = type(loader)
    own = getattr(kind, GET_ITERATOR)

    def get_iterator(self: DataLoader[Any]) -> Any:
        switch = vars(self).get("switch")  # Lightning may have made another object of this class
        return own(self) if switch is None else _Epoch(self, switch)

    # One base only: with a mixin as a second one, objects have another layout.
    made.__class__ = type(kind.__name__, (kind,), {GET_ITERATOR: get_iterator, "__module__": kind.__module__})
    switch = Switch(loader)
    switch.shown_by = weakref.ref(made)
    # Without persistent workers DataLoader.__iter__ asks for an iterator in each epoch.
    vars(made).update(switch=switch, persistent_workers=False)
    return made


def restore(made: DataLoader[Any]) -> None:
    """Turn what :func:`switchable` returned into a loader like the user's, with no workers left."""
    switch: Switch = vars(made).pop("switch")
    switch.end()
    made.__class__ = type(made).__bases__[0]
    original = switch.original
    vars(made).update(
        num_workers=original.num_workers,
        prefetch_factor=original.prefetch_factor,
        persistent_workers=original.persistent_workers,
        pin_memory=original.pin_memory,
    )
