"""A DataLoader whose settings can be changed while it is iterated, without a change in what it delivers."""

from __future__ import annotations

import os
import sys
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader

from lightning_gpu_tools.loaders.contents import Contents, words
from lightning_gpu_tools.loaders.dataset_copies import DatasetCopies, UnshareableError
from lightning_gpu_tools.loaders.index_source import IndexSource, length_of
from lightning_gpu_tools.loaders.inner_loader import InnerLoader
from lightning_gpu_tools.loaders.random_state import PrivateRandomness
from lightning_gpu_tools.loaders.settings import copy_with, set_settings, settings_of
from lightning_gpu_tools.loaders.worker_probe import WorkerProbe
from lightning_gpu_tools.training.run_measurements import LoaderSettings

# Choices: a worker that is being tried and delivers nothing for so long is stuck, unless some batch was waited for so
# long before that this is less than so many times that wait: a batch may take longer where more workers load.
_PATIENCE_S = 30.0
_PATIENCE_IN_WAITS = 20
# A choice: objects to look at between two batches, where a fraction of a millisecond counts.
_WATCHED_OBJECTS = 200


class Listener(Protocol):
    """Who wants to know how a loader does."""

    def on_batch(self, batch: Any, wait_s: float, since_last_s: float | None) -> None:
        """Hear of a batch: how long it was waited for, and the time since the one before it, that wait included.

        The second is ``None`` where it would mean nothing: at the start of an epoch, and after :meth:`Switch.pause`.
        """

    def on_epoch_start(self) -> None:
        """Hear that an epoch begins."""

    def on_fault(self, settings: LoaderSettings, error: Exception) -> None:
        """Hear that settings did not work, and that the user's own are in use again."""


