"""What the host does beside the step and its data: callbacks, loggers, checkpoints, validation, the start of epochs.

Each is timed whole, so that its share is a count and no estimate.
"""

from __future__ import annotations

from lightning_gpu_tools.advice.findings import Cause, Finding, counted
from lightning_gpu_tools.training.run_measurements import COPY, VALIDATION, LoaderSettings, RunMeasurements
from lightning_gpu_tools.units import printable

# A choice: validation is asked for by the user, so it is named only beyond a quarter of the wall time. After each
# epoch, on a fifth as many samples as there are to train on and without a backward pass, it takes some 7 %.
_MUCH_VALIDATION = 0.25
# As for training; where SageMaker's LowGPUUtilization rule draws the line.
_BUSY_PERCENT = 70.0

_ADVICE: dict[Cause, str] = {
    "callback": "Let {name} do its work {times} times less often, or make it cheaper.",
    "logging": "Log less often: Trainer(log_every_n_steps={rarely}); {name} writes while training waits.",
    "checkpoint": "Save {times} times less often (ModelCheckpoint(every_n_train_steps=... or every_n_epochs=...)), or "
    "save in the background with AsyncCheckpointIO(PortableCheckpointIO()).",
    "epoch_start": "Make epochs longer{keep_workers}.",
}
_KEEP_WORKERS = ", or keep the loader's workers between them (persistent_workers=True)"
# Called this many times less often, the cause takes 2 % of the time; what a gain must exceed to be worth a word.
_REST_SHARE = 0.02


def host_work(run: RunMeasurements) -> list[Finding]:
    """Return a finding for each callback, logger, ... that takes time."""
    found = []
    for phase, seconds in run.phase_s.items():
        cause, _, name = phase.partition("/")
        for known, advice in _ADVICE.items():
            if cause == known:
                share = min(run.lost_share(phase), run.idle_share)
                evidence: dict[str, float | str] = {"seconds": seconds, "ms_per_step": seconds / run.steps * 1e3}
                if name:
                    evidence["name"] = name
                times = _times_less(share)
                rarely = _round_up(times * max(1, run.log_every_n_steps))
                keep_workers = _KEEP_WORKERS if _ends_its_workers(run.loader) else ""
                found.append(
                    counted(
                        known,
                        share,
                        evidence=evidence,
                        advice=advice.format(
                            name=printable(name), times=times, rarely=rarely, keep_workers=keep_workers
                        ),
                    )
                )
    return [*found, *_validation(run), *_copy_on_the_host(run)]


def _times_less(share: float) -> int:
    """Return how many times less often something must happen so that it takes no more than 2 % of the time."""
    if share >= 1:
        return 1000
    per_work = share / (1 - share)
    return max(2, round(per_work * (1 - _REST_SHARE) / _REST_SHARE + 0.5))


def _round_up(steps: int) -> int:
    """Return a round number of steps for ``log_every_n_steps``, at least Lightning's own default of 50."""
    return max(50, -(-steps // 50) * 50)


def _ends_its_workers(loader: LoaderSettings | None) -> bool:
    return loader is not None and loader.num_workers > 0 and not loader.persistent_workers


def _validation(run: RunMeasurements) -> list[Finding]:
    seconds = run.phase_s.get(VALIDATION, 0.0)
    taken = min(seconds / run.wall_s, 1.0)
    busy = run.validation_utilization_percent
    if taken < _MUCH_VALIDATION or (busy is not None and busy >= _BUSY_PERCENT):
        return []
    idle = taken if busy is None else taken * (1 - busy / 100)
    evidence: dict[str, float | str] = {
        "seconds": seconds,
        "ms_per_step": seconds / run.steps * 1e3,
        "wall_percent": 100 * taken,
    }
    if busy is not None:
        evidence["gpu_busy_percent"] = busy
    return [
        counted(
            "validation",
            idle,
            evidence=evidence,
            advice=f"Validate {_times_less(taken)} times less often (Trainer(val_check_interval=... or "
            "check_val_every_n_epoch=...)), on fewer batches (limit_val_batches=...), and give the validation "
            "DataLoader workers, too.",
        )
    ]


def _copy_on_the_host(run: RunMeasurements) -> list[Finding]:
    """Without a GPU nothing is copied, so what takes time there are the user's own hooks."""
    seconds = run.phase_s.get(COPY, 0.0)
    if run.on_gpu or seconds <= 0:
        return []
    share = min(seconds / run.wall_s, 1.0)
    return [
        counted(
            "host_to_device_copy",
            share,
            evidence={"seconds": seconds, "ms_per_step": seconds / run.steps * 1e3},
            advice="Make the transfer hooks cheaper (transfer_batch_to_device, on_after_batch_transfer), or do their "
            "work in the dataset, where workers do it beside the training step.",
        )
    ]
