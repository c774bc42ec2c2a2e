"""Trials of a loader's settings while training stands still: plain DataLoaders, and a stand-in for the step.

Everything is loaded in worker processes, which have copies of the dataset. So nothing reaches the training process: not
a random number, not a changed dataset, and no item that hangs.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from lightning_gpu_tools.advice.loader_plan import LoadCost
from lightning_gpu_tools.advice.loader_trials import LoaderTrial
from lightning_gpu_tools.host import private_memory_bytes
from lightning_gpu_tools.loaders.plan import StepCost
from lightning_gpu_tools.loaders.settings import batch_bytes, plain_loader
from lightning_gpu_tools.loaders.workers import Batches
from lightning_gpu_tools.training.run_measurements import LoaderSettings
from lightning_gpu_tools.units import printable

# How many batches the sampler is asked for: a search loads a few hundred.
_MAX_INDICES = 1024
_MAX_SAMPLING_S = 1.0
# The cost of a batch is the mean over at least 4 of them; 24 show a slow one in ten. Part of the budget for it.
_PROBED, _MIN_PROBED, _PROBE_SHARE = 24, 4, 0.1
# A trial measures at least 24 batches in 0.4 s, and goes on until its mean is known to 2 %. One that is certainly
# slower than the best ends after 8.
_MIN_BATCHES, _MIN_SECONDS, _PRECISION, _FIRST_BATCHES = 24, 0.4, 0.02, 8
_TRIAL_SHARE = 0.12  # of the budget, at most; a search makes about eight trials
_HOPELESS = 1.1
_CHUNK = bytes(1 << 16)  # hashlib lets other threads run from 2 KiB on
# A trial that is over does not wait for items that are still loaded.
_GRACE_S = 0.5
# What it takes to end workers that hang is part of the budget.
_RESERVE_S, _RESERVE_SHARE = 1.0, 0.2


class NoTimeError(Exception):
    """The budget is used up."""

    def __str__(self) -> str:
        return "no time was left"


class TrialSetup:
    """A loader, the indices of batches to load from it, and the step that follows each batch.

    Args:
        loader: The loader. It stays as it is; so do its sampler and its generator.
        step: What a step takes.
        budget_s: How long all trials may take together, in seconds.
        tick: Called between batches.

    Raises:
        Exception: The sampler cannot be copied, or fails.
    """

    def __init__(
        self, loader: DataLoader[Any], step: StepCost, budget_s: float, tick: Callable[[], None] = lambda: None
    ) -> None:
        self.loader = loader
        self.step = step
        self.budget_s = budget_s
        self.ends_s = time.perf_counter() + budget_s
        self._tick = tick
        self._seeds = torch.Generator().manual_seed(0)
        indices = _sample_indices(loader)
        order = torch.randperm(len(indices), generator=self._seeds).tolist()
        self.indices = itertools.cycle([indices[i] for i in order])
        self.batch_count = len(indices)

    @property
    def left_s(self) -> float:
        """How much of the budget is left, without what it takes to end workers that hang."""
        return self.ends_s - time.perf_counter() - min(_RESERVE_S, _RESERVE_SHARE * self.budget_s)

    def _open(self, settings: LoaderSettings, **options: Any) -> Batches:
        if self.left_s <= 0:
            raise NoTimeError
        settings = replace(settings, persistent_workers=False, pin_memory=False)
        timeout = min(self.left_s, self.loader.timeout or self.left_s)
        return Batches(
            plain_loader(
                self.loader, settings, _Endless(self.indices), generator=self._seeds, timeout=timeout, **options
            )
        )

    def probe(self) -> tuple[LoadCost, float]:
        """Return what a batch costs one worker, and how long that took to start.

        Raises:
            Exception: Whatever the dataset raises in a worker.
        """
        began_s = time.perf_counter()
        times: list[tuple[float, float, int]] = []
        one = LoaderSettings(num_workers=1, prefetch_factor=2, persistent_workers=False, pin_memory=False)
        batches = self._open(one, dataset=_Timed(self.loader), collate_fn=_as_it_is)
        try:
            next(batches)  # with what an item does only once in a process
            start_s = time.perf_counter() - began_s
            ends_s = time.perf_counter() + _PROBE_SHARE * self.budget_s
            while len(times) < _PROBED and (len(times) < _MIN_PROBED or time.perf_counter() < ends_s):
                times.append(next(batches))
                self._tick()
            worker_bytes = private_memory_bytes([worker.pid for worker in batches.workers if worker.pid])
        except BaseException:  # Ctrl-C, too: the workers must not outlive the search
            batches.close(0.0)
            raise
        batches.close(_GRACE_S)
        wall_s = sorted(one[0] for one in times)
        typical_s = statistics.median(wall_s)
        cost = LoadCost(
            wall_s=statistics.mean(wall_s),
            cpu_s=statistics.mean(one[1] for one in times),
            batch_bytes=max(one[2] for one in times) or None,
            spread=wall_s[-1 - len(wall_s) // 20] / typical_s if typical_s > 0 else None,
            worker_bytes=worker_bytes,
        )
        return cost, max(0.0, start_s - cost.wall_s)

    def run(self, settings: LoaderSettings, best_s: float) -> LoaderTrial:
        """Return what some settings with workers reach; it ends early if that is certainly less than the best so far.

        Args:
            settings: The settings.
            best_s: Seconds from batch to batch with the best settings so far.
        """
        began_s = time.perf_counter()
        batches = None
        passed: list[float] = []
        waits: list[float] = []
        start_s = None
        failed = None
        try:
            batches = self._open(settings)
            next(batches)
            start_s = time.perf_counter() - began_s
            for _ in range(settings.num_workers * (1 + (settings.prefetch_factor or 0)) + 2):
                self._one_step(batches)
            measured_s = time.perf_counter()
            ends_s = measured_s + _TRIAL_SHARE * self.budget_s
            while not _is_enough(passed, best_s, time.perf_counter() - measured_s):
                wait_s, step_s = self._one_step(batches)
                waits.append(wait_s)
                passed.append(wait_s + step_s)
                if time.perf_counter() > ends_s or (self.left_s <= 0 and len(passed) >= _FIRST_BATCHES):
                    break
        except NoTimeError:
            passed = passed if len(passed) >= _FIRST_BATCHES else []
        except Exception as error:  # noqa: BLE001 - anybody's dataset: what fails here is not used in the training
            failed = in_one_line(error)
        finally:
            if batches is not None:
                batches.close(_GRACE_S if failed is None else 0.0)
        return LoaderTrial(
            settings=settings,
            batch_s=statistics.mean(passed) if passed and failed is None else None,
            batches=len(passed),
            seconds=time.perf_counter() - began_s,
            wait_s=statistics.mean(waits) if waits else 0.0,
            start_s=start_s,
            failed=failed,
        )

    def expected_s(self, settings: LoaderSettings, cost: LoadCost, start_s: float, cores: float) -> float:
        """Return how long a trial takes until its first batches are measured."""
        workers = settings.num_workers
        batch_s = max(self.step.wall_s, cost.wall_s / workers)
        ramp_up = workers * (1 + (settings.prefetch_factor or 0)) + _FIRST_BATCHES
        return start_s * max(1.0, workers / cores) + cost.wall_s + ramp_up * batch_s

    def _one_step(self, batches: Batches) -> tuple[float, float]:
        if self.left_s <= 0:
            raise NoTimeError
        began_s = time.perf_counter()
        next(batches)
        loaded_s = time.perf_counter()
        self._tick()
        stand_in(self.step)
        return loaded_s - began_s, time.perf_counter() - loaded_s


def in_one_line(error: Exception) -> str:
    """Return what went wrong; of an error from a worker, the last line of its traceback there."""
    return printable(f"{type(error).__name__}: {error}".strip().splitlines()[-1], max_length=200)


def _is_enough(passed: Sequence[float], best_s: float, seconds: float) -> bool:
    count = len(passed)
    if count < _FIRST_BATCHES:
        return False
    mean_s, error_s = statistics.mean(passed), statistics.stdev(passed) / count**0.5
    if mean_s - 2 * error_s > _HOPELESS * best_s:
        return True
    return count >= _MIN_BATCHES and seconds >= _MIN_SECONDS and error_s <= _PRECISION * mean_s


def stand_in(step: StepCost) -> None:
    """Take the wall time of a step and, for one that computes on the CPU, its CPU time.

    A step that sleeps leaves its cores to the workers: for steps on the CPU its predictions are 26 % too fast, on
    average over 30 cases, and those of one that computes 3 %.
    """
    ends_s = time.perf_counter() + step.wall_s
    if step.threads:
        others = [threading.Thread(target=_burn, args=(step.cpu_s / step.threads,)) for _ in range(step.threads - 1)]
        for thread in others:
            thread.start()
        _burn(step.cpu_s / step.threads)
        for thread in others:
            thread.join()
    time.sleep(max(0.0, ends_s - time.perf_counter()))


def _burn(cpu_s: float) -> None:
    ends_s = time.thread_time() + cpu_s
    while time.thread_time() < ends_s:
        hashlib.sha256(_CHUNK).digest()


def _sample_indices(loader: DataLoader[Any]) -> list[Any]:
    """Return what a copy of the loader's sampler yields, as it would in an epoch of its own."""
    sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    memo = {id(loader.dataset): loader.dataset}  # which samplers hold, too
    ends_s = time.perf_counter() + _MAX_SAMPLING_S
    found = []
    for index in itertools.islice(copy.deepcopy(sampler, memo), _MAX_INDICES):
        found.append(index)
        if time.perf_counter() > ends_s:
            break
    return found


