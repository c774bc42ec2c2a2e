"""The training loaders of a run: their settings, the one that training waits for most, its workers and its storage."""

import math
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from torch.utils.data import DataLoader

from lightning_gpu_tools.advice.findings import MIN_SAMPLES
from lightning_gpu_tools.background import SafeReader
from lightning_gpu_tools.host import children_cpu_s
from lightning_gpu_tools.loaders.facts import read_loader_facts
from lightning_gpu_tools.loaders.held import Inside
from lightning_gpu_tools.loaders.settings import settings_of
from lightning_gpu_tools.runs.run import Run
from lightning_gpu_tools.training.cores import LONG_WAIT_S, WorkerWatch, growth_per
from lightning_gpu_tools.training.run_measurements import LoaderFacts, LoaderSettings, LoadingFacts
from lightning_gpu_tools.training.step_clock import StepClock

# Our defaults.
_MUCH_SLOWER = 1.5  # among loaders that take about as long, the first one is followed
_POLL_EVERY_STEPS, _POLL_EVERY_S = 10, 0.05  # of the workers and the loader's settings, which takes 40 us


class RunLoaders:
    """The loaders of a run, one of which is followed.

    ``waits`` counts samples of the training thread while it waited for a batch, by the place of the loader; those of
    ``None`` are of a loader that is not torch's. ``began_cpu_s`` is the CPU time of this process's children so far.
    """

    def __init__(
        self, run: Run, clock: StepClock, waits: Counter[int | None], reader: SafeReader, began_cpu_s: float | None
    ) -> None:
        self._run, self._clock = run, clock
        self.workers = self._watch()
        self._samples = waits
        self._read = reader.read
        self._since = began_cpu_s, 0  # the children's CPU time, and the step, when these settings began
        self._next_poll, self._next_poll_s = 0, 0.0  # step, and time by the clock
        self._all = self._read_settings()
        self._began = WeakKeyDictionary[Any, LoaderFacts]()
        for loader in run.loaders:
            self._read_facts(loader)
        clock.ready_batches = self._ready_batches
        clock.warm_up_steps = max(clock.warm_up_steps, 2 * clock.ready_batches)

    def _watch(self) -> WorkerWatch:
        return WorkerWatch(lambda: self._run.iterator, lambda: self._clock.steps)

    @property
    def settings(self) -> LoaderSettings | None:
        """The settings of the loader that is followed, if it is torch's."""
        return self._all[min(self._run.slowest, len(self._all) - 1)] if self._all else None

    @property
    def _ready_batches(self) -> int:
        """The largest number of batches that the workers of a loader keep ready."""
        return max((one.num_workers * (one.prefetch_factor or 0) for one in self._all if one is not None), default=0)

    def after_step(self) -> None:
        """Sample the workers if it is due, and follow the slowest loader."""
        clock = self._clock
        if clock.last_fetch_s > LONG_WAIT_S:
            self._read("the loader's workers", self.workers.after_long_wait, None)
        if clock.steps >= self._next_poll and clock.since_s >= self._next_poll_s:
            self._next_poll = clock.steps + _POLL_EVERY_STEPS
            self._next_poll_s = clock.since_s + _POLL_EVERY_S
            self._read("the loader's workers", self.workers.after_step, None)
            self._follow()

    def _follow(self) -> None:
        waits = self._waits()
        slowest = self._slowest(waits)
        if slowest is not None and waits[slowest] > _MUCH_SLOWER * waits[self._run.slowest]:
            self._run.slowest = slowest
            pids, self.workers = self.workers.pids, self._watch()
            self.workers.pids = pids
            return
        before, self._all = self._all, self._read_settings()
        if any(self._all) and self._all != before:  # NumWorkersFinder has changed them: only the new ones count
            self._since = self._read("the workers' CPU time", children_cpu_s, None), self._clock.steps
            self._clock.ready_batches = self._ready_batches
            self._clock.begin_anew()

    def poll(self) -> float:
        """Sample the workers, in any thread, and return the seconds until the next poll."""
        return self._read("the loader's workers", self.workers.poll, math.inf)

    def loading(self) -> LoadingFacts:
        """Return the observations of the workers."""
        return self._read("the loader's workers", self.workers.facts, LoadingFacts())

    def worker_cpu_s_per_batch(self, now_cpu_s: float | None, loading: LoadingFacts) -> float | None:
        """Return the workers' CPU time for a batch, given that of all children; ``None`` without workers."""
        settings, clock = self.settings, self._clock
        if settings is None or not settings.num_workers:
            return None
        before_s, before_steps = self._since
        cpu_s = growth_per(max(1, clock.steps - before_steps), before_s, now_cpu_s)
        if cpu_s is None or loading.worker_cores is None:
            return cpu_s
        # Others may be children.
        return min(cpu_s, settings.num_workers * loading.worker_cores * clock.wall_s / max(1, clock.steps))

    def followed(self) -> tuple[LoaderFacts, LoaderFacts, float]:
        """Return the facts about the loader that is followed, at first and now, and its share of the waits."""
        loaders, waits = self._run.loaders, self._waits()
        if not loaders:
            return LoaderFacts(), LoaderFacts(), 1.0
        began, now = self._read_facts(loaders[min(self._run.slowest, len(loaders) - 1)])
        if self._slowest(waits) is not None:
            return began, now, waits[self._run.slowest] / waits.total()
        return replace(began, name=""), replace(now, name=""), 1.0  # it may be another one

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

    def _read_settings(self) -> Sequence[LoaderSettings | None]:
        found: list[LoaderSettings | None] = []
        for loader in (inside.loader for inside in self._run.loaders):
            read = partial(settings_of, loader) if isinstance(loader, DataLoader) else lambda: None
            found.append(self._read("the loader's settings", read, None))
        return found

    def _read_facts(self, one: Inside) -> tuple[LoaderFacts, LoaderFacts]:
        """Return the facts about a loader when they were first read, and now."""
        ranks = self._run.place.world_size
        read = partial(read_loader_facts, one.loader, name=one.name, within=one.within, ranks=ranks)
        began = now = self._read("the loader's dataset", read, LoaderFacts())
        with suppress(TypeError):  # it has no weak references, like a list
            began = self._began.setdefault(one.loader, now) if now.kind else now
        return began, now
