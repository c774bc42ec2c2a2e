"""validation: validation takes long and leaves the GPU idle.

Compares its share of the time with the usual one. On a GPU, only time during which the GPU was idle counts. A run with
a single validation is not judged. Starting the workers of its loader and waiting for its batches are timed.
"""

import math

from lightning_gpu_tools.advice.causes.time.epoch_start import MIN_EPOCHS
from lightning_gpu_tools.advice.findings import MIN_UTILIZATION_PERCENT, Cause, Finding, Findings, Variant
from lightning_gpu_tools.advice.lost_time import lost_time, times_less
from lightning_gpu_tools.advice.workers import most_workers, obstacles
from lightning_gpu_tools.training.run_measurements import VALIDATION, RunMeasurements
from lightning_gpu_tools.units import plural

# Our defaults.
MAX_USUAL = 0.25  # of the wall time; with 20% as many samples, forward alone takes about 7%
_USUAL = 0.10  # of the wall time, after the change in the advice
_MAX_EPOCHS_APART = 10  # the most in the advice: noticing overfitting later wastes time
_MIN_LOADER_SHARE = 0.5  # of validation: from here on, the advice is to change its loader


def find(run: RunMeasurements) -> Findings:
    seconds = run.phase_s.get(VALIDATION, 0.0)
    if not seconds:
        return
    taken, busy = min(seconds / run.wall_s, 1.0), run.validation_utilization_percent
    started, waited = (min(1.0, part_s / seconds) for part_s in (run.validation_start_s, run.validation_wait_s))
    loaders = run.validation_loaders
    restarted = [settings.num_workers for settings in loaders if not settings.persistent_workers]
    advice = _less(run, taken)
    if sum(restarted) and started >= _MIN_LOADER_SHARE:
        most = max(restarted)
        advice = (
            f"Each validation spends {100 * started:.0f}% of its time starting {plural(sum(restarted), 'worker')}. "
            f"Keep those of the validation loader: DataLoader(..., num_workers={most}, persistent_workers=True) "
            f"(now {most}, False)."
        )
    elif loaders and not any(settings.num_workers for settings in loaders) and waited >= _MIN_LOADER_SHARE:
        advice = f"{_workers(run, waited)} {advice}"
    idle = taken * (1 - (busy or 0.0) / 100)
    yield lost_time(run, idle, "Validation takes", advice, phase=VALIDATION, has_lines=True)


def why_not(run: RunMeasurements, finding: Finding) -> str:
    busy = run.validation_utilization_percent
    if busy is not None and busy >= MIN_UTILIZATION_PERCENT:
        return f"the GPU is busy {busy:.0f}% of that time"
    if run.phase_s[VALIDATION] < MAX_USUAL * run.wall_s:
        return f"less than {100 * MAX_USUAL:.0f}% is usual"
    return "the run has only one" if run.validations == 1 else ""


def _workers(run: RunMeasurements, waited: float) -> str:
    """Return how many workers would load the batches of validation while it computes, and what to change first."""
    cores = max(1, math.floor(run.host.cores / run.host.local_ranks))
    workers = min(cores, math.ceil(waited / max(1 - waited, 1 / cores)), *map(most_workers, run.validation_facts))
    reasons = " ".join(dict.fromkeys(filter(None, map(obstacles, run.validation_facts))))
    first = f"{reasons} Then set" if reasons else "Set"
    return (
        f"Validation spends {100 * waited:.0f}% of its time waiting for its loader. {first} DataLoader(..., "
        f"num_workers={workers}, persistent_workers=True) for the validation loader (now 0, False)."
    )


def _less(run: RunMeasurements, taken: float) -> str:
    """Return advice that brings validation from this share of the wall time to its usual one."""
    times = times_less(taken, _USUAL)
    if not run.has_trainer:
        return f"Validate {min(times, _MAX_EPOCHS_APART)} times less often, or with fewer batches."
    options, epochs = [], min(times, _MAX_EPOCHS_APART)
    steps = round(run.steps / max(1, run.validations))
    if run.epoch_steps and steps < run.epoch_steps:  # within epochs
        options.append(f"val_check_interval={min(times * steps, run.epoch_steps)}")
    elif run.epoch_steps and run.epochs >= 2 * epochs:
        options.append(f"check_val_every_n_epoch={epochs}")
    batches = run.validation_batches // max(1, run.validations) // max(1, len(run.validation_loaders))
    if batches != 1:
        options.append(f"limit_val_batches={max(1, batches // times) if batches else f'{1 / times:g}'}")
    return f"Validate less: Trainer({') or Trainer('.join(options)})." if options else "Make validation_step faster."


CAUSE = Cause(
    rows=[
        Variant(
            "Validation takes ...",
            "`check_val_every_n_epoch` or `val_check_interval`, if there are enough epochs; `limit_val_batches`",
        ),
        Variant(
            "Each validation spends ...% of its time starting ... workers",
            "`persistent_workers=True` for the validation loader",
        ),
        Variant("Validation spends ...% of its time waiting for its loader", "the `num_workers` in the advice"),
    ],
    find=find,
    why_not=why_not,
    ignores_min_cost=True,
    is_judged_early=lambda run: run.validations >= MIN_EPOCHS,
    verified_on="cpu",
)
