"""Trials of a loader's settings while training stands still: plain DataLoaders, and a stand-in for the step.

All is loaded in worker processes with copies of the dataset. So nothing reaches the training process: not a random
number, not a changed dataset, and no item that hangs.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import DataLoader

from lightning_gpu_tools.advice.failures import without_index
from lightning_gpu_tools.advice.loader_plan import LoadCost
from lightning_gpu_tools.advice.loader_trials import LoaderTrial
from lightning_gpu_tools.host import private_memory_bytes
from lightning_gpu_tools.loaders.plan import StepCost
from lightning_gpu_tools.loaders.settings import batch_bytes, plain_loader
from lightning_gpu_tools.loaders.workers import Batches
from lightning_gpu_tools.training.run_measurements import LoaderSettings
from lightning_gpu_tools.units import printable

_MAX_INDICES = 1024  # of the sampler; a search loads a few hundred batches
_MAX_SAMPLING_S = 1.0
# The cost of a batch is the mean over 4 to 24 of them, within this share of the budget; 24 show a slow one in ten.
# Where they come fast, 60 show a slow one in twenty.
_MIN_PROBED, _PROBED, _PROBE_SHARE = 4, 24, 0.1
_MAX_PROBED, _PROBED_FAST_S = 60, 1.2
# A trial measures at least 24 batches in 0.4 s, until its mean is known to 2 %. One that is certainly 10 % slower than
# the best ends after 8.
_MIN_BATCHES, _MIN_SECONDS, _PRECISION = 24, 0.4, 0.02
_HOPELESS, _FIRST_BATCHES = 1.1, 8
_TRIAL_SHARE = 0.12  # of the budget, at most; a search makes about eight trials
_CHUNK = bytes(1 << 16)  # hashlib lets other threads run from 2 KiB on
_GRACE_S = 0.5  # for items that are still being loaded when a trial is over
# The part of the budget for ending workers that hang.
_RESERVE_S, _RESERVE_SHARE = 1.0, 0.2
_MIN_TIMEOUT_S = 0.001  # torch takes zero for none


class Trials:
    """A loader, the indices of batches to load from it, and the step that follows each batch.

    The loader, its sampler and its generator stay as they are. The budget is for all trials together.

    Raises:
        Exception: The sampler cannot be copied, or fails, or has no batches.
    """

    def __init__(self, loader: DataLoader[Any], step: StepCost, budget_s: float) -> None:
        self._loader = loader
        self._step = step
        self._budget_s = budget_s
        self._ends_s = time.perf_counter() + budget_s
        self._seeds = torch.Generator().manual_seed(0)
        indices = _sample_indices(loader)
        if not indices:
            raise ValueError("it has no batches")
        order = torch.randperm(len(indices), generator=self._seeds).tolist()
        self._indices = itertools.cycle([indices[i] for i in order])

    @property
    def left_s(self) -> float:
        """How much of the budget is left for loading."""
        return self._ends_s - time.perf_counter() - min(_RESERVE_S, _RESERVE_SHARE * self._budget_s)

    @contextmanager
    def _open(self, settings: LoaderSettings, **options: Any) -> Iterator[Batches]:
        settings = replace(settings, persistent_workers=False, pin_memory=False)
        timeout = max(_MIN_TIMEOUT_S, min(self.left_s, self._loader.timeout or self.left_s))
        options |= {"generator": self._seeds, "timeout": timeout}
        batches, grace_s = Batches(plain_loader(self._loader, settings, self._indices, **options)), 0.0
        try:
            yield batches
            grace_s = _GRACE_S
        finally:  # also after Ctrl-C: no worker must outlive the search
            batches.close(grace_s)

    def probe(self) -> tuple[LoadCost, float]:
        """Return what a batch costs one worker, and how many seconds that took to start; the dataset may fail."""
        began_s = time.perf_counter()
        # The worker gets all indices at once, so that it never waits for this process.
        one = LoaderSettings(num_workers=1, prefetch_factor=_MAX_PROBED + 2, persistent_workers=False, pin_memory=False)
        with self._open(one, collate_fn=_ReadyAt(self._loader.collate_fn)) as batches:
            next(batches)  # with what an item does only once in a process, and the queue behind it
            start_s = time.perf_counter() - began_s
            ready, began_probe_s = [next(batches)], time.perf_counter()
            while self._probes_on(len(ready) - 1, time.perf_counter() - began_probe_s):
                ready.append(next(batches))
            worker_sizes = private_memory_bytes([worker.pid for worker in batches.workers if worker.pid])
        times_s, cpu_s, sizes = zip(*ready, strict=True)
        wall_s = [later_s - one_s for one_s, later_s in itertools.pairwise(times_s)]
        mean_s, typical_s = statistics.mean(wall_s), statistics.median(wall_s)
        cost = LoadCost(
            wall_s=mean_s,
            cpu_s=(cpu_s[-1] - cpu_s[0]) / len(wall_s),
            batch_bytes=max(sizes) or None,
            spread=mean_s / typical_s if typical_s > 0 else None,
            worker_bytes=max(worker_sizes, default=None),
        )
        return cost, max(0.0, start_s - mean_s)

    def _probes_on(self, count: int, seconds: float) -> bool:
        most = _MAX_PROBED if seconds < _PROBED_FAST_S else _PROBED
        return count < _MIN_PROBED or (count < most and seconds < _PROBE_SHARE * self._budget_s)

    def run(self, settings: LoaderSettings, best_s: float) -> LoaderTrial:
        """Return what these settings reach; ends early if they are hopeless beside the best seconds a batch so far."""
        began_s = time.perf_counter()
        start_s = failed = None
        waits: list[float] = []
        passed: list[float] = []
        try:
            with self._open(settings) as batches:
                next(batches)
                start_s = time.perf_counter() - began_s
                steps = self._steps(batches)
                for _ in itertools.islice(steps, settings.num_workers * (1 + (settings.prefetch_factor or 0)) + 2):
                    pass
                for wait_s, step_s in steps:
                    waits.append(wait_s)
                    passed.append(wait_s + step_s)
                    if len(passed) % _FIRST_BATCHES == 0 and self._is_enough(passed, best_s):
                        break
        except Exception as error:  # noqa: BLE001 - anybody's dataset: what fails here is not used in the training
            failed = in_one_line(error)
        measured = failed is None and len(passed) >= _FIRST_BATCHES
        return LoaderTrial(
            settings=settings,
            batch_s=statistics.mean(passed) if measured else None,
            batches=len(passed),
            seconds=time.perf_counter() - began_s,
            wait_s=statistics.mean(waits) if measured else 0.0,
            start_s=start_s,
            failed=failed,
        )

    def expected_s(self, settings: LoaderSettings, cost: LoadCost, start_s: float, cores: float) -> float:
        """Return how long a trial takes until its first batches are measured."""
        workers = settings.num_workers
        batch_s = max(self._step.wall_s, cost.wall_s / workers)
        ramp_up = workers * (1 + (settings.prefetch_factor or 0)) + _FIRST_BATCHES
        return start_s * max(1.0, workers / cores) + cost.wall_s + ramp_up * batch_s

    def _steps(self, batches: Batches) -> Iterator[tuple[float, float]]:
        """Yield the wait for each batch and the time of its step, as long as there is time."""
        while self.left_s > 0:
            began_s = time.perf_counter()
            next(batches)
            loaded_s = time.perf_counter()
            stand_in(self._step)
            yield loaded_s - began_s, time.perf_counter() - loaded_s

    def _is_enough(self, passed: Sequence[float], best_s: float) -> bool:
        count, seconds = len(passed), sum(passed)
        mean_s, error_s = seconds / count, statistics.stdev(passed) / count**0.5
        if mean_s - 2 * error_s > _HOPELESS * best_s or seconds > _TRIAL_SHARE * self._budget_s:
            return True
        return count >= _MIN_BATCHES and seconds >= _MIN_SECONDS and error_s <= _PRECISION * mean_s


class _ReadyAt:
    """A collate function that returns, instead of the batch, when it was ready, the worker's CPU seconds, its size."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate

    def __call__(self, samples: Any) -> tuple[float, float, int]:
        size = batch_bytes(self._collate(samples))
        return time.perf_counter(), time.process_time(), size


def in_one_line(error: Exception) -> str:
    """Return an error as text; of one from a worker, the last line of its traceback."""
    return printable(without_index(f"{type(error).__name__}: {error}").strip().splitlines()[-1], max_length=200)


def stand_in(step: StepCost) -> None:
    """Take the wall time of a step and, for one that computes on the CPU, its CPU time.

    Over 30 such cases, predictions with a step that sleeps were 26 % too fast on average, with this one 3 %.
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
    """Return what a copy of the loader's sampler yields."""
    sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    memo = {id(loader.dataset): loader.dataset}  # which samplers hold, too
    ends_s = time.perf_counter() + _MAX_SAMPLING_S
    found = []
    for index in itertools.islice(copy.deepcopy(sampler, memo), _MAX_INDICES):
        found.append(index)
        if time.perf_counter() > ends_s:
            break
    return found
