"""Host work around the step, timed as a whole: callbacks, loggers, checkpoints, validation, and what has no name."""

from __future__ import annotations

import math

from lightning_gpu_tools.advice.findings import (
    FIND_FUNCTION,
    MIN_UTILIZATION_PERCENT,
    Cause,
    Evidence,
    Finding,
    counted,
)
from lightning_gpu_tools.training.phases import OUTSIDE_LOOP, TRAINER, UNEXPLAINED, base_phase
from lightning_gpu_tools.training.run_measurements import COPY, TRAINING_STEP, VALIDATION, RunMeasurements
from lightning_gpu_tools.units import printable

# Our defaults.
_MAX_VALIDATION = 0.25  # of the wall time; on a fifth as many samples, forward alone takes some 7 %
_MAX_UNNAMED = 0.10  # from here on, no run is healthy
# Lightning 2.6 takes 0.2 to 0.5 ms of its own around a step, and more where cores are few. No setting changes it.
_USUAL_TRAINER_S = 0.001
_REST_SHARE = 0.02  # that the advised change leaves to the cause; a smaller gain is not worth reporting

_ADVICE: dict[Cause, str] = {
    "callback": "Run {name} {times} times less often, or make it cheaper.",
    "logging": "Log less often: Trainer(log_every_n_steps={rarely}). Training waits while {name} writes.",
    "checkpoint": "Save {times} times less often (ModelCheckpoint(every_n_train_steps=... or every_n_epochs=...)), or "
    "save in the background with AsyncCheckpointIO(PortableCheckpointIO()).",
    "garbage_collection": "Call gc.collect() and gc.freeze() once before training: later collections then skip what "
    "exists. Where the program calls gc.collect() itself, call it {times} times less often.",
    "epoch_start": "Make epochs longer{keep_workers}.",
    # Without a GPU nothing is copied.
    "host_to_device_copy": "Make the transfer hooks cheaper (transfer_batch_to_device, on_after_batch_transfer), or do "
    "their work in the dataset, where workers run it in parallel.",
}
_ADVICE_IN_OWN_LOOP: dict[Cause, str] = {
    **_ADVICE,
    "logging": "Log {times} times less often. Training waits meanwhile.",
    "checkpoint": "Save {times} times less often, or save in the background.",
    "host_to_device_copy": "Make moving the batch cheaper, or do that work in the dataset, where workers run it in "
    "parallel.",
}
# A Trainer calls these by name.
_ADVICE_ON_METHOD = {
    "log": "Pass fewer metrics to self.log, without prog_bar=True, which syncs in every step.",
    "step": 'Step it less often ("interval": "epoch", or "frequency": {times}, in the scheduler\'s configuration), or '
    "make it cheaper.",
    **dict.fromkeys(
        ("optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping"),
        "Make {name} cheaper: it runs in every step.",
    ),
}
_KEEP_WORKERS = ", or keep the loader's workers between epochs (persistent_workers=True)"
_LOGGING_STEPS = 50  # Lightning's default of log_every_n_steps
_NAME_IT = "Write `with run.phase('validation'):` around it if it is validation. "


def host_work(run: RunMeasurements) -> list[Finding]:
    """Return a finding for each callback, logger, ... that takes time."""
    found = []
    by_cause = _ADVICE if run.has_trainer else _ADVICE_IN_OWN_LOOP
    on_method = _ADVICE_ON_METHOD if run.has_trainer else {}
    ends_workers = run.loader is not None and run.loader.num_workers > 0 and not run.loader.persistent_workers
    for phase, seconds in run.phase_s.items():
        group, _, name = phase.partition("/")
        if group not in by_cause or (group == COPY and run.on_gpu):  # see inside_step
            continue
        share = min(run.lost_share(phase), run.idle_share)
        times = _times_less(share)
        advice = on_method.get(name.partition(".")[2], by_cause[group]).format(
            name=printable(name or group),
            times=times,
            rarely=_LOGGING_STEPS * math.ceil(times * max(1, run.log_every_n_steps) / _LOGGING_STEPS),
            keep_workers=_KEEP_WORKERS if ends_workers else "",
        )
        found.append(counted(group, share, {**_seconds(run, seconds), "name": name or None}, advice))
    return [*found, *_validation(run)]


def unnamed(run: RunMeasurements) -> list[Finding]:
    """Return a finding for each long line of the time tree that says nothing of what runs there."""
    trainers = _USUAL_TRAINER_S / run.step_s
    usual = {UNEXPLAINED: 0.0, OUTSIDE_LOOP: 0.0, TRAINER: trainers}
    # The rest of the step, where its parts are known. What a GPU loses in it has findings of its own.
    if not run.on_gpu and any(base_phase(phase) == TRAINING_STEP != phase for phase in run.phase_s):
        usual[TRAINING_STEP] = trainers
    shares = {phase: min(run.lost_share(phase), run.idle_share) for phase in usual}
    return [
        counted(
            "unexplained",
            share,
            {"phase": phase, **_seconds(run, run.phase_s[phase])},
            (_NAME_IT if phase == OUTSIDE_LOOP else "") + FIND_FUNCTION,
            avoidable=share - usual[phase],
        )
        for phase, share in shares.items()
        if share - usual[phase] > _MAX_UNNAMED
    ]


def _seconds(run: RunMeasurements, seconds: float) -> Evidence:
    return {"seconds": seconds, "ms_per_step": seconds / run.steps * 1e3}


def _times_less(share: float) -> int:
    """Return how many times less often something must happen to take no more than 2 % of the time."""
    if share >= 1:
        return 1000
    per_work = share / (1 - share)
    return max(2, round(per_work * (1 - _REST_SHARE) / _REST_SHARE + 0.5))


def _validation(run: RunMeasurements) -> list[Finding]:
    seconds = run.phase_s.get(VALIDATION, 0.0)
    taken = min(seconds / run.wall_s, 1.0)
    busy = run.validation_utilization_percent
    if taken < _MAX_VALIDATION or (busy is not None and busy >= MIN_UTILIZATION_PERCENT):
        return []
    times = f"Validate {_times_less(taken)} times less often"
    change = f"{times} and on fewer batches."
    if run.has_trainer:
        change = (
            f"{times} (Trainer(val_check_interval=... or check_val_every_n_epoch=...)) and on fewer batches "
            "(limit_val_batches=...)."
        )
    evidence = {**_seconds(run, seconds), "wall_percent": 100 * taken, "gpu_busy_percent": busy}
    advice = f"{change} Give the validation DataLoader workers, too."
    return [counted("validation", taken * (1 - (busy or 0.0) / 100), evidence, advice)]