class _Endless:
    """A sampler whose iterations go on where the last one stood."""

    def __init__(self, indices: Iterator[Any]) -> None:
        self._indices = indices

    def __iter__(self) -> Iterator[Any]:
        return self._indices


class _Timed(Dataset[Any]):
    """A dataset whose items are the costs of batches: wall seconds, CPU seconds, bytes.

    A ``worker_init_fn`` finds it in the place of the dataset, so whatever is asked of it goes to that.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        vars(self).update(
            _dataset=loader.dataset, _collate=loader.collate_fn, _batched=loader.batch_sampler is not None
        )

    def __reduce__(self) -> Any:
        return _timed_from, (dict(vars(self)),)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_dataset"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._dataset, name, value)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, indices: Any) -> tuple[float, float, int]:
        return self[indices]

    def __getitem__(self, indices: Any) -> tuple[float, float, int]:
        dataset = self._dataset
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        if not self._batched:
            loaded = dataset[indices]
        elif hasattr(dataset, "__getitems__"):
            loaded = dataset.__getitems__(indices)
        else:
            loaded = [dataset[index] for index in indices]
        size = batch_bytes(self._collate(loaded))
        return time.perf_counter() - wall_s, time.process_time() - cpu_s, size


def _timed_from(state: dict[str, Any]) -> _Timed:
    timed = object.__new__(_Timed)
    vars(timed).update(state)
    return timed


def _as_it_is(batch: Any) -> Any:
    return batch