class Switch:
    """Hands on a copy of a DataLoader as :attr:`loader`; its settings are this object's to change at any moment.

    The copy delivers the same batches in the same order whatever the settings are, and leaves the random numbers of
    this process as the user's own settings would have left them: the sampler is asked when they would have asked it
    (:class:`IndexSource`), the seed of the workers is drawn when they would have drawn it. With those settings the
    workers get the same seeds, too. When settings change, the old workers finish what they have begun while the new
    ones start, so nothing is loaded twice and training goes on.

    What fails with settings that are not the user's own is loaded again with the user's own.

    All workers are started and ended here. They end when their settings are no longer in use, when the iteration that
    they load for is over or dropped, and at the latest in :meth:`close`.

    Args:
        loader: For which :func:`~lightning_gpu_tools.loaders.settings.why_fixed` has nothing to say. It stays as it is.
        watched: Whether to measure the workers and to look for an :attr:`obstacle`.
        clock: Seconds.

    Attributes:
        original: The loader as it was given.
        loader: The copy: of the same class, with the same attributes.
        users: The user's own settings.
        settings: Those in use.
        listener: Who wants to know.
        length: How many batches an epoch needs, if that is fewer than the sampler has.
        obstacle: Why other settings would change the batches, as far as that was seen; ``None`` if it was not.
        iterated: Whether the copy has been iterated by way of this object at all; a subclass may do it otherwise.
        as_own_work: Calls a function that does what only the search for settings needs done.
    """

    def __init__(
        self, loader: DataLoader[Any], *, watched: bool = False, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.users = self.settings = settings_of(loader)
        self.loader = copy_with(loader, self.users)
        self.loader._get_iterator = self._get_iterator  # type: ignore[method-assign,assignment]
        self.listener: Listener | None = None
        self.watched = watched
        self.length: int | None = None
        self.obstacle: str | None = None
        self.iterated = False
        self.original = loader
        self.clock = clock
        self.longest_wait_s = 0.0
        self.as_own_work: Callable[..., object] = _call
        self._opened: set[InnerLoader] = set()  # and not ended
        self._randomness: PrivateRandomness | None = None
        self._seeds: torch.Generator | None = None
        self._copies = DatasetCopies(self.loader)
        self._kept: InnerLoader | None = None
        self._kept_contents: Contents | None = None
        self._running: weakref.ref[Epoch] | None = None

    @property
    def epoch(self) -> Epoch | None:
        """The iteration begun last, as long as whoever iterates holds it, as its workers live in torch, too."""
        return None if self._running is None else self._running()

    @property
    def ahead(self) -> int:
        """How many batches the user's own settings load ahead."""
        return self.users.num_workers * (self.users.prefetch_factor or 0)

    @property
    def inner(self) -> InnerLoader | None:
        """The workers that load now; ``None`` before the first epoch."""
        epoch = self.epoch
        return None if epoch is None else epoch.newest

    @property
    def alone_allowed(self) -> bool:
        """Whether the training process may load by itself: with the user's workers, only what they would load."""
        if not self.users.num_workers:
            return True
        if self.loader.worker_init_fn is not None:
            return False
        try:
            self._copies.for_this_process()
        except UnshareableError:
            return False
        return True

    def look_for_obstacles(self) -> None:
        """Look, after some batches have been loaded, whether more workers can be given what the loader holds."""
        if self.users.num_workers < 2:
            try:
                self._copies.for_workers()
            except UnshareableError as error:
                self.obstacle = str(error)

    def end_epoch(self) -> None:
        """Say that the iteration begun last will not go on, even if somebody still holds it."""
        epoch = self.epoch
        if epoch is not None:
            epoch.goes_on = False

    def follow(self, before: Switch) -> None:
        """Go on in the place of another loader: with its settings, or where it has the user's own with one's own."""
        if before.settings != before.users:
            self.use(replace(before.settings, batch_size=self.users.batch_size))

    def use(self, settings: LoaderSettings, *, now: bool = True) -> None:
        """Change the settings from the next index on, or from the next epoch on."""
        if settings == self.settings:
            return
        self.settings = settings
        set_settings(self.loader, settings)
        epoch = self.epoch
        if epoch is not None and now:
            epoch.change()

    def pause(self) -> None:
        """Say that something else than training goes on until the next batch is asked for."""
        epoch = self.epoch
        if epoch is not None:
            epoch.pause()

    def close(self) -> None:
        """End all workers and leave the copy as a plain DataLoader with the settings in use."""
        self.listener = None
        vars(self.loader).pop("_get_iterator", None)
        vars(self.loader).update(vars(copy_with(self.loader, self.settings)))
        epoch, self._running = self.epoch, None
        if epoch is not None:
            epoch.leave()
        for inner in tuple(self._opened):
            self.end(inner)

    def tell(self, what: Callable[[Listener], None]) -> None:
        """Tell the listener; if there is a fault in it, the loader goes on with the user's own settings and without."""
        if self.listener is None:
            return
        call = self.as_own_work if self.watched else _call
        try:
            call(what, self.listener)
        except Exception as error:  # noqa: BLE001 - looking for settings must not end a training
            self.listener = None
            self.use(self.users)
            warnings.warn(
                f"The DataLoader keeps its settings, because of a fault in the search: {error!r}", stacklevel=2
            )

    def _get_iterator(self) -> Epoch:
        """Stand in for ``DataLoader._get_iterator``."""
        self.iterated = True
        before = self.epoch
        if before is not None and before.goes_on and not before.source.finished:
            if not self.users.persistent_workers:
                # Somebody only looks, as at a first batch. Whoever trains still iterates the one before.
                return Epoch(self, aside=True)
            # It may still be iterated, by somebody who had a right to: its workers are not taken away from it.
            self._kept = None
        elif before is not None:
            before.leave()
        self._running = None
        epoch = Epoch(self)
        self._running = weakref.ref(epoch)
        return epoch

    def new_source(self) -> IndexSource:
        """Begin an epoch: draw from the random numbers what the user's own settings draw at this moment."""
        loader, workers = self.loader, self.users.num_workers > 0
        sampler = loader._index_sampler
        indices = iter(sampler)
        if self._seeds is None or not self.users.persistent_workers:
            # As torch does it: the sampler's iterator, the seed, and with workers the sampler's iterator once more.
            generator = loader.generator
            self._seeds = torch.Generator()
            self._seeds.set_state(torch.get_rng_state() if generator is None else generator.get_state())
            seed = int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())
            if workers:
                indices = iter(sampler)
            if self._randomness is None:
                # Far from the workers, which start from seed, seed + 1, ...; torch takes the lower 32 bits.
                self._randomness = PrivateRandomness(seed + 2**31)
        generators = (loader.generator, getattr(loader.sampler, "generator", None))
        return IndexSource(
            indices,
            ahead=self.ahead,
            length=_shorter(length_of(sampler), self.length),
            generators=[generator for generator in generators if isinstance(generator, torch.Generator)],
            watch=self.watched,
        )

    def reopen(self, source: IndexSource) -> InnerLoader | None:
        """Let the workers that were kept load, if there are any; otherwise, or if others are wanted, there are none."""
        kept, self._kept = self._kept, None
        if kept is None:
            return None
        try:
            if kept.settings == self.settings and self._is_current():
                kept.restart(source)
                self._kept = kept
                return kept
        finally:
            if self._kept is None:
                self.end(kept)
        return None

    def open(self, source: IndexSource, settings: LoaderSettings) -> InnerLoader:
        """Start workers, or what loads without any."""
        given = self._given_to(settings)
        assert self._seeds is not None
        trusted = settings == self.users
        template = copy_with(self.loader, self.users)
        vars(template).pop("_get_iterator", None)
        vars(template).update(given)
        inner = InnerLoader(
            template,
            settings,
            source,
            seeds=self._seeds,
            probe=self._probe(settings),
            trusted=trusted,
            patience_s=max(_PATIENCE_S, _PATIENCE_IN_WAITS * self.longest_wait_s),
            # Where the user's own workers draw random numbers, this process draws none.
            randomness=self._randomness if self.users.num_workers else None,
        )
        self._opened.add(inner)
        if settings.persistent_workers:
            self._kept = inner
            self._kept_contents = None if self.users.persistent_workers else Contents(given)
        return inner

    def end(self, inner: InnerLoader) -> None:
        """End the workers that :meth:`open` has started."""
        self.forget(inner)
        # Only the workers of a trial are measured.
        call = _call if inner.probe is None else self.as_own_work
        call(inner.close)
        self._opened.discard(inner)

    def _is_current(self) -> bool:
        """Return whether workers that were kept would load as new ones would, where the user would start new ones."""
        known = self._kept_contents
        if known is None or not known.judged:
            return self.users.persistent_workers
        now = Contents(self._given_to(self.settings))
        return now.judged and now.first_difference(known) is None

    def _given_to(self, settings: LoaderSettings) -> dict[str, Any]:
        """Return the ``dataset`` and ``collate_fn`` from which some settings load.

        Raises:
            UnshareableError: They cannot be given to whoever would load them with these settings.
        """
        if settings.num_workers and self.users.num_workers < 2 and settings != self.users:
            return self._copies.for_workers()
        if self.users.num_workers and not settings.num_workers:
            return self._copies.for_this_process()
        return self._copies.originals

    def keeps(self, inner: InnerLoader) -> bool:
        """Return whether these workers are for the next epoch, too."""
        return self._kept is inner

    def forget(self, inner: InnerLoader) -> None:
        """Do not keep workers for the next epoch."""
        if self._kept is inner:
            self._kept = None

    def _probe(self, settings: LoaderSettings) -> WorkerProbe | None:
        if not self.watched or not settings.num_workers:
            return None
        try:
            return WorkerProbe(settings.num_workers)
        except (OSError, RuntimeError):  # no shared memory left: then the loader itself will say so, if it needs any
            return None


