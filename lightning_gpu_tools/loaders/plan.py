"""The choice of DataLoader settings to try and to use, based on measurements alone."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean, median, stdev
from typing import NamedTuple

from lightning_gpu_tools.advice.findings import MIN_CEILING
from lightning_gpu_tools.advice.loader_plan import (
    TOLERANCE,
    LoadCost,
    LoaderPlan,
    as_tried,
    combined,
    most_workers_in_shm,
    plan_loader,
    trial_of,
)
from lightning_gpu_tools.host import HostBudget
from lightning_gpu_tools.training.run_measurements import LoaderSettings, LoaderTrial
from lightning_gpu_tools.units import format_duration

# Even a run of 120 steps must benefit from the search. The first steps are slower than the others.
STUDY_STEPS = 25
WARM_UP_STEPS = 5
CONFIRM_STEPS = 100  # our default: workers deliver batches in bursts
# After waits for batches, steps were up to a quarter slower (measured on two cores). Predictions have room for half.
_SLOWER_AFTER_WAITS = 1.12
# A step on the CPU competes with the workers for cores. Predictions are then off by 15% (median over 30 cases).
_MIN_GAIN_ON_CPU = 1.15
# A step counts as busy on the CPU from a quarter of torch's threads: a thread that waits for a GPU spins on one core.
_BUSY_SHARE = 0.25
_WORKERS_PER_CORE = 4  # our default for workers that only wait
_DEEP_PREFETCH = 8  # for bursts of slow batches; more did not help in any measured case
# Two trials of the same settings differ by 2 to 4% (measured), so settings this close to the best may be as good. They
# are tried three times.
_CLOSE = 1.10
_TRIALS_OF_CLOSE = 3
_REPRODUCED = 0.10  # our default: trials that differ from training by more than this, beyond the noise, are not used
_MAX_FAILURES = 2  # our default: after that, the number of workers is not the problem


class Step(NamedTuple):
    """One step, or the cost of all steps."""

    step_s: float  # time from its batch until the next one was requested
    cpu_s: float = 0.0  # CPU seconds of this process during step_s
    wait_s: float = 0.0  # wait for its batch
    threads: int = 0  # number of computing threads; 0 = the step leaves the cores free, like a step on a GPU
    error_s: float | None = None  # of wait_s + step_s; None if training was not measured

    @property
    def total_s(self) -> float:
        """The time from batch to batch."""
        return self.wait_s + self.step_s

    @property
    def wait_share(self) -> float:
        """The share of time spent waiting for batches."""
        return self.wait_s / self.total_s


def ramp_up(settings: LoaderSettings) -> int:
    """Return the number of batches that may have been loaded before the first step, plus two."""
    return settings.num_workers * (1 + (settings.prefetch_factor or 0)) + 2


def step_cost(steps: Sequence[Step], torch_threads: int, settings: LoaderSettings) -> Step:
    """Return the cost of the first steps with these settings: the median time of a step, and the mean wait before it.

    Validation and checkpoints do not change the median.
    """
    study = steps[WARM_UP_STEPS:] or steps
    steps_s = sorted(step.step_s for step in study)
    step_s, cpu_s = max(1e-6, median(steps_s)), median(step.cpu_s for step in study)
    busy = cpu_s / step_s
    threads = 0 if busy < _BUSY_SHARE * torch_threads else max(1, math.ceil(busy - 0.1))
    waits_s, error_s = [step.wait_s for step in study[max(0, ramp_up(settings) - WARM_UP_STEPS) :]], None
    if len(waits_s) > 1:  # the 95% interval of the wait, and the spread of the steps
        error_s = 2 * stdev(waits_s) / len(waits_s) ** 0.5 + step_s - steps_s[len(steps_s) // 4]
    return Step(step_s, cpu_s, mean(waits_s or [0.0]), threads, error_s)


def why_no_search(step: Step) -> str | None:
    """Return the reason that no settings can make training faster; ``None`` if some can."""
    if step.total_s > MIN_CEILING * step.step_s:
        return None
    return (
        f"Training waits only {format_duration(step.wait_s)} of a {format_duration(step.total_s)} step for data. No "
        f"settings can make it {100 * (MIN_CEILING - 1):.0f}% faster."
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderCase:
    """The fixed facts of a search."""

    original: LoaderSettings
    cost: LoadCost
    step: Step
    host: HostBudget
    cuda: bool  # whether batches go to an NVIDIA GPU
    can_persist: bool = True  # whether workers can outlive an epoch

    @property
    def plan(self) -> LoaderPlan:
        """The plan that the costs alone suggest."""
        step = self.step
        cores = step.cpu_s / step.step_s if step.threads else 0.0
        step_s = step.step_s if step.error_s is None else step.step_s / _SLOWER_AFTER_WAITS
        return plan_loader(self.original, self.cost, step_s=step_s, host=self.host, cuda=self.cuda, step_cores=cores)


def max_workers(case: LoaderCase) -> int:
    """Return the largest number of workers that is worth a trial.

    One more than the cores is worthwhile: while one worker passes on its batch, another one computes.
    """
    cores = case.host.cores / case.host.local_ranks
    computing = min(1.0, (case.cost.cpu_s or 0.0) / case.cost.wall_s)
    most = min(math.ceil(_WORKERS_PER_CORE * cores), int(cores / max(computing, 1e-9)) + 1)
    return int(min(most, case.plan.most_workers))


def next_trial(case: LoaderCase, trials: Sequence[LoaderTrial]) -> LoaderSettings | None:
    """Return the settings to try next; ``None`` if there is nothing left to find out.

    The order is: the original settings, if they have workers; then the predicted number of workers, twice as many, and
    half as many. If the best of these still waits, more workers or a longer queue. Finally, if they are close,
    repetitions of the best, the choice, and those between the prediction and it, in turns. The search ends if three
    trials of the original settings do not reproduce the speed of training.
    """
    failed = [trial.settings.num_workers for trial in trials if trial.failed is not None]
    if len(failed) >= _MAX_FAILURES:
        return None
    most = min([max_workers(case), *(count - 1 for count in failed)])
    count = min(most, max(1, case.plan.settings.num_workers or case.plan.workers_needed))
    counts = (count, min(most, 2 * count), math.ceil(count / 2)) if count else ()
    wanted = [_with_workers(case, workers) for workers in counts]
    if case.original.num_workers:
        wanted.insert(0, case.original)
    tried = Counter(as_tried(trial.settings) for trial in trials)
    if why_unsure(case, trials) is not None:
        again = case.original.num_workers and tried[as_tried(case.original)] < _TRIALS_OF_CLOSE
        return case.original if again else None
    best = min(combined(trials), key=_seconds)
    workers = best.settings.num_workers
    if workers and _seconds(best) >= MIN_CEILING * (_seconds(best) - best.wait_s):
        if workers == max(trial.settings.num_workers for trial in trials) and workers < most:
            wanted.append(_with_workers(case, min(most, 2 * workers)))
        if workers <= most_workers_in_shm(case.cost, case.host, _DEEP_PREFETCH) and not case.step.threads:
            wanted.append(replace(best.settings, prefetch_factor=_DEEP_PREFETCH))
    for settings in wanted:
        if as_tried(settings) not in tried:
            return settings
    known = [trial for trial in combined(trials) if trial.measured]
    if not known:
        return None
    best_s, chosen = min(map(_seconds, known)), _preferred(case, known)
    most = chosen.settings.num_workers
    fewest = min(most, case.plan.settings.num_workers)
    rivals = [
        trial.settings
        for trial in known
        if _seconds(trial) == best_s
        or (_seconds(trial) <= _CLOSE * best_s and fewest <= trial.settings.num_workers <= most)
    ]
    rivals = [settings for settings in rivals if tried[as_tried(settings)] < _TRIALS_OF_CLOSE and len(rivals) > 1]
    return min(rivals, key=lambda settings: tried[as_tried(settings)], default=None)


def _preferred(case: LoaderCase, known: Sequence[LoaderTrial]) -> LoaderTrial:
    """Return the fewest workers within 3% of the best; below the prediction only if none of these has as many."""
    good = [trial for trial in known if _seconds(trial) <= (1 + TOLERANCE) * min(map(_seconds, known))]
    enough = [trial for trial in good if trial.settings.num_workers >= case.plan.settings.num_workers]
    return min(enough or good, key=lambda trial: (trial.settings.num_workers, trial.settings.prefetch_factor or 0))


def why_unsure(case: LoaderCase, trials: Sequence[LoaderTrial]) -> str | None:
    """Return how the trial of the original settings differs from training; ``None`` if it reproduces its speed."""
    original = trial_of(trials, case.original)
    if original is None or case.step.error_s is None:
        return None
    # Without workers, the trial waits as long as training, so that only the steps differ.
    of_s = _seconds(original) if case.original.num_workers else case.step.step_s
    trained_s = case.step.total_s
    if abs(_seconds(original) - trained_s) <= _REPRODUCED * of_s + case.step.error_s:
        return None
    return (
        "The trials are not reliable, so the original settings are kept. With these, training took "
        f"{format_duration(trained_s)} from batch to batch, but a trial took {format_duration(_seconds(original))}."
    )


def choose(case: LoaderCase, trials: Sequence[LoaderTrial]) -> tuple[LoaderSettings, str]:
    """Return the settings to use and the reason: the fewest workers within 3% of the best, if worth a change."""
    known, original = combined(trials), trial_of(trials, case.original)
    if (unsure := why_unsure(case, trials)) is not None:
        return case.original, unsure
    failures = [trial.failed for trial in trials if trial.failed is not None]
    if original is None or not any(trial.measured for trial in known):
        why = f"No settings could be tried: {failures[0]}" if failures else "The time budget was too short"
        return case.original, f"{why}."
    chosen = _preferred(case, known)
    needed = _MIN_GAIN_ON_CPU if case.step.threads else 1 + TOLERANCE
    if _seconds(original) >= needed * _seconds(chosen):
        speeds = f"{1 / _seconds(chosen):.3g} batches/s instead of {1 / _seconds(original):.3g}"
        reason, count = f"{speeds} with the original settings.", chosen.settings.num_workers
        # Persistent workers and pinned memory are not tried, but set by rules of thumb.
        persistent, pinned = case.original.persistent_workers or case.can_persist, case.original.pin_memory or case.cuda
        in_use = replace(chosen.settings, persistent_workers=persistent, pin_memory=pinned)
        return in_use if count else chosen.settings, reason
    if failures:
        return case.original, f"The original settings are kept, because other settings failed: {failures[0]}."
    less = " The training step also uses the CPU, so a smaller gain is uncertain." if case.step.threads else ""
    return case.original, f"No other settings were more than {100 * (needed - 1):.0f}% faster.{less}"


def _with_workers(case: LoaderCase, count: int) -> LoaderSettings:
    return replace(
        case.original,
        num_workers=count,
        prefetch_factor=case.plan.settings.prefetch_factor or case.original.prefetch_factor or 2,
        persistent_workers=False,
    )


def _seconds(trial: LoaderTrial) -> float:
    return math.inf if trial.batch_s is None else trial.batch_s
