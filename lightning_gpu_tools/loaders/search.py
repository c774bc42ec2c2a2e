"""The search for DataLoader settings while training is paused: trials with a stand-in for the step."""

import copy
import dataclasses
import functools
import hashlib
import itertools
import math
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from torch.utils.data import DataLoader

from lightning_gpu_tools.advice.loader_plan import TOLERANCE, LoadCost, trial_of
from lightning_gpu_tools.advice.workers import why_not_searched
from lightning_gpu_tools.host import HostBudget, private_memory_bytes, read_host_budget
from lightning_gpu_tools.loaders.facts import read_loader_facts
from lightning_gpu_tools.loaders.passes import random_states, undisturbed
from lightning_gpu_tools.loaders.plan import LoaderCase, Step, choose, next_trial, ramp_up
from lightning_gpu_tools.loaders.settings import batch_bytes, plain_loader, sampler_of, settings_of
from lightning_gpu_tools.loaders.workers import Batches, in_one_line
from lightning_gpu_tools.selection.placement import count_devices
from lightning_gpu_tools.training.run_measurements import LoaderResult, LoaderSettings, LoaderTrial
from lightning_gpu_tools.units import check_seconds

_MAX_INDICES = 1024  # from the sampler; a search loads a few hundred batches
# The cost of a batch is the mean over 4 to 60 batches, within this share of the budget. 60 reveal one slow batch in 20.
_MIN_PROBED, _MAX_PROBED, _PROBE_SHARE = 4, 60, 0.05
# A trial measures at least 24 batches and 0.4 s, until its mean is known to 2%. If it is certainly 10% slower than
# the best, it ends after 8.
_MIN_BATCHES, _MIN_SECONDS, _PRECISION = 24, 0.4, 0.02
_HOPELESS, _FIRST_BATCHES = 1.1, 8
_TRIAL_SHARE = 0.12  # of the budget, at most; a search runs about eight trials
_REHEARSALS = 3  # our default: the first ones show how much the stand-in can compute
_CHUNK = bytes(1 << 16)  # hashlib releases Python's lock for 2 KiB or more
_GRACE_S = 0.5  # for items in progress at the end of a trial
# Part of the budget reserved for ending workers that hang.
_RESERVE_S, _RESERVE_SHARE = 1.0, 0.2
_MIN_TIMEOUT_S = 0.001  # torch treats zero as no timeout