class Epoch:
    """One iteration over the loader: a chain of inner loaders, of which all but the newest finish what they began."""

    def __init__(self, switch: Switch, *, aside: bool = False) -> None:
        self.last_s: float | None = None
        self._chain: deque[InnerLoader] = deque()
        self._home = os.getpid()
        self._switch = switch
        self._aside = aside
        self._contents: Contents | None = None
        self._begin()

    def __del__(self) -> None:
        # A forked process inherits this object, but the workers are not its own.
        if os.getpid() == self._home and not sys.is_finalizing():
            self.leave()

    def _begin(self) -> None:
        self.pause()
        self.goes_on = False
        if not self._aside:
            self._switch.tell(lambda listener: listener.on_epoch_start())
        self.source = self._switch.new_source()
        # Without workers torch does nothing before the first batch is asked for.
        if self._switch.users.num_workers:
            self._open()
            self.source.end()

    def _reset(self, loader: DataLoader[Any], first_iter: bool = False) -> None:
        """Begin another epoch, as torch asks of the iterator of a loader with persistent workers."""
        self.leave()
        self._begin()

    @property
    def newest(self) -> InnerLoader | None:
        """The last one of the chain."""
        return self._chain[-1] if self._chain else None

    def __getattr__(self, name: str) -> Any:
        """Give whoever looks at the workers of a running iteration what torch's iterator has, as ``_workers``."""
        chain = vars(self).get("_chain")
        if not chain:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return chain[0].iterator_attribute(name)

    def __iter__(self) -> Iterator[Any]:
        return self

    def pause(self) -> None:
        """Say that something else than training goes on until the next batch is asked for."""
        self.last_s = self._contents = None

    def __next__(self) -> Any:
        switch, clock = self._switch, self._switch.clock
        stopped_s = clock()
        self._look_for_changes()
        began_s = clock()
        if not switch.users.persistent_workers:
            # Else the DataLoader would take this iterator for the next epoch, too, without asking the switch.
            vars(switch.loader)["_iterator"] = None
        self.goes_on = True
        self.source.begin()
        try:
            batch = self._take()
        finally:
            self.source.end()
        now_s = clock()
        switch.longest_wait_s = max(switch.longest_wait_s, now_s - began_s)
        if self is switch.epoch and switch.listener is not None:
            if self.source.draws_as_it_goes:
                switch.obstacle = (
                    "the sampler draws random numbers as it goes: with other settings the batches would be others"
                )
            wait_s = now_s - began_s
            since_last_s = None if self.last_s is None else stopped_s - self.last_s + wait_s
            switch.tell(lambda listener: listener.on_batch(batch, wait_s, since_last_s))
            self._contents = self._read_from() if switch.watched else None
            now_s = clock()
        self.last_s = now_s
        return batch

    def _look_for_changes(self) -> None:
        """Find out whether training changes what is read: with other settings it would be read at other times."""
        change = None if self._contents is None else self._read_from().first_difference(self._contents)
        if change is not None:
            self._switch.obstacle = (
                f"training changes {words(change)} from one batch to the next, and with other settings it would be "
                "read at other times"
            )

    def _read_from(self) -> Contents:
        loader = self._switch.loader
        roots = {"sampler": loader._index_sampler, "dataset": loader.dataset, "collate_fn": loader.collate_fn}
        return Contents(roots, most=_WATCHED_OBJECTS)

    def change(self) -> None:
        """Let the switch's present settings load from the next index on."""
        if self.source.finished or not self._chain:
            return
        if not self.goes_on:  # nobody may ask for another batch; for who does, new workers are started then
            self.leave()
            return
        before = self._chain[-1]
        self._switch.forget(before)
        self._open()
        before.stop_taking()

    def leave(self) -> None:
        """Let go of all loaders, and end those whose workers do not live on."""
        ended = [inner for inner in self._chain if not self._switch.keeps(inner)]
        if ended:  # for who goes on nevertheless
            self.source.put_back([index for inner in ended for index in inner.take_pending()])
        for inner in ended:
            self._switch.end(inner)
        self._chain.clear()

    def _open(self) -> None:
        switch = self._switch
        settings = switch.users if self._aside else switch.settings
        try:
            kept = None if self._aside or self._chain else switch.reopen(self.source)
            self._chain.append(kept or switch.open(self.source, settings))
        except Exception as error:
            if settings == switch.users:
                raise
            switch.as_own_work(self._fall_back, settings, error)

    def _take(self) -> Any:
        if not self._chain:
            self._open()
        while True:
            inner = self._chain[0]
            try:
                return next(inner)
            except StopIteration:
                if len(self._chain) == 1 and not self.source.has_ready:
                    if not self._switch.keeps(inner):
                        self._switch.end(inner)
                    raise
                self._chain.popleft()
                self._switch.end(inner)
                if not self._chain:  # there is more in the sampler than its length says
                    self.source.length = None
                    self._open()
            except Exception as error:
                if inner.settings == self._switch.users:
                    raise
                self._switch.as_own_work(self._fall_back, inner.settings, error)

    def _fall_back(self, settings: LoaderSettings, error: Exception) -> None:
        """Load everything that is not delivered yet with the user's own settings."""
        switch = self._switch
        for inner in self._chain:
            switch.forget(inner)
        self.leave()
        switch.settings = switch.users
        set_settings(switch.loader, switch.users)
        self._open()
        switch.tell(lambda listener: listener.on_fault(settings, error))


def _call(function: Callable[..., object], *args: object) -> None:
    function(*args)


def _shorter(a: int | None, b: int | None) -> int | None:
    return min((n for n in (a, b) if n is not None), default=None)
