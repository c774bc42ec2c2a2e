"""The search for DataLoader settings, for which training stands still; and for those who train without a Trainer."""

from __future__ import annotations

import dataclasses
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from torch.utils.data import DataLoader

from lightning_gpu_tools.advice.loader_plan import LoadCost
from lightning_gpu_tools.advice.loader_trials import LoaderResult, LoaderTrial, trial_of
from lightning_gpu_tools.host import HostBudget, read_host_budget
from lightning_gpu_tools.loaders.contents import NotCopyableError, fingerprint
from lightning_gpu_tools.loaders.plan import LoaderCase, StepCost, choose, next_trial
from lightning_gpu_tools.loaders.random_state import undisturbed
from lightning_gpu_tools.loaders.settings import settings_of, why_fixed
from lightning_gpu_tools.loaders.trial import TrialSetup, in_one_line
from lightning_gpu_tools.training.run_measurements import LoaderSettings

# What the ranks of a job tell each other: returns the facts of all of them, the same on each; None if one is missing.
Gather = Callable[[dict[str, Any]], "list[dict[str, Any]] | None"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SearchTerms:
    """What a search has to keep to.

    Attributes:
        step: What a training step takes.
        host: What the host grants.
        cuda: Whether batches go to an NVIDIA GPU.
        budget_s: How long the search may take, in seconds.
        alone_s: Seconds that the training process itself takes for a batch; ``None`` if that was not seen.
        epoch_steps: Steps in an epoch; ``None`` if that is unknown, or workers cannot live on between epochs.
        bar: Whether to show a progress bar.
    """

    step: StepCost
    host: HostBudget
    cuda: bool
    budget_s: float
    alone_s: float | None = None
    epoch_steps: int | None = None
    bar: bool = False


def search(loader: DataLoader[Any], terms: SearchTerms, gather: Gather = lambda facts: [facts]) -> LoaderResult:
    """Try the few settings that the cost of a batch promises, and return the best of them.

    Args:
        loader: The loader. It stays as it is, and so do all random numbers of this process.
        terms: What to keep to.
        gather: Exchanges facts with the other ranks, which search at the same time and come to the same result.
    """
    began_s = time.perf_counter()
    with undisturbed(), _progress(terms) as (say, tick):
        result = _search(loader, terms, gather, say, tick)
    return dataclasses.replace(result, seconds=time.perf_counter() - began_s)


def _search(
    loader: DataLoader[Any], terms: SearchTerms, gather: Gather, say: Callable[[str], None], tick: Callable[[], None]
) -> LoaderResult:
    original = settings_of(loader)

    def stays(reason: str, trials: Sequence[LoaderTrial] = ()) -> LoaderResult:
        return LoaderResult(original=original, settings=original, reason=reason, trials=tuple(trials))

    say("a batch")
    setup, own = _probed(loader, terms, tick)
    everyones = gather(own)
    if everyones is None:
        return stays("Another rank did not answer.")
    failed = next((facts["failed"] for facts in everyones if facts["failed"]), None)
    if failed or setup is None:
        return stays(f"The loader is left as it is: {failed}.")
    case = LoaderCase(
        original=original,
        cost=_dearest([LoadCost(**facts["cost"]) for facts in everyones]),
        step=terms.step,
        host=_tightest([HostBudget(**facts["host"]) for facts in everyones]),
        cuda=terms.cuda,
        epoch_steps=terms.epoch_steps,
    )
    start_s = max(facts["start_s"] for facts in everyones)
    left_s = min(facts["left_s"] for facts in everyones)
    alone_s = max(facts["alone_s"] for facts in everyones)
    trials = [_alone(original, alone_s, terms.step)]
    while left_s > 0 and (settings := next_trial(case, trials)) is not None:
        best_s = min((trial.batch_s for trial in trials if trial.batch_s is not None), default=math.inf)
        if setup.expected_s(settings, case.cost, start_s, case.host.cores) > left_s:
            trial = LoaderTrial(settings=settings)  # no time is left
        else:
            say(f"num_workers={settings.num_workers}, prefetch_factor={settings.prefetch_factor}")
            trial = setup.run(settings, best_s)
        everyones = gather({"trial": dataclasses.asdict(trial), "left_s": setup.left_s})
        if everyones is None:
            return stays("Another rank did not say how its trial went.", trials)
        trials.append(_of_all([_trial_from(facts["trial"]) for facts in everyones]))
        left_s = min(facts["left_s"] for facts in everyones)
    decision = choose(case, trials)
    found = trial_of(trials, decision.settings)
    return LoaderResult(
        original=original,
        settings=decision.settings,
        reason=decision.reason,
        trials=tuple(trials),
        wait_share=None if found is None or not found.batch_s else found.wait_s / found.batch_s,
    )


def _probed(
    loader: DataLoader[Any], terms: SearchTerms, tick: Callable[[], None]
) -> tuple[TrialSetup | None, dict[str, Any]]:
    """Return what is needed for trials here, and what the other ranks have to know of it."""
    facts: dict[str, Any] = {"failed": None, "host": dataclasses.asdict(terms.host)}
    try:
        setup = TrialSetup(loader, terms.step, terms.budget_s, tick)
    except Exception as error:  # noqa: BLE001 - anybody's sampler, in any way
        return None, {**facts, "failed": f"its sampler cannot be copied ({type(error).__name__}: {error})"}
    try:
        if not setup.batch_count:
            raise ValueError("it has no batches")
        fingerprint(loader.dataset)
        cost, start_s = setup.probe()
    except NotCopyableError as error:
        return None, {**facts, "failed": f"worker processes cannot have copies of its dataset ({error})"}
    except Exception as error:  # noqa: BLE001 - anybody's dataset: what fails here is not used in the training
        return None, {**facts, "failed": f"a worker process cannot load a batch ({in_one_line(error)})"}
    alone_s = cost.wall_s if terms.alone_s is None else terms.alone_s
    return setup, {
        **facts,
        "cost": dataclasses.asdict(cost),
        "start_s": start_s,
        "alone_s": alone_s,
        "left_s": setup.left_s,
    }


def _alone(original: LoaderSettings, alone_s: float, step: StepCost) -> LoaderTrial:
    """Return what the training process itself reaches: batch and step, one after the other."""
    settings = dataclasses.replace(original, num_workers=0, prefetch_factor=None, persistent_workers=False)
    return LoaderTrial(settings=settings, batch_s=alone_s + step.wall_s, wait_s=alone_s, measured=False)


def _of_all(trials: Sequence[LoaderTrial]) -> LoaderTrial:
    """Return one trial for those of all ranks, made at the same time: they wait for each other in every step."""
    failed = next((trial.failed for trial in trials if trial.failed is not None), None)
    slowest = max(trials, key=lambda trial: trial.batch_s or 0.0)
    return dataclasses.replace(
        slowest,
        seconds=max(trial.seconds for trial in trials),
        start_s=max((trial.start_s for trial in trials if trial.start_s is not None), default=None),
        batch_s=None if failed else slowest.batch_s,
        failed=failed,
    )


def _trial_from(facts: dict[str, Any]) -> LoaderTrial:
    return LoaderTrial(**{**facts, "settings": LoaderSettings(**facts["settings"])})


def _dearest(costs: Sequence[LoadCost]) -> LoadCost:
    def most(name: str) -> Any:
        return max((value for cost in costs if (value := getattr(cost, name)) is not None), default=None)

    return LoadCost(**{field.name: most(field.name) for field in dataclasses.fields(LoadCost)})


def _tightest(hosts: Sequence[HostBudget]) -> HostBudget:
    return HostBudget(
        cores=min(host.cores for host in hosts),
        memory_available_bytes=min(host.memory_available_bytes for host in hosts),
        shm_free_bytes=min((host.shm_free_bytes for host in hosts if host.shm_free_bytes is not None), default=None),
        local_ranks=max(host.local_ranks for host in hosts),
    )


@contextmanager
def _progress(terms: SearchTerms) -> Iterator[tuple[Callable[[str], None], Callable[[], None]]]:
    """Show on a terminal how much of the budget is used; no thread draws it, because processes are forked meanwhile."""
    bar = Progress(
        TextColumn("Trying DataLoader settings: {task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn(f"of at most {terms.budget_s:g} s"),
        console=Console(stderr=True),
        auto_refresh=False,
        transient=True,
        disable=not (terms.bar and sys.stderr.isatty()),
    )
    began_s = shown_s = time.perf_counter()
    with bar:
        task = bar.add_task("", total=terms.budget_s)

        def tick() -> None:
            nonlocal shown_s
            now_s = time.perf_counter()
            if now_s - shown_s > 0.1:
                shown_s = now_s
                bar.update(task, completed=now_s - began_s, refresh=True)

        yield lambda words: bar.update(task, description=words, refresh=True), tick


def find_loader_settings(loader: DataLoader[Any], step_time_s: float, *, budget_s: float = 30.0) -> LoaderResult:
    """Return the ``num_workers``, ``prefetch_factor``, ``persistent_workers`` and ``pin_memory`` that suit a loader.

    What a batch costs to load is measured in a worker process, and predicts the settings within the limits of this
    machine: the cores granted by affinity and cgroup, memory, ``/dev/shm``. The few candidates are then tried with a
    training step that sleeps. The choice is the smallest number of workers within 3 % of the best, or the loader's own
    settings where those are as good. A step on a GPU leaves the cores to the workers, as sleep does; a step on the CPU
    does not, but :class:`~lightning_gpu_tools.NumWorkersFinder` measures that as well.

    The loader, its dataset, its sampler, its generator and the random numbers of this process stay as they are: batches
    are loaded in worker processes only.

    Args:
        loader: The loader as it is. One whose dataset is iterable or holds an open file or a lock, or that keeps its
            position, is left alone, with the reason in the result.
        step_time_s: How long a training step takes when its batch is there, in seconds.
        budget_s: How long this may take, in seconds. It is a hard limit, also if an item of the dataset hangs.

    Returns:
        The result: ``.settings``, ``.reason``, ``.trials``. Where nothing could be tried, also because the dataset
        raises an error, ``.reason`` says why and ``.settings`` are the loader's own.

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
    terms = SearchTerms(
        step=StepCost(wall_s=step_time_s),
        host=read_host_budget(),
        cuda=torch.cuda.is_available(),
        budget_s=budget_s,
        epoch_steps=epoch_steps,
        bar=True,
    )
    return search(loader, terms)
