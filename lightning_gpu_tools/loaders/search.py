"""The search for DataLoader settings, during which training stands still."""

from __future__ import annotations

import dataclasses
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from torch.utils.data import DataLoader

from lightning_gpu_tools.advice.loader_plan import LoadCost
from lightning_gpu_tools.advice.loader_trials import LoaderResult, LoaderTrial, trial_of
from lightning_gpu_tools.host import HostBudget, read_host_budget
from lightning_gpu_tools.loaders.contents import fingerprint
from lightning_gpu_tools.loaders.plan import LoaderCase, StepCost, choose, next_trial
from lightning_gpu_tools.loaders.random_state import undisturbed
from lightning_gpu_tools.loaders.settings import settings_of, why_fixed
from lightning_gpu_tools.loaders.trial import Trials, in_one_line

# Returns the facts of all ranks, the same on each, or raises SilentRankError.
Gather = Callable[[dict[str, Any]], list[dict[str, Any]]]


class SilentRankError(Exception):
    """The ranks of a job cannot agree, with the reason."""


def search(
    loader: DataLoader[Any],
    *,
    step: StepCost,
    host: HostBudget,
    cuda: bool,
    budget_s: float,
    alone_s: float | None = None,
    epoch_steps: int | None = None,
    bar: bool = False,
    gather: Gather = lambda facts: [facts],
) -> LoaderResult:
    """Try the few settings that the cost of a batch suggests, and return the best of them.

    The loader and all random numbers of this process stay as they are. With ``gather``, whose errors go through, all
    ranks search at the same time and come to the same result. ``alone_s`` is what the training process itself takes for
    a batch, if that was seen; ``bar`` shows a progress bar.
    """
    began_s = time.perf_counter()
    original = settings = settings_of(loader)
    tried: list[LoaderTrial] = []
    with undisturbed(), _progress(budget_s, shown=bar) as show:
        show("a batch")
        trials, own = _probed(loader, step, budget_s, alone_s)
        everyones = gather({**own, "host": dataclasses.asdict(host)})
        failed = next((facts["failed"] for facts in everyones if facts["failed"]), None)
        if failed or trials is None:
            reason = f"The loader is left as it is: {failed}."
        else:
            # All ranks wait for the slowest one in every step, so its costs count, and the tightest host.
            slowest = max(everyones, key=lambda facts: float(facts["cost"]["wall_s"]))
            tightest = min((facts["host"] for facts in everyones), key=lambda one: one["cores"] / one["local_ranks"])
            case = LoaderCase(
                original=original,
                cost=LoadCost(**slowest["cost"]),
                step=step,
                host=HostBudget(**tightest),
                cuda=cuda,
                epoch_steps=epoch_steps,
            )
            # Without workers, batch and step come one after the other.
            wait_s = max(facts["alone_s"] for facts in everyones)
            alone = dataclasses.replace(original, num_workers=0, prefetch_factor=None, persistent_workers=False)
            tried.append(LoaderTrial(settings=alone, batch_s=wait_s + step.wall_s, wait_s=wait_s, measured=False))
            while (left_s := min(facts["left_s"] for facts in everyones)) > 0:
                following = next_trial(case, tried)
                if following is None:
                    break
                trial = LoaderTrial(settings=following)
                if trials.expected_s(following, case.cost, slowest["start_s"], case.host.cores) <= left_s:
                    show(f"num_workers={following.num_workers}, prefetch_factor={following.prefetch_factor}")
                    trial = trials.run(following, min(one.batch_s or math.inf for one in tried))
                everyones = gather({"trial": dataclasses.asdict(trial), "left_s": trials.left_s})
                worst = max(
                    (facts["trial"] for facts in everyones),
                    key=lambda one: (one["failed"] is not None, one["batch_s"] or math.inf),
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


def _probed(
    loader: DataLoader[Any], step: StepCost, budget_s: float, alone_s: float | None
) -> tuple[Trials | None, dict[str, Any]]:
    """Return the trials, and what the other ranks have to know."""
    what = "its sampler gives no batches to try"
    try:
        trials = Trials(loader, step, budget_s)
        what = "worker processes cannot have copies of its dataset"
        fingerprint(loader.dataset)
        what = "a worker process cannot load a batch"
        cost, start_s = trials.probe()
    except Exception as error:  # noqa: BLE001 - anybody's sampler or dataset: what fails here is not used in training
        return None, {"failed": f"{what} ({in_one_line(error)})"}
    return trials, {
        "failed": None,
        "cost": dataclasses.asdict(cost),
        "alone_s": cost.wall_s if alone_s is None else alone_s,
        "start_s": start_s,
        "left_s": trials.left_s,
    }


@contextmanager
def _progress(budget_s: float, *, shown: bool) -> Iterator[Callable[[str], None]]:
    """Show on a terminal what is tried; without a thread that draws it, because processes are forked."""
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
    """Return the ``num_workers``, ``prefetch_factor``, ``persistent_workers`` and ``pin_memory`` that suit a loader.

    The cost of a batch, measured in a worker process, predicts the settings within the limits of this machine: the
    cores granted by affinity and cgroup, memory, ``/dev/shm``. The few candidates are tried with a training step that
    sleeps. That leaves the cores to the workers, as a step on a GPU does; for one on the CPU use
    :class:`~lightning_gpu_tools.NumWorkersFinder`. The choice is the smallest number of workers within 3 % of the best,
    or the loader's own settings where those are as good.

    The loader, its dataset, sampler and generator, and the random numbers of this process stay as they are: batches are
    loaded in worker processes only.

    Args:
        loader: The loader. One that keeps its position, or whose dataset is iterable or holds an open file or a lock,
            is left alone.
        step_time_s: How long a training step takes when its batch is there, in seconds.
        budget_s: How long this may take, in seconds. A hard limit, also if an item of the dataset hangs.

    Returns:
        The result: ``.settings``, ``.reason``, ``.trials``. If nothing could be tried, also because the dataset raises
        an error, ``.settings`` are the loader's own, and ``.reason`` says why.

    Raises:
        ValueError: A time is not a positive number.

    Example::

        found = find_loader_settings(loader, step_time_s=0.050)
        print(found.settings, found.reason)
    """
    for name, seconds in (("step_time_s", step_time_s), ("budget_s", budget_s)):
        if not 0 < seconds < math.inf:
            raise ValueError(f"{name} must be a positive number of seconds, got {seconds!r}.")
    fixed = why_fixed(loader)
    if fixed is not None:
        original = settings_of(loader) if isinstance(loader, DataLoader) else None
        return LoaderResult(original=original, settings=original, reason=f"The loader is left as it is: {fixed}.")
    try:
        epoch_steps = len(loader)
    except TypeError:  # a sampler without a length
        epoch_steps = None
    return search(
        loader,
        step=StepCost(wall_s=step_time_s),
        host=read_host_budget(),
        cuda=torch.cuda.is_available(),
        budget_s=budget_s,
        epoch_steps=epoch_steps,
        bar=True,
    )
