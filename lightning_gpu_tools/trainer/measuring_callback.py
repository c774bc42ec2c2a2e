"""The session of a Trainer's run, from ``setup`` to the end, which the monitor and the advisor share."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

from typing_extensions import override

from lightning_gpu_tools.environment import is_disabled
from lightning_gpu_tools.gpus.watch import Phase
from lightning_gpu_tools.loaders.workers import deaths_ignored
from lightning_gpu_tools.patches import Patches
from lightning_gpu_tools.runs.advisor import Advisor
from lightning_gpu_tools.runs.run_report import RunningReport
from lightning_gpu_tools.runs.session import Session
from lightning_gpu_tools.trainer import compat
from lightning_gpu_tools.trainer.facts import TrainerRun, run_of
from lightning_gpu_tools.trainer.families import (
    Callback,
    GuardedCallback,
    LightningModule,
    Trainer,
    lookup,
    overrides,
)
from lightning_gpu_tools.trainer.fit_timer import EvaluationTimer, FitTimer
from lightning_gpu_tools.training.rank_exchange import TIMEOUT_S
from lightning_gpu_tools.training.run_measurements import Stage
from lightning_gpu_tools.training.step_clock import StepClock


class FitSession(Session):
    """A session shared by the callbacks of a fit, validate, test or predict, until it ends or the last one releases it.

    Lightning does not notify every callback of the end: a tuner that raises has removed them, and a callback that
    raises at the end prevents calls of the others. So the session detects the end itself, and notifies the rest.
    """

    run: TrainerRun

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        super().__init__(run_of(trainer), self._make_timer)
        self.advisor: Advisor | None = None
        self.running: RunningReport | None = None  # until it is published
        self._users: list[Callback] = []
        self.acting: list[MeasuringCallback] = []
        self._on_end = Patches()
        calls = lookup(trainer, compat.CALLS)
        self._on_end.put(calls, compat.AFTER_ERROR, self._after_error)
        self._on_end.put(calls, compat.AFTER_RUN, self._after_run)

    @classmethod
    def of(cls, trainer: Trainer, user: Callback) -> FitSession:
        """Return the session of the run that is about to begin."""
        session = _sessions.get(trainer)
        if session is not None and session.clock.ran:  # of the outer run, inside which this one begins
            session._end()
            session = None
        if session is None:
            session = _sessions[trainer] = cls(trainer)
        session._users.append(user)
        if isinstance(user, MeasuringCallback):
            session.acting.append(user)
        return session

    def _make_timer(self, clock: StepClock, enter: Callable[[Phase], None]) -> FitTimer:
        timer = FitTimer if self.run.stage == "fit" else EvaluationTimer
        return timer(self._trainer, clock, self.ending, enter, self.step_ended)

    def step_ended(self, batch: Any) -> None:
        """Act after a step, for all callbacks. This runs in every step, so it makes as few calls as possible."""
        acting = self.acting
        if not acting:
            return
        try:
            self.after_step(batch)
        except Exception as error:
            if not acting[0].survives(error):
                raise
        for user in self.acting:
            if self.clock.steps >= user.next_step or self.report_wanted:
                user.act(self._trainer, self)

    def release(self, user: Callback) -> None:
        """Release the session; its measurements stay readable."""
        self._users = [one for one in self._users if one is not user]
        self.acting = [one for one in self.acting if one is not user]
        for one in self.acting[:1]:
            one.hide_hooks(self)
        if not self._users:
            self._end()

    def _end(self) -> None:
        self._on_end.undo()
        self.close()
        if self.running is not None and not self.is_of_parent:
            self.running.give_up()
        if _sessions.get(self._trainer) is self:
            del _sessions[self._trainer]

    def _after_error(self, interrupt: Callable[..., Any]) -> Callable[..., Any]:
        def interrupted(trainer: Trainer, exception: BaseException, *args: Any, **kwargs: Any) -> Any:
            try:
                return interrupt(trainer, exception, *args, **kwargs)
            finally:  # another callback may have raised
                if trainer is self._trainer:
                    self._end_users(lambda user, model: user.on_exception(trainer, model, exception))

        return interrupted

    def _after_run(self, tear_down: Callable[..., Any]) -> Callable[..., Any]:
        def torn_down(trainer: Trainer, *args: Any, **kwargs: Any) -> Any:
            result = tear_down(trainer, *args, **kwargs)
            if trainer is self._trainer:
                self._end_users(lambda user, model: user.teardown(trainer, model, self.run.stage))
            return result

        return torn_down

    def _end_users(self, end: Callable[[Callback, LightningModule], None]) -> None:
        try:
            for user in tuple(self._users):
                end(user, self._trainer.lightning_module)
        finally:  # even after Ctrl-C
            self._end()


_sessions: WeakKeyDictionary[Trainer, FitSession] = WeakKeyDictionary()


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


class MeasuringCallback(GuardedCallback):
    """A callback that takes part in the session of each run of a Trainer, from ``setup`` to its end."""

    def __init__(self) -> None:
        self._session: FitSession | None = None
        self.next_step = 0.0

    def __getstate__(self) -> dict[str, Any]:
        kept = {name: value for name, value in vars(self).items() if name not in STEP_HOOKS}
        return {**kept, "_session": None}

    def _opened(self, trainer: Trainer, session: FitSession) -> None:
        """Act before the run begins."""

    def _began(self, trainer: Trainer, session: FitSession) -> None:
        """Act when steps are about to begin."""

    def _stepped(self, trainer: Trainer, session: FitSession) -> float:
        """Act after a step; return the clock's step after which to call this again."""
        return math.inf

    def _ended(self, trainer: Trainer, session: FitSession, outcome: str) -> None:
        """Act when the run has ended."""

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        is_superfluous = self.is_superfluous(trainer.callbacks)  # type: ignore[attr-defined]
        if not is_disabled() and not is_superfluous:
            self._give_up()  # an earlier run without a teardown
            self._session = FitSession.of(trainer, self)
            self.hide_hooks(self._session)
            self._opened(trainer, self._session)

    def hide_hooks(self, session: FitSession) -> None:
        """Hide the hooks in which this callback does nothing, or for which another one of the session acts."""
        notes_validation = session.acting[0] is self and session.run.stage == "fit"
        self._show_hooks()
        for hook in STEP_HOOKS:
            if not overrides(self, "Callback", hook) or (hook == "on_validation_batch_start" and not notes_validation):
                setattr(self, hook, None)

    def _show_hooks(self) -> None:
        for hook in STEP_HOOKS:
            with suppress(AttributeError):  # without `vars`, after which CPython no longer caches method lookups
                delattr(self, hook)

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
        self._begin(trainer, "fit")

    @override
    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin(trainer, "validate")
        if self._session is not None and self._session.run.stage == "fit":
            self._session.run.note_validation()

    @override
    def on_test_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin(trainer, "test")

    @override
    def on_predict_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin(trainer, "predict")

    def _begin(self, trainer: Trainer, stage: Stage) -> None:
        session = self._session
        if session is not None and session.run.stage == stage:  # and not the validation of a fit
            session.begin()
            self.next_step = 0.0
            self._began(trainer, session)

    def act(self, trainer: Trainer, session: FitSession) -> None:
        """Act after a step."""
        try:
            self.next_step = self._stepped(trainer, session)
        except Exception as error:
            if not self.survives(error):
                raise

    @override
    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if self._session is not None:
            self._session.begin_validation_batch(batch, batch_idx)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self._session is not None and not self._session.is_of_parent:
            with deaths_ignored():
                outcome = self._session.note_error(exception, self._session.run.optimizer_steps)
                self._end(trainer, outcome, timeout_s=0.0)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._end(trainer, "completed", timeout_s=TIMEOUT_S)

    def _end(self, trainer: Trainer, outcome: str, timeout_s: float) -> None:
        session = self._session
        if session is not None and session.is_of_parent:
            self._session = None
            return
        if session is not None:
            session.finish(timeout_s)
            self._ended(trainer, session, outcome)
        self._give_up()

    @override
    def _give_up(self) -> None:
        session, self._session = self._session, None
        self._show_hooks()
        if session is not None:
            session.release(self)
