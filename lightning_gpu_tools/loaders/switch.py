"""A DataLoader whose settings can be changed while it is iterated, without a change in what it delivers."""

from __future__ import annotations

import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader

from lightning_gpu_tools.loaders.dataset_copies import DatasetCopies
from lightning_gpu_tools.loaders.index_source import IndexSource, length_of
from lightning_gpu_tools.loaders.inner_loader import InnerLoader
from lightning_gpu_tools.loaders.random_state import PrivateRandomness
from lightning_gpu_tools.loaders.settings import copy_with, set_settings, settings_of
from lightning_gpu_tools.loaders.worker_probe import WorkerProbe
from lightning_gpu_tools.readings import LoaderSettings


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

    Args:
        loader: For which :func:`~lightning_gpu_tools.loaders.settings.why_fixed` has nothing to say. It stays as it is.
        watched: Whether to measure the workers and to look whether the sampler draws as it goes.
        clock: Seconds.

    Attributes:
        loader: The copy: of the same class, with the same attributes.
        users: The user's own settings.
        settings: Those in use.
        listener: Who wants to know.
        length: How many batches an epoch needs, if that is fewer than the sampler has.
        draws_as_it_goes: Whether the sampler was seen to draw random numbers between batches: then more workers change
            the batches.
        iterated: Whether the copy has been iterated by way of this object at all; a subclass may do it otherwise.
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
        self.draws_as_it_goes = self.iterated = False
        self._original = loader
        self.clock = clock
        self._randomness: PrivateRandomness | None = None
        self._seeds: torch.Generator | None = None
        self._copies = DatasetCopies(loader.dataset)
        self._kept: InnerLoader | None = None
        self._kept_signature: tuple[Any, ...] = ()
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
            epoch.last_s = None

    def close(self) -> None:
        """End all workers and leave the copy as a plain DataLoader with the settings in use."""
        self.listener = None
        vars(self.loader).pop("_get_iterator", None)
        vars(self.loader)["_iterator"] = None
        epoch, self._running = self.epoch, None
        kept, self._kept = self._kept, None
        if kept is not None:
            kept.close()
        if epoch is not None:
            epoch.leave()

    def tell(self, what: Callable[[Listener], None]) -> None:
        """Tell the listener; if there is a fault in it, the loader goes on with the user's own settings and without."""
        if self.listener is None:
            return
        try:
            what(self.listener)
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
        if self._kept is not None and before is not None and not before.source.finished:
            # It may still be iterated, by somebody who had a right to: its workers are not taken away from it.
            self._kept = None
        self._running = None
        epoch = Epoch(self)
        self._running = weakref.ref(epoch)
        return epoch

    def new_source(self) -> IndexSource:
        """Begin an epoch: draw from the random numbers what the user's own settings draw at this moment."""
        self.tell(lambda listener: listener.on_epoch_start())
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

    def open(self, source: IndexSource, settings: LoaderSettings) -> InnerLoader:
        """Start workers; at the start of an epoch those that were kept, if they are the ones that are wanted."""
        kept, self._kept = self._kept, None
        signature = self._copies.signature()
        if kept is not None:
            # Where the user's workers would not have lived on they would see now what has been set in the dataset.
            current = self.users.persistent_workers or signature == self._kept_signature
            if kept.settings == settings and current:
                kept.restart(source)
                self._kept = kept
                return kept
            kept.close()
        assert self._seeds is not None
        trusted = settings == self.users
        inner = InnerLoader(
            self._template(trusted),
            settings,
            source,
            seeds=self._seeds,
            probe=self._probe(settings),
            trusted=trusted,
            # Where the user's own workers draw random numbers, this process draws none.
            randomness=self._randomness if self.users.num_workers else None,
        )
        if settings.persistent_workers:
            self._kept, self._kept_signature = inner, signature
        return inner

    def keeps(self, inner: InnerLoader) -> bool:
        """Return whether these workers are for the next epoch, too."""
        return self._kept is inner

    def forget(self, inner: InnerLoader) -> None:
        """Do not keep workers for the next epoch."""
        if self._kept is inner:
            self._kept = None

    def _template(self, trusted: bool) -> DataLoader[Any]:
        loader = copy_with(self._original, self.users)
        if not trusted:
            vars(loader)["dataset"] = self._copies.make()
        loader.worker_init_fn = self.loader.worker_init_fn  # Lightning sets one for seed_everything(workers=True)
        return loader

    def _probe(self, settings: LoaderSettings) -> WorkerProbe | None:
        if not self.watched or not settings.num_workers:
            return None
        try:
            return WorkerProbe(settings.num_workers)
        except (OSError, RuntimeError):  # no shared memory left: then the loader itself will say so, if it needs any
            return None


class Epoch:
    """One iteration over the loader: a chain of inner loaders, of which all but the newest finish what they began."""

    def __init__(self, switch: Switch) -> None:
        self.last_s: float | None = None
        self._switch = switch
        self._chain: deque[InnerLoader] = deque()
        self._begin()

    def _begin(self) -> None:
        self.last_s = None
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

    def __next__(self) -> Any:
        switch, clock = self._switch, self._switch.clock
        began_s = clock()
        if not switch.users.persistent_workers:
            # Else the DataLoader would take this iterator for the next epoch, too, without asking the switch.
            vars(switch.loader)["_iterator"] = None
        self.source.begin()
        try:
            batch = self._take()
        finally:
            self.source.end()
        now_s = clock()
        if self is switch.epoch and switch.listener is not None:
            switch.draws_as_it_goes |= self.source.draws_as_it_goes
            wait_s, since_last_s = now_s - began_s, None if self.last_s is None else now_s - self.last_s
            switch.tell(lambda listener: listener.on_batch(batch, wait_s, since_last_s))
            now_s = clock()
        self.last_s = now_s
        return batch

    def change(self) -> None:
        """Let the switch's present settings load from the next index on."""
        if self.source.finished or not self._chain:
            return
        before = self._chain[-1]
        self._switch.forget(before)
        self._open()
        before.stop_taking()

    def leave(self) -> None:
        """Let go of all loaders but one whose workers live on."""
        for inner in self._chain:
            if not self._switch.keeps(inner):
                inner.close()
        self._chain.clear()

    def _open(self) -> None:
        settings = self._switch.settings
        try:
            self._chain.append(self._switch.open(self.source, settings))
        except Exception as error:
            if settings == self._switch.users:
                raise
            self._fall_back(settings, error)

    def _take(self) -> Any:
        if not self._chain:
            self._open()
        while True:
            inner = self._chain[0]
            try:
                return next(inner)
            except StopIteration:
                if len(self._chain) == 1 and not self.source.has_ready:
                    raise
                self._chain.popleft()
                self._switch.forget(inner)
                inner.close()
                if not self._chain:  # there is more in the sampler than its length says
                    self._open()
            except Exception as error:
                if inner.settings == self._switch.users:
                    raise
                self._fall_back(inner.settings, error)

    def _fall_back(self, settings: LoaderSettings, error: Exception) -> None:
        """Load everything that is not delivered yet with the user's own settings."""
        switch = self._switch
        self.source.put_back([index for inner in self._chain for index in inner.take_pending()])
        for inner in self._chain:
            switch.forget(inner)
        self.leave()
        switch.settings = switch.users
        set_settings(switch.loader, switch.users)
        self._open()
        switch.tell(lambda listener: listener.on_fault(settings, error))


def _shorter(a: int | None, b: int | None) -> int | None:
    return min((n for n in (a, b) if n is not None), default=None)
