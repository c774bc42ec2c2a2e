"""The search for DataLoader settings for those who train without Lightning's Trainer."""

from __future__ import annotations

import copy
import math
import time
from typing import Any

import torch
from torch.utils.data import DataLoader

from lightning_gpu_tools.advice.loader_trials import LoaderResult
from lightning_gpu_tools.host import read_host_budget
from lightning_gpu_tools.loaders.index_source import length_of
from lightning_gpu_tools.loaders.random_state import undisturbed
from lightning_gpu_tools.loaders.ranks import OneRank
from lightning_gpu_tools.loaders.settings import copy_with, settings_of, why_fixed
from lightning_gpu_tools.loaders.switch import Switch
from lightning_gpu_tools.loaders.tuning import Terms, Tuning


def find_loader_settings(loader: DataLoader[Any], step_time_s: float, *, budget_s: float = 60.0) -> LoaderResult:
    """Return the ``num_workers``, ``prefetch_factor``, ``persistent_workers`` and ``pin_memory`` that suit a loader.

    What a batch costs to load is measured where it is loaded and predicts the settings within the limits of this
    machine: the cores granted by affinity and cgroup, memory, ``/dev/shm``. The prediction and its neighbours are then
    tried, each more than once, with a training step that sleeps. The choice is the smallest number of workers within
    3 % of the best. A step on a GPU leaves the cores to the workers, as sleep does; a step on the CPU does not, but
    :class:`~lightning_gpu_tools.NumWorkersFinder` tries the settings in the real training.

    The loader, its sampler, its generator and the random numbers of this process stay as they are. Samples are loaded
    from its dataset, in the training process, too, if the loader has no workers.

    Args:
        loader: The loader as it is. One whose dataset is iterable, or that keeps its position, is left alone, with
            the reason in the result.
        step_time_s: How long a training step takes when its batch is there, in seconds.
        budget_s: How long the trials may take, in seconds; that of the loader's own settings and a short one of others
            are made in any case. Workers that hang end their trial after 30 s.

    Returns:
        The result: ``.settings``, ``.reason``, ``.scores``, ``.trials``.

    Raises:
        ValueError: A time is not a positive number, or the loader has no batches.
        Exception: Whatever the dataset raises with the loader's own settings.

    Example::

        found = find_loader_settings(loader, step_time_s=0.050)
        print(found.settings, found.reason)
    """
    for name, seconds in (("step_time_s", step_time_s), ("budget_s", budget_s)):
        if not 0 < seconds < math.inf:
            raise ValueError(f"{name} must be a positive number of seconds, got {seconds!r}.")
    fixed = why_fixed(loader)
    if fixed is None:
        own, fixed = _independent(loader)
    if fixed is not None:
        users = settings_of(loader) if isinstance(loader, DataLoader) else None
        return LoaderResult(users=users, settings=users, reason=f"The loader is left as it is: {fixed}.")
    with undisturbed():
        return _find(own, step_time_s, budget_s)


def _find(loader: DataLoader[Any], step_time_s: float, budget_s: float) -> LoaderResult:
    switch = Switch(loader, watched=True)
    cuda = torch.cuda.is_available()
    terms = Terms(host=read_host_budget(), cuda=cuda, budget_s=budget_s, epoch_steps=length_of(loader), apply=False)
    # With the result known nobody asks for another batch: no workers are started for one.
    tuning = switch.listener = Tuning(switch, terms, ranks=OneRank(), conclude=lambda result: switch.end_epoch())
    try:
        while tuning.result is None:
            batches = 0
            for _ in switch.loader:
                batches += 1
                if tuning.result is not None:
                    break
                time.sleep(step_time_s)
            if not batches:
                raise ValueError("The loader has no batches, so no settings can be found for it.")
    finally:
        switch.close()
    return tuning.result


def _independent(loader: DataLoader[Any]) -> tuple[DataLoader[Any], str | None]:
    """Return a copy with samplers and generators of its own, over the same dataset, or why there can be none."""
    memo: dict[int, Any] = {id(loader.dataset): loader.dataset}
    for generator in (loader.generator, getattr(loader.sampler, "generator", None)):
        if isinstance(generator, torch.Generator):
            memo[id(generator)] = generator.clone_state()
    own = copy_with(loader, settings_of(loader))
    try:
        sampler, batch_sampler = copy.deepcopy((loader.sampler, loader.batch_sampler), memo)
    except Exception as error:  # noqa: BLE001 - anybody's sampler, in any way
        return own, f"its sampler cannot be copied ({type(error).__name__}: {error})"
    generator = memo.get(id(loader.generator)) if loader.generator is not None else None
    vars(own).update(sampler=sampler, batch_sampler=batch_sampler, generator=generator)
    return own, None
