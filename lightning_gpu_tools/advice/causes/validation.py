"""validation: validation takes long and leaves the GPU idle.

Compares its share of the time with the usual one. On a GPU, only time during which the GPU was idle counts. The only
validation of a run does not count.
"""

from __future__ import annotations

from collections.abc import Iterator

from lightning_gpu_tools.advice.cause import Cause
from lightning_gpu_tools.advice.examples import STEP, cpu_run
from lightning_gpu_tools.advice.findings import MIN_UTILIZATION_PERCENT, Finding, counted
from lightning_gpu_tools.advice.host_phases import seconds_of, times_less
from lightning_gpu_tools.training.run_measurements import VALIDATION, RunMeasurements

# Our defaults.
MAX_USUAL = 0.25  # of the wall time; with 20 % as many samples, forward alone takes about 7 %
_USUAL = 0.10  # of the wall time, after the change in the advice
_MAX_EPOCHS_APART = 10  # the most in the advice: noticing overfitting later wastes time


def find(run: RunMeasurements) -> Iterator[Finding]:
    seconds = run.phase_s.get(VALIDATION, 0.0)
    taken = min(seconds / run.wall_s, 1.0) if run.wall_s > 0 else 0.0
    busy = run.validation_utilization_percent
    if taken < MAX_USUAL or (busy is not None and busy >= MIN_UTILIZATION_PERCENT) or run.validations == 1:
        return
    evidence = {**seconds_of(run, seconds), "wall_percent": 100 * taken, "gpu_busy_percent": busy}
    fewer = "limit_val_batches=..." if run.has_trainer else "fewer batches"
    advice = f"{_rarer(run, taken)}Use less validation data ({fewer}), and set num_workers of its DataLoader."
    yield counted("validation", taken * (1 - (busy or 0.0) / 100), evidence, advice)


def _rarer(run: RunMeasurements, taken: float) -> str:
    """Return advice that brings validation to its usual share, before a space; empty if there is none."""
    times = times_less(taken, _USUAL)
    if not run.has_trainer or not run.validations or not run.epoch_steps:
        return "" if run.has_trainer else f"Validate {min(times, _MAX_EPOCHS_APART)} times less often. "
    steps = round(run.steps / run.validations)
    if steps < run.epoch_steps:  # within epochs
        rarely = min(times * steps, run.epoch_steps)
        return f"Validate less often: Trainer(val_check_interval={rarely if rarely < run.epoch_steps else '1.0'}). "
    epochs = min(times, _MAX_EPOCHS_APART)
    return f"Validate less often: Trainer(check_val_every_n_epoch={epochs}). " if run.epochs >= 2 * epochs else ""


CAUSE = Cause(
    begins="Validation takes",
    says="Validation takes ...",
    change="`check_val_every_n_epoch` or `val_check_interval`, if there are enough epochs; fewer batches; "
    "`num_workers`",
    find=find,
    phases=[VALIDATION],
    verified_on="cpu",
    sick=cpu_run({"validation": 50, **STEP}),
    healthy=cpu_run({"validation": 12, **STEP}),
)
