"""Trials of DataLoader settings, and what they say of the settings."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import mean, median

from lightning_gpu_tools.advice.loader_plan import TOLERANCE, LoadCost
from lightning_gpu_tools.training.run_measurements import LoaderSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderTrial:
    """Some training steps with one set of settings.

    Attributes:
        settings: The settings.
        seconds: How long it took, with the start of its workers and the steps that were left out because they were not
            steady.
        block_step_s: Mean time from step to step in each of some blocks of consecutive steady steps.
        wait_s: Mean part of it in which training waited for a batch.
        cost: What a batch cost to load; ``None`` if it was not measured.
        start_s: How long it took until all workers were up; ``None`` without workers.
        failed: Why it could not be tried; ``None`` if it could.
    """

    settings: LoaderSettings
    seconds: float
    block_step_s: tuple[float, ...] = ()
    wait_s: float = 0.0
    cost: LoadCost | None = None
    start_s: float | None = None
    failed: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderScore:
    """What all trials of one set of settings say.

    Attributes:
        settings: The settings.
        visits: How many trials.
        batches_per_s: Median over the blocks of steps; what loader and training step do together.
        lower: Lower 95 % bound of it (order statistics, no assumption about the distribution; the least of the blocks
            where there are fewer than six, and 0 where there is only one).
        upper: Upper bound, likewise; infinite where there is only one block.
        wait_s: Mean time in which a step waited for its batch.
        failed: Why it could not be tried; ``None`` if it could.
    """

    settings: LoaderSettings
    visits: int
    batches_per_s: float = 0.0
    lower: float = 0.0
    upper: float = 0.0
    wait_s: float = 0.0
    failed: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderResult:
    """What came out of looking for the settings of a loader.

    Attributes:
        users: The settings that the user gave; ``None`` if the loader is not a torch DataLoader.
        settings: The settings found: those in use from then on, if they were to be applied. The user's own where
            nothing better was found or nothing may be changed.
        reason: Why, with numbers.
        applied: Whether the settings are in use.
        confirmed: Whether they were as good in the first hundred steps of their use; ``None`` if they were not used, or
            training ended before.
        trials: Everything that was measured, in order.
        scores: The same, by settings, in the order in which they were first tried.
        seconds: How long the trials took, all of them useful steps of the training.
        wait_share: Part of the time that training waited for data, with ``settings`` where they were tried; ``None`` if
            it is not known.
    """

    users: LoaderSettings | None
    settings: LoaderSettings | None
    reason: str
    applied: bool = False
    confirmed: bool | None = None
    trials: tuple[LoaderTrial, ...] = ()
    scores: tuple[LoaderScore, ...] = ()
    seconds: float = 0.0
    wait_share: float | None = None


def combine(trials: Sequence[LoaderTrial]) -> LoaderTrial:
    """Return one trial for those of all ranks of a job, made at the same time with the same settings.

    The ranks wait for each other in each step, so all are as fast as the slowest. Who waits for the others does so
    inside of the step, so the rank that does not shows how long the step itself takes.
    """
    first = trials[0]
    block_step_s = tuple(max(block) for block in zip(*(trial.block_step_s for trial in trials), strict=False))
    own_s = [mean(trial.block_step_s) - trial.wait_s for trial in trials if trial.block_step_s]
    return LoaderTrial(
        settings=first.settings,
        seconds=max(trial.seconds for trial in trials),
        block_step_s=block_step_s,
        wait_s=max(0.0, mean(block_step_s) - min(own_s)) if block_step_s else 0.0,
        cost=_dearest([trial.cost for trial in trials if trial.cost is not None]),
        start_s=max((trial.start_s for trial in trials if trial.start_s is not None), default=None),
        failed=next((trial.failed for trial in trials if trial.failed is not None), None),
    )


def _dearest(costs: Sequence[LoadCost]) -> LoadCost | None:
    if not costs:
        return None
    return LoadCost(
        wall_s=max(cost.wall_s for cost in costs),
        cpu_s=max((cost.cpu_s for cost in costs if cost.cpu_s is not None), default=None),
        batch_bytes=max((cost.batch_bytes for cost in costs if cost.batch_bytes is not None), default=None),
        spread=max((cost.spread for cost in costs if cost.spread is not None), default=None),
        worker_bytes=max((cost.worker_bytes for cost in costs if cost.worker_bytes is not None), default=None),
    )


def score(trials: Iterable[LoaderTrial]) -> list[LoaderScore]:
    """Return what the trials say of each set of settings, in the order in which these were first tried.

    Whether workers live on between epochs makes no difference within one, so it makes no other set of settings.
    """
    by_settings: dict[LoaderSettings, list[LoaderTrial]] = {}
    for trial in trials:
        by_settings.setdefault(replace(trial.settings, persistent_workers=False), []).append(trial)
    return [_score(visits[0].settings, visits) for visits in by_settings.values()]


def score_of(scores: Iterable[LoaderScore], settings: LoaderSettings | None) -> LoaderScore | None:
    """Return the score of some settings, ``None`` if they were not tried or failed."""
    for item in scores:
        if settings is not None and item.failed is None:
            tried = replace(item.settings, persistent_workers=settings.persistent_workers)
            if tried == settings:
                return item
    return None


def is_slower(trial: LoaderTrial, than: LoaderTrial) -> bool:
    """Return whether settings did worse than others, by more than counts as equal."""
    return trial.failed is not None or median(trial.block_step_s) > (1 + TOLERANCE) * median(than.block_step_s)


def _score(settings: LoaderSettings, visits: Sequence[LoaderTrial]) -> LoaderScore:
    failed = next((trial.failed for trial in visits if trial.failed is not None), None)
    blocks = sorted(1 / step_s for trial in visits for step_s in trial.block_step_s)
    if failed is not None or not blocks:
        return LoaderScore(settings=settings, visits=len(visits), failed=failed or "it was never measured")
    # The order statistics at n/2 -+ 0.98 sqrt(n) enclose a median with 95 %.
    low = max(0, math.floor(len(blocks) / 2 - 0.98 * math.sqrt(len(blocks))))
    return LoaderScore(
        settings=settings,
        visits=len(visits),
        batches_per_s=median(blocks),
        lower=blocks[low] if len(blocks) > 1 else 0.0,
        upper=blocks[-1 - low] if len(blocks) > 1 else math.inf,
        wait_s=mean(trial.wait_s for trial in visits),
    )
