"""Which DataLoader settings to try, and which to take: decided from what was measured, and nothing else."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean, median, quantiles
from typing import NamedTuple

from lightning_gpu_tools.advice.findings import MIN_CEILING
from lightning_gpu_tools.advice.loader_plan import TOLERANCE, LoadCost, LoaderPlan, most_workers_in_shm, plan_loader
from lightning_gpu_tools.advice.loader_trials import LoaderTrial, combined, trial_of
from lightning_gpu_tools.host import HostBudget
from lightning_gpu_tools.training.run_measurements import LoaderSettings
from lightning_gpu_tools.units import format_duration

# A training of 120 steps must gain by the search, too; the first steps are slower than the others.
STUDY_STEPS = 25
_WARM_UP_STEPS = 5
# Enough for a mean that bursts of one slow batch in twenty do not fool.
CONFIRM_STEPS = 100
# A step that computes on the CPU competes with the workers for cores. Predictions are off by 15 % then (median over 30
# cases; those of a step that leaves the cores free reach 96 % of the best), so less than that is no reason to change.
_MIN_GAIN_ON_CPU = 1.15
# A step keeps cores busy from a quarter of torch's threads on: a thread that waits for a GPU spins on one core.
_BUSY_SHARE = 0.25
# Workers that compute half of the time fill the cores when there are two for each; those that only wait never do. Four
# a core, at most, is our default.
_WORKERS_PER_CORE = 4
# Batches come in order, so all wait for a slow one, which a longer queue bridges. More than 8 batches a worker did not
# help in any measured case.
_DEEP_PREFETCH = 8
# Two trials of the same settings differ by as much on a machine that others use, too (measured: 2 to 4 %).
_CLOSE = 1.06
# Our default: what has failed twice is not a matter of how many workers there are.
_MAX_FAILURES = 2
# Workers that live on between epochs keep their memory, for which they must save as much of an epoch. Our default.
_PERSISTENT_FROM = 0.01


class Fetch(NamedTuple):
    """One batch that training has fetched.

    Attributes:
        asked_s: When it was asked for, by ``time.perf_counter``.
        asked_cpu_s: CPU seconds of this process until then.
        wait_s: Seconds until it came.
        got_s: When the step could begin.
        got_cpu_s: CPU seconds of this process until then.
    """

    asked_s: float
    asked_cpu_s: float
    wait_s: float
    got_s: float
    got_cpu_s: float


class Step(NamedTuple):
    """One real step.

    Attributes:
        wait_s: Seconds in which its batch was fetched.
        step_s: Seconds until the next batch was asked for.
        cpu_s: CPU seconds of this process in those.
    """

    wait_s: float
    step_s: float
    cpu_s: float


def steps_between(fetches: Sequence[Fetch | None]) -> list[Step]:
    """Return the steps that are known from one fetch to the next; ``None`` separates epochs."""
    return [
        Step(one.wait_s, following.asked_s - one.got_s, following.asked_cpu_s - one.got_cpu_s)
        for one, following in itertools.pairwise(fetches)
        if one is not None and following is not None
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCost:
    """What a training step takes when its batch is there.

    Attributes:
        wall_s: Seconds.
        cpu_s: CPU seconds of the training process.
        threads: How many threads compute in it; 0 = it leaves the cores to others, as one on a GPU does.
    """

    wall_s: float
    cpu_s: float = 0.0
    threads: int = 0


def step_cost(steps: Sequence[Step], torch_threads: int) -> StepCost:
    """Return what a step takes: the lower quartiles, so that validation and checkpoints do not count."""
    wall_s = max(1e-6, _lower_quartile([step.step_s for step in steps]))
    cpu_s = _lower_quartile([step.cpu_s for step in steps])
    busy = cpu_s / wall_s
    threads = 0 if busy < _BUSY_SHARE * torch_threads else max(1, math.ceil(busy - 0.1))
    return StepCost(wall_s=wall_s, cpu_s=cpu_s, threads=threads)


def _lower_quartile(values: Sequence[float]) -> float:
    return quantiles(values, n=4)[0] if len(values) > 1 else values[0]


def settled(steps: Sequence[Step]) -> Sequence[Step]:
    """Return the steps without the first ones, as long as some are left."""
    return steps[_WARM_UP_STEPS:] or steps


def step_to_step_s(steps: Sequence[Step]) -> float:
    """Return the seconds from step to step: the mean wait, and the median of the rest."""
    return mean(step.wait_s for step in steps) + median(step.step_s for step in steps)


def wait_share(steps: Sequence[Step]) -> float:
    """Return the part of the time in which a step waits for its batch."""
    return mean(step.wait_s for step in steps) / max(1e-9, step_to_step_s(steps))


def why_no_search(steps: Sequence[Step]) -> str | None:
    """Return why no settings can make training faster; ``None`` if some can."""
    step_s, wait_s = step_to_step_s(steps), mean(step.wait_s for step in steps)
    if step_s > MIN_CEILING * (step_s - wait_s):
        return None
    return (
        f"Training waits {format_duration(wait_s)} of {format_duration(step_s)} a step for data: no settings can make "
        f"it {100 * (MIN_CEILING - 1):.0f} % faster."
    )


def is_slower(steps: Sequence[Step], before: Sequence[Step]) -> bool:
    """Return whether real steps take longer than those before, by more than counts as equal."""
    return step_to_step_s(steps) > (1 + TOLERANCE) * step_to_step_s(before)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderCase:
    """What does not change during a search.

    Attributes:
        original: The settings of the loader as it is.
        cost: What a batch costs one worker to load.
        step: What a step takes.
        host: What the host grants.
        cuda: Whether batches go to an NVIDIA GPU.
        epoch_steps: Steps in an epoch; ``None`` if that is unknown, or workers cannot live on between epochs.
    """

    original: LoaderSettings
    cost: LoadCost
    step: StepCost
    host: HostBudget
    cuda: bool
    epoch_steps: int | None = None


def plan(case: LoaderCase) -> LoaderPlan:
    """Return the settings that the costs alone promise."""
    step = case.step
    busy = step.cpu_s / step.wall_s if step.threads else 0.0
    return plan_loader(case.original, case.cost, step_s=step.wall_s, host=case.host, cuda=case.cuda, step_cores=busy)


def max_workers(case: LoaderCase) -> int:
    """Return how many workers are worth a try here."""
    cores = case.host.cores / case.host.local_ranks
    computing = (case.cost.cpu_s or 0.0) / case.cost.wall_s
    most = math.ceil(cores / max(computing, 1 / _WORKERS_PER_CORE))
    fit = plan(case).most_workers
    return most if fit is None else min(most, fit)


def next_trial(case: LoaderCase, trials: Sequence[LoaderTrial]) -> LoaderSettings | None:
    """Return the settings to try next; ``None`` if there is nothing left to find out.

    First the original settings, if they have workers, then as many workers as predicted, twice and half as many. What
    still waits for data then gets more workers, or a longer queue. What is close to the best is tried again.
    """
    failed = [trial.settings.num_workers for trial in trials if trial.failed is not None]
    if len(failed) >= _MAX_FAILURES:
        return None
    most = min([max_workers(case), *(count - 1 for count in failed)])
    planned = plan(case)
    count = min(most, max(1, planned.settings.num_workers or planned.workers_needed))
    counts = [count, min(most, 2 * count), math.ceil(count / 2)]
    wanted = [_with_workers(case, workers) for workers in counts if 0 < workers <= most]
    if case.original.num_workers:
        wanted.insert(0, case.original)
    for settings in [*wanted, *_further(case, trials, most)]:
        if not any(_alike(trial.settings, settings) for trial in trials):
            return settings
    return _again(case, trials)


def _further(case: LoaderCase, trials: Sequence[LoaderTrial], most: int) -> list[LoaderSettings]:
    """Return what may be faster than the best so far, where that still waits for data."""
    best = _best(trials)
    if best is None or not best.settings.num_workers or _seconds(best) < MIN_CEILING * (_seconds(best) - best.wait_s):
        return []
    workers, tried = best.settings.num_workers, {trial.settings.num_workers for trial in trials}
    further = []
    if workers == max(tried) and workers < most:
        further.append(_with_workers(case, min(most, 2 * workers)))
    if workers <= most_workers_in_shm(case.cost, case.host, _DEEP_PREFETCH) and not case.step.threads:
        further.append(replace(best.settings, prefetch_factor=_DEEP_PREFETCH))
    return further


def _again(case: LoaderCase, trials: Sequence[LoaderTrial]) -> LoaderSettings | None:
    """Return the best, or what could do with fewer workers, if it was tried only once: the last one first."""
    best = _best(trials)
    if best is None:
        return None
    close = [one for one in combined(trials) if one.measured and _seconds(one) <= _CLOSE * _seconds(best)]
    fewest = min(close, key=lambda one: one.settings.num_workers, default=None)
    for one in reversed(close):
        tried = sum(_alike(trial.settings, one.settings) for trial in trials)
        if tried == 1 and (_alike(one.settings, best.settings) or one is fewest):
            return one.settings
    return None


def choose(case: LoaderCase, trials: Sequence[LoaderTrial]) -> tuple[LoaderSettings, str]:
    """Return the settings to use, and why: the fewest workers within 3 % of the best.

    Where the original settings are nearly as fast, they stay.
    """
    best, original = _best(trials), trial_of(trials, case.original)
    failures = [trial.failed for trial in trials if trial.failed is not None]
    if best is None or original is None or not any(one.measured for one in combined(trials)):
        why = f"Nothing could be tried: {failures[0]}" if failures else "There was no time to try anything"
        return case.original, f"{why}."
    good = [one for one in combined(trials) if _seconds(one) <= (1 + TOLERANCE) * _seconds(best)]
    chosen = min(good, key=lambda one: (one.settings.num_workers, one.settings.prefetch_factor or 0))
    needed = _MIN_GAIN_ON_CPU if case.step.threads else 1 + TOLERANCE
    speeds = f"{1 / _seconds(chosen):.3g} batches/s against {1 / _seconds(original):.3g} with the original settings"
    if _seconds(original) >= needed * _seconds(chosen):
        return _in_use(case, trials, chosen.settings), f"{speeds}. {_limit(case, chosen)}".strip()
    if failures:
        reason = f"The original settings stay, because others failed: {failures[0]}."
    elif chosen is not original and case.step.threads and _seconds(original) > (1 + TOLERANCE) * _seconds(chosen):
        reason = (
            f"num_workers={chosen.settings.num_workers} promises {speeds}. The training step needs the cores, too, so "
            f"less than {100 * (_MIN_GAIN_ON_CPU - 1):.0f} % is not certain enough."
        )
    else:
        reason = f"No other settings came out more than {100 * TOLERANCE:.0f} % faster."
    return case.original, f"{reason} {_limit(case, original)}".strip()


def _limit(case: LoaderCase, chosen: LoaderTrial) -> str:
    """Return what keeps training from running as fast as its step, as a sentence; nothing if nothing does."""
    fed, planned = min(1.0, case.step.wall_s / _seconds(chosen)), plan(case)
    if fed > 1 / MIN_CEILING or planned.limited_by is None:
        return ""
    needed = planned.workers_needed
    step = f", a step {format_duration(case.step.cpu_s)}," if case.step.threads else ""
    return {
        "cores": f"The CPU is the limit: the step runs at most {100 * fed:.0f} % of the time. Loading a batch takes "
        f"{format_duration(case.cost.cpu_s or 0.0)} of CPU time{step} and this job has {case.host.cores:g} cores.",
        "shm": f"/dev/shm has no room for the batches of the {needed} workers that would feed the step.",
        "memory": f"There is no memory for the {needed} workers that would feed the step.",
    }[planned.limited_by]


def _in_use(case: LoaderCase, trials: Sequence[LoaderTrial], settings: LoaderSettings) -> LoaderSettings:
    """Return the settings with what is not tried: rules of thumb decide on living workers and pinned memory."""
    if not settings.num_workers:
        return settings
    start_s = max((trial.start_s for trial in trials if trial.start_s is not None), default=0.0)
    worth_it = case.epoch_steps is not None and start_s > _PERSISTENT_FROM * case.epoch_steps * case.step.wall_s
    return replace(
        settings,
        persistent_workers=case.original.persistent_workers or worth_it,
        pin_memory=case.original.pin_memory or case.cuda,
    )


def _with_workers(case: LoaderCase, count: int) -> LoaderSettings:
    return replace(
        case.original,
        num_workers=count,
        prefetch_factor=plan(case).settings.prefetch_factor or case.original.prefetch_factor or 2,
        persistent_workers=False,
    )


def _alike(one: LoaderSettings, other: LoaderSettings) -> bool:
    return (one.num_workers, one.prefetch_factor) == (other.num_workers, other.prefetch_factor)


def _best(trials: Sequence[LoaderTrial]) -> LoaderTrial | None:
    return min(combined(trials), key=_seconds, default=None)


def _seconds(trial: LoaderTrial) -> float:
    return math.inf if trial.batch_s is None else trial.batch_s
