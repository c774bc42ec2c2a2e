"""The callbacks that measure a run of a Trainer: one reports where time went, the other warns of low utilization."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Literal

from typing_extensions import override

from lightning_gpu_tools.advice.findings import MIN_SECONDS, MIN_STEPS, MIN_UTILIZATION_PERCENT, Diagnosis
from lightning_gpu_tools.environment import is_disabled
from lightning_gpu_tools.loaders.workers import deaths_ignored
from lightning_gpu_tools.reports.report import FOLDER_NAME
from lightning_gpu_tools.runs.run_report import RunReporter, check_thresholds, conclude
from lightning_gpu_tools.runs.stall_watch import check_stall_after
from lightning_gpu_tools.trainer.families import GuardedCallback, LightningModule, Trainer, overrides
from lightning_gpu_tools.trainer.fit_session import FitSession
from lightning_gpu_tools.training.run_measurements import Stage
from lightning_gpu_tools.units import check_seconds, checked

# Hooks that Lightning calls in every step. It skips hooks that are not callable, so a callback that does nothing in a
# hook hides it during a run: each call saved is a microsecond.
STEP_HOOKS = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_validation_batch_start",
)
_OF_A_RUN = ("_session", "_advisor", "_reporter", *STEP_HOOKS)  # attributes that are not copied


def _hide_hooks(callback: GuardedCallback) -> None:
    """Hide the hooks in which a callback does nothing."""
    for hook in STEP_HOOKS:
        if not overrides(callback, "Callback", hook):
            setattr(callback, hook, None)


def _show_hooks(callback: GuardedCallback) -> None:
    for hook in STEP_HOOKS:
        with suppress(AttributeError):  # without `vars`, after which CPython no longer caches method lookups
            delattr(callback, hook)


class GPUUtilizationMonitor(GuardedCallback):
    """A callback that samples the GPUs in the background, logs metrics, and reports at the end where the time went.

    Every logger gets the GPUs of rank 0's node at the Trainer's ``log_every_n_steps``, and those of other nodes about
    once a minute in jobs of at most 64 ranks, as ``gpu/<i>/...`` and ``node<n>/gpu/<i>/...``: docs/measurements.md has
    the names. ``i`` is the torch device index; with ``devices="all"``, that of ``nvidia-smi``.

    At the end of a fit, even of a failed one, and at least once a minute, rank 0 writes ``gpu_report.json`` to the log
    directory of the Trainer's logger, or without a logger to the folder ``gpu_report`` of ``default_root_dir``, which
    may be a URL; with the ``plot`` extra, also ``gpu_report.png`` and ``gpu_report.html``. ``validate``, ``test`` and
    ``predict`` have such reports in folders of these names below that one.

    Args:
        interval_s: Seconds between two polls of the driver's buffer, which holds several seconds.
        devices: ``"trainer"`` = the GPUs that the Trainer uses; ``"all"`` = every GPU of the node, even when training
            on the CPU.
        report: Whether to print and write the report.
        stall_after_s: Seconds without progress (a step, a batch, a hook, bytes of a checkpoint) after which to warn
            (:class:`~lightning_gpu_tools.errors.StalledTrainingWarning`) with the phase, the stack, and the rank that
            all others wait for; ``None`` = never. ``"auto"`` is the larger of 60 s and 5 times the longest time without
            progress so far; in the first steps, callbacks, loggers and outside of steps, it is at least 450 s.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: An argument is out of range.

    Example::

        trainer = Trainer(callbacks=[GPUUtilizationMonitor()])
    """

    _session: FitSession | None = None
    _advisor: GPUUtilizationAdvisor | None = None  # of this session
    _reporter: RunReporter | None = None  # of this session

    @checked
    def __init__(
        self,
        *,
        interval_s: float = 1.0,
        devices: Literal["trainer", "all"] = "trainer",
        report: bool = True,
        stall_after_s: float | Literal["auto"] | None = "auto",
    ) -> None:
        check_seconds(interval_s, "interval_s")
        check_stall_after(stall_after_s)
        if devices not in ("trainer", "all"):
            raise ValueError(f'devices must be "trainer" or "all", got {devices!r}.')
        self.interval_s = interval_s
        self.devices = devices
        self.report = report
        self.stall_after_s = stall_after_s

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in _OF_A_RUN}

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        callbacks: Sequence[Any] = trainer.callbacks  # type: ignore[attr-defined]
        if is_disabled() or self.is_superfluous(callbacks):
            return
        self._give_up()  # an earlier run without a teardown
        session = self._session = FitSession.of(trainer, self)
        session.timer.step_ended = self._step_ended
        advisor = self._advisor = GPUUtilizationAdvisor.acting(callbacks)
        if advisor is not None:
            advisor.follow(session)
        _hide_hooks(self)
        folder = None
        if self.report:
            log_dir = trainer.log_dir  # a collective call: every rank makes it
            # Without a logger, log_dir is the folder of everything else.
            own = os.path.join(trainer.default_root_dir, FOLDER_NAME)
            folder, stage = os.fspath(log_dir) if trainer.loggers and log_dir else own, session.run.stage
            folder = folder if stage == "fit" else os.path.join(folder, stage)
        session.monitor(
            devices=self.devices,
            interval_s=self.interval_s,
            stall_after_s=self.stall_after_s,
            folder=folder,
        )
        self._reporter = RunReporter(session, folder, None if advisor is None else advisor._thresholds)

    @override
    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._session is not None:
            self._session.startup.begin_sanity_check()

    @override
    def on_sanity_check_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._session is not None:
            self._session.startup.end_sanity_check()

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin("fit")

    @override
    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin("validate")
        if self._session is not None and self._session.run.stage == "fit":
            self._session.run.note_validation()

    @override
    def on_test_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin("test")

    @override
    def on_predict_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin("predict")

    def _begin(self, stage: Stage) -> None:
        reporter, session = self._reporter, self._session
        if reporter is not None and session is not None and session.run.stage == stage:  # not a fit's validation
            reporter.begin()

    def _step_ended(self, batch: Any) -> None:
        if self._reporter is not None:
            try:
                self._reporter.after_step(batch)
            except Exception as error:
                if not self.survives(error):
                    raise

    @override
    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if self._session is not None and self._session.run.stage == "fit":
            self._session.begin_validation_batch(batch, batch_idx)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self._session is not None and not self._session.is_of_parent:
            with deaths_ignored():
                self._session.note_error(exception, self._session.run.optimizer_steps)
                self._end()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._end()

    def _end(self) -> None:
        if self._session is not None and self._session.is_of_parent:
            self._session = self._reporter = None
            return
        if self._reporter is not None:
            diagnosis = self._reporter.finish()
            if self._advisor is not None:
                self._advisor._diagnosis = diagnosis or self._advisor._diagnosis
        self._give_up()

    @override
    def _give_up(self) -> None:
        session, self._session = self._session, None
        advisor, self._advisor = self._advisor, None
        reporter, self._reporter = self._reporter, None
        _show_hooks(self)
        if advisor is not None:
            advisor.follow(None)
        if session is not None:
            session.release(self)
        if reporter is not None:
            reporter.give_up()


class GPUUtilizationAdvisor(GuardedCallback):
    """A callback that measures where the time of each training step goes, and warns once if too much of it is lost.

    Rank zero gets the warning (:class:`~lightning_gpu_tools.errors.LowGPUUtilizationWarning`), and the report of the
    :class:`~lightning_gpu_tools.GPUUtilizationMonitor` gets the findings. If the Trainer has no monitor, the advisor
    adds one with its defaults. On a GPU, only its idle time counts, and measuring never waits for the GPU. Without one,
    it judges the training step.

    Args:
        min_utilization_percent: Utilization below which a GPU counts as underused; the default of 70 is that of
            SageMaker Debugger's LowGPUUtilization rule.
        min_steps: Steady steps needed for a verdict, 50 by default. The first 20 steps, and the first step of each
            epoch, do not count.
        min_seconds: Seconds of steady steps needed to warn during training, 20 by default. A quarter of that is needed
            for the verdict at the end; a shorter run is ``too_short``.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: An argument is out of range.

    Example::

        trainer = Trainer(callbacks=[GPUUtilizationAdvisor()])
    """

    _session: FitSession | None = None  # of the monitor

    @checked
    def __init__(
        self,
        *,
        min_utilization_percent: float = MIN_UTILIZATION_PERCENT,
        min_steps: int = MIN_STEPS,
        min_seconds: float = MIN_SECONDS,
    ) -> None:
        self._thresholds = check_thresholds(min_utilization_percent, min_steps, min_seconds)
        self.min_utilization_percent = min_utilization_percent
        self.min_steps = min_steps
        self.min_seconds = min_seconds
        self._diagnosis: Diagnosis | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in _OF_A_RUN}

    @property
    def diagnosis(self) -> Diagnosis | None:
        """The diagnosis of the running fit, or of the last one, or of validate, test or predict; ``None`` before."""
        return (conclude(self._session) if self._session is not None else None) or self._diagnosis

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        self.is_superfluous(callbacks)  # which warns
        if GPUUtilizationMonitor.acting(callbacks) is None and self in callbacks and not is_disabled():
            monitor = GPUUtilizationMonitor()
            monitor.yields = True
            callbacks.insert(callbacks.index(self) + 1, monitor)  # Lightning then sets it up after this one

    def follow(self, session: FitSession | None) -> None:
        """Advise during this session of the monitor, or no more."""
        self._session = session
        if session is None:
            _show_hooks(self)
        else:
            _hide_hooks(self)
