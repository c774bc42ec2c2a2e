"""The training loaders of a run: their settings, the one that training waits for most, and facts about it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Literal
from weakref import WeakKeyDictionary

from torch.utils.data import DataLoader

from lightning_gpu_tools.advice.lines import MIN_SAMPLES
from lightning_gpu_tools.loaders.facts import read_loader_facts
from lightning_gpu_tools.loaders.inside import Inside
from lightning_gpu_tools.loaders.settings import settings_of
from lightning_gpu_tools.runs.run import Run
from lightning_gpu_tools.training.run_measurements import LoaderFacts, LoaderSettings

_MUCH_SLOWER = 1.5  # our default: among loaders that take about as long, the first one is followed


class RunLoaders:
    """The loaders of a run, one of which is followed.

    ``waits`` counts samples of the training thread while it waited for a batch, by the place of the loader; those of
    ``None`` are of a loader that is not torch's. ``fact`` returns a fact by its name, a function, and what to return if
    that raises an error.
    """

    def __init__(
        self, run: Run, waits: Counter[int | None], fact: Callable[[str, Callable[[], Any], Any], Any]
    ) -> None:
        self._run = run
        self._samples = waits
        self._fact = fact
        self._all = self._read_all()
        self._began = WeakKeyDictionary[Any, LoaderFacts]()
        for one in run.loaders:
            self._read(one)

    @property
    def settings(self) -> LoaderSettings | None:
        """The settings of the loader that is followed, if it is torch's."""
        return self._all[min(self._run.slowest, len(self._all) - 1)] if self._all else None

    @property
    def ready_batches(self) -> int:
        """The largest number of batches that the workers of a loader keep ready."""
        return max((one.num_workers * (one.prefetch_factor or 0) for one in self._all if one is not None), default=0)

    def follow(self) -> Literal["another", "changed"] | None:
        """Follow the slowest loader; return whether it is another one than before, or whether settings have changed."""
        waits = self._waits()
        slowest = self._slowest(waits)
        if slowest is not None and waits[slowest] > _MUCH_SLOWER * waits[self._run.slowest]:
            self._run.slowest = slowest
            return "another"
        before, self._all = self._all, self._read_all()
        return "changed" if any(self._all) and self._all != before else None

    def followed(self) -> tuple[LoaderFacts | None, LoaderFacts | None, float]:
        """Return the facts about that loader, at first and now, and its share of the waits."""
        loaders, waits = self._run.loaders, self._waits()
        if not loaders:
            return None, None, 1.0
        began, now = self._read(loaders[min(self._run.slowest, len(loaders) - 1)])
        if len(loaders) == 1:
            return began, now, 1.0
        if self._slowest(waits) is not None:
            return began, now, waits[self._run.slowest] / waits.total()
        return began and replace(began, name=""), now and replace(now, name=""), 1.0  # it may be another one

    def _waits(self) -> Counter[int]:
        others = [place for place, one in enumerate(self._run.loaders) if not isinstance(one.loader, DataLoader)]
        waits = Counter[int]()
        for place, samples in self._samples.copy().items():
            if place is not None or len(others) == 1:
                waits[others[0] if place is None else place] += samples
        return waits

    def _slowest(self, waits: Counter[int]) -> int | None:
        """Return the place of the loader that training waits for most; ``None`` if that is not known."""
        return max(waits, key=waits.__getitem__) if waits.total() >= MIN_SAMPLES else None

    def _read_all(self) -> Sequence[LoaderSettings | None]:
        loaders = [one.loader for one in self._run.loaders]
        return [self._fact("the loader's settings", partial(_settings, one), None) for one in loaders]

    def _read(self, one: Inside) -> tuple[LoaderFacts | None, LoaderFacts | None]:
        """Return the facts about a loader when they were first read, and now."""
        ranks = self._run.place.world_size
        read = partial(read_loader_facts, one.loader, name=one.name, within=one.within, ranks=ranks)
        began = now = self._fact("the loader's dataset", read, None)
        with suppress(TypeError):  # it has no weak references, like a list
            began = now and self._began.setdefault(one.loader, now)
        return began, now


def _settings(loader: object) -> LoaderSettings | None:
    return settings_of(loader) if isinstance(loader, DataLoader) else None