class Trials:
    """Trials of a loader, with a stand-in for the training step after each batch.

    The loader, its sampler, and its generator do not change. The budget covers all trials together.

    Raises:
        Exception: The sampler cannot be copied, fails, or has no batches.
    """

    def __init__(self, loader: DataLoader[Any], step: Step, budget_s: float) -> None:
        self._loader = loader
        self._step = step
        self._cpu_s = step.cpu_s
        self._rest_s: float | None = None
        self._overslept_s = 0.0
        self._budget_s = budget_s
        self._ends_s = time.perf_counter() + budget_s
        self._seeds = torch.Generator().manual_seed(0)
        indices = list(_some_indices(loader))
        if not indices:
            raise ValueError("it has no batches")
        order = torch.randperm(len(indices), generator=self._seeds).tolist()
        self._indices = itertools.cycle([indices[i] for i in order])

    @property
    def left_s(self) -> float:
        """Seconds of the budget left for loading."""
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
        """Return the cost of a batch in one worker, and that worker's startup seconds. Dataset errors propagate."""
        began_s = time.perf_counter()
        # The worker gets all indices at once, so that it never waits for this process.
        probed = LoaderSettings(
            num_workers=1, prefetch_factor=_MAX_PROBED + 2, persistent_workers=False, pin_memory=False
        )
        with self._open(probed, collate_fn=functools.partial(_when_ready, self._loader.collate_fn)) as batches:
            next(batches)  # includes one-time work in a process; the queue fills behind it
            start_s = time.perf_counter() - began_s
            ready = [next(batches)]
            ends_s = time.perf_counter() + _PROBE_SHARE * self._budget_s
            while len(ready) <= _MIN_PROBED or (len(ready) <= _MAX_PROBED and time.perf_counter() < ends_s):
                ready.append(next(batches))
            worker_sizes = private_memory_bytes([worker.pid for worker in batches.workers if worker.pid])
        times_s, cpu_s, sizes = zip(*ready, strict=True)
        wall_s = [later_s - one_s for one_s, later_s in itertools.pairwise(times_s)]
        mean_s = statistics.mean(wall_s)
        cost = LoadCost(
            wall_s=mean_s,
            cpu_s=(cpu_s[-1] - cpu_s[0]) / len(wall_s),
            batch_bytes=max(sizes) or None,
            worker_bytes=max(worker_sizes, default=None),
        )
        return cost, max(0.0, start_s - mean_s)

    def rehearse(self, wait_s: float) -> float:
        """Fit the stand-in to the step of a run without workers, with these waits; return the seconds it takes."""
        step_s = seconds = self._step.step_s
        count = min(_FIRST_BATCHES, int(_PROBE_SHARE * self._budget_s / (wait_s + step_s)))
        for _ in range(_REHEARSALS if count else 0):
            self._rest_s, rests_s, took_s = None, [], []
            for _ in range(count):
                time.sleep(wait_s)
                began_s = time.perf_counter()
                rests_s.append(self.stand_in())
                took_s.append(time.perf_counter() - began_s)
            self._rest_s, seconds = statistics.median(rests_s), statistics.median(took_s)
            if seconds <= (1 + TOLERANCE) * step_s:
                break
            self._cpu_s *= step_s / seconds
        return seconds

    def run(self, settings: LoaderSettings, best_s: float) -> LoaderTrial:
        """Run a trial of these settings, and end it early if they cannot match the best seconds per batch so far."""
        failed = None
        waits: list[float] = []
        passed: list[float] = []
        try:
            with self._open(settings) as batches:
                next(batches)
                to_skip = ramp_up(settings)
                while self.left_s > 0 and not self._is_enough(passed, best_s):
                    asked_s = time.perf_counter()
                    next(batches)
                    loaded_s = time.perf_counter()
                    self.stand_in()
                    if to_skip:
                        to_skip -= 1
                        continue
                    waits.append(loaded_s - asked_s)
                    passed.append(time.perf_counter() - asked_s)
        except Exception as error:  # noqa: BLE001 - after any error, these settings are not used in training
            failed = in_one_line(error)
        measured = failed is None and len(passed) >= _FIRST_BATCHES
        return LoaderTrial(
            settings=settings,
            batch_s=statistics.mean(passed) if measured else None,
            wait_s=statistics.mean(waits) if measured else 0.0,
            failed=failed,
        )

    def stand_in(self) -> float:
        """Take the time of a step, part of which is computed if the step computes on the CPU; return the rest.

        In 30 cases on the CPU, predictions were 26% too fast on average with a step that sleeps, and 3% with this.
        """
        step, began_s = self._step, time.perf_counter()
        if step.threads:
            threads = [threading.Thread(target=_burn, args=(self._cpu_s / step.threads,)) for _ in range(step.threads)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        computed_s = time.perf_counter()
        rest_s = max(0.0, began_s + step.step_s - computed_s) if self._rest_s is None else self._rest_s
        time.sleep(max(0.0, rest_s - self._overslept_s))
        self._overslept_s = max(0.0, self._overslept_s + time.perf_counter() - computed_s - rest_s)
        return rest_s

    def _is_enough(self, passed: Sequence[float], best_s: float) -> bool:
        count, seconds = len(passed), sum(passed)
        if not count or count % _FIRST_BATCHES:
            return False
        mean_s, error_s = seconds / count, statistics.stdev(passed) / count**0.5
        if mean_s - 2 * error_s > _HOPELESS * best_s or seconds > _TRIAL_SHARE * self._budget_s:
            return True
        return count >= _MIN_BATCHES and seconds >= _MIN_SECONDS and error_s <= _PRECISION * mean_s


def _when_ready(collate: Callable[[Any], Any], samples: Any) -> tuple[float, float, int]:
    """Return, instead of a batch, its completion time, the worker's CPU seconds, and its size."""
    size = batch_bytes(collate(samples))
    return time.perf_counter(), time.process_time(), size


def _burn(cpu_s: float) -> None:
    ends_s = time.thread_time() + cpu_s
    while time.thread_time() < ends_s:
        hashlib.sha256(_CHUNK).digest()


def _some_indices(loader: DataLoader[Any]) -> Iterator[Any]:
    """Return the first indices that a copy of the loader's sampler yields."""
    memo = {id(loader.dataset): loader.dataset}  # do not copy the dataset, which samplers may refer to
    return itertools.islice(copy.deepcopy(sampler_of(loader), memo), _MAX_INDICES)


def draws_late(loader: DataLoader[Any]) -> bool:
    """Return whether the sampler of a loader draws from a global generator after its first index."""
    states = []
    with undisturbed(), suppress(Exception):  # of a sampler that fails or cannot be copied, which a search says
        indices = _some_indices(loader)
        for count in (1, None):
            deque(itertools.islice(indices, count), maxlen=0)
            of_torch, (_, of_numpy, *drawn), of_python = random_states()
            states.append((of_torch.tolist(), of_numpy.tolist(), drawn, of_python))
    return len(states) == 2 and states[0] != states[1]


# Returns the facts of all ranks, identical on each, or raises TimeoutError.
Gather = Callable[[dict[str, Any]], list[dict[str, Any]]]


def search(
    loader: DataLoader[Any],
    *,
    step: Step,
    host: HostBudget,
    cuda: bool,
    budget_s: float,
    can_persist: bool = True,
    bar: bool = False,
    gather: Gather = lambda facts: [facts],
) -> LoaderResult:
    """Try a few settings, based on the cost of a batch, and return the best of them.

    The loader and all random numbers of this process do not change. With ``gather``, whose errors propagate, all ranks
    search at the same time and get the same result. ``bar`` shows a progress bar.
    """
    began_s = time.perf_counter()
    original = settings = settings_of(loader)
    tried: list[LoaderTrial] = []
    with undisturbed(), _progress(budget_s, shown=bar) as show:
        show("a batch")
        trials, own = _probed(loader, step, budget_s)
        everyones = gather({**own, "host": dataclasses.asdict(host)})
        failed = next((facts["failed"] for facts in everyones if facts["failed"]), None)
        if failed or trials is None:
            reason = f"The loader was not changed: {failed}."
        else:
            # All ranks wait for the slowest one in every step, so its costs and the tightest host count.
            slowest = max(everyones, key=lambda facts: float(facts["cost"]["wall_s"]))
            tightest = min(
                (facts["host"] for facts in everyones), key=lambda facts: facts["cores"] / facts["local_ranks"]
            )
            case = LoaderCase(
                original=original,
                cost=LoadCost(**slowest["cost"]),
                step=step,
                host=HostBudget(**tightest),
                cuda=cuda,
                can_persist=can_persist,
            )
            # Without workers, batch and step run one after the other.
            wait_s, step_s = (max(facts[name] for facts in everyones) for name in ("alone_s", "step_s"))
            alone = replace(original, num_workers=0, prefetch_factor=None, persistent_workers=False)
            tried.append(LoaderTrial(settings=alone, batch_s=wait_s + step_s, wait_s=wait_s, measured=False))
            while (left_s := min(facts["left_s"] for facts in everyones)) > 0:
                following = next_trial(case, tried)
                if following is None:
                    break
                trial, workers = LoaderTrial(settings=following), following.num_workers
                # Until the first batches of the trial have been measured.
                measured_s = (ramp_up(following) + _FIRST_BATCHES) * max(step.step_s, case.cost.wall_s / workers)
                start_s = slowest["start_s"] * max(1.0, workers / case.host.cores)
                if start_s + case.cost.wall_s + measured_s <= left_s:
                    show(f"{workers} workers, {following.prefetch_factor} batches each")
                    trial = trials.run(following, min(trial.batch_s or math.inf for trial in tried))
                everyones = gather({"trial": dataclasses.asdict(trial), "left_s": trials.left_s})
                worst = max(
                    (facts["trial"] for facts in everyones),
                    key=lambda trial: (trial["failed"] is not None, trial["batch_s"] or math.inf),
                )
                tried.append(LoaderTrial(**{**worst, "settings": following}))
            settings, reason = choose(case, tried)
    found = trial_of(tried, settings)
    return LoaderResult(
        original=original,
        settings=settings,
        reason=reason,
        trials=tuple(tried),
        seconds=time.perf_counter() - began_s,
        wait_share=None if found is None or not found.batch_s else found.wait_s / found.batch_s,
    )


def _probed(loader: DataLoader[Any], step: Step, budget_s: float) -> tuple[Trials | None, dict[str, Any]]:
    """Return the trials, and the facts for the other ranks."""
    failure = "its sampler yields no batches"
    try:
        trials = Trials(loader, step, budget_s)
        failure = "a worker process cannot load a batch"
        cost, start_s = trials.probe()
    except Exception as error:  # noqa: BLE001 - any error of a sampler or dataset is a reason not to change the loader
        return None, {"failed": f"{failure} ({in_one_line(error)})"}
    alone = step.error_s is not None and not loader.num_workers
    return trials, {
        "failed": None,
        "cost": dataclasses.asdict(cost),
        "alone_s": step.wait_s if alone else cost.wall_s,
        "step_s": trials.rehearse(step.wait_s) if alone else step.step_s,
        "start_s": start_s,
        "left_s": trials.left_s,
    }


@contextmanager
def _progress(budget_s: float, *, shown: bool) -> Iterator[Callable[[str], None]]:
    """Show the current trial on a terminal, without a thread, because processes are forked."""
    bar = Progress(
        TextColumn("Trying DataLoader settings: {task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn(f"of at most {budget_s:g} s"),
        console=Console(stderr=True),
        auto_refresh=False,
        transient=True,
        disable=not (shown and sys.stderr.isatty()),
    )
    began_s = time.perf_counter()
    with bar:
        task = bar.add_task("", total=budget_s)
        yield lambda words: bar.update(task, description=words, completed=time.perf_counter() - began_s, refresh=True)


def find_loader_settings(loader: DataLoader[Any], step_time_s: float, *, budget_s: float = 30.0) -> LoaderResult:
    """Find the best ``num_workers``, ``prefetch_factor``, ``persistent_workers`` and ``pin_memory`` for a loader.

    Measures the cost of a batch in a worker process, and predicts settings within the limits of this machine: cores
    (affinity and cgroup), memory, ``/dev/shm``. Then tries a few candidates with a training step that sleeps. Like a
    step on a GPU, this leaves the cores to the workers; for steps on the CPU, use
    :class:`~lightning_gpu_tools.NumWorkersFinder`. The result is the smallest number of workers within 3% of the best,
    but not fewer than predicted, or the loader's current settings if they are as good.

    Does not change the loader, its dataset, sampler, and generator, or the random numbers of this process: batches are
    loaded only in worker processes.

    Args:
        loader: The loader. Nothing is tried if it keeps its position (``state_dict``), if its dataset is iterable or
            holds an open file, or if this process may not start others.
        step_time_s: Duration of a training step once its batch is ready, in seconds.
        budget_s: Time limit in seconds. It holds even if an item of the dataset hangs.

    Returns:
        The result, with ``.settings``, ``.reason``, ``.trials``. If nothing could be tried, for example because the
        dataset raises an error, ``.settings`` are the current settings, and ``.reason`` explains why.

    Raises:
        ValueError: A time is not a positive number.

    Example::

        found = find_loader_settings(loader, step_time_s=0.050)
        print(found.settings, found.reason)
    """
    check_seconds(step_time_s, "step_time_s")
    check_seconds(budget_s, "budget_s")
    fixed = why_not_searched(read_loader_facts(loader))
    if fixed is not None:
        original = settings_of(loader) if isinstance(loader, DataLoader) else None
        return LoaderResult(original=original, settings=original, reason=f"The loader was not changed: {fixed}.")
    return search(
        loader,
        step=Step(step_time_s),
        host=read_host_budget(),
        cuda=count_devices() > 0,
        budget_s=budget_s,
        bar=True,
    )
