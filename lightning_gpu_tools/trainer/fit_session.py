"""The session of a Trainer's run, from ``setup`` to the end, which the monitor and the finder share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from lightning_gpu_tools.patches import Patches
from lightning_gpu_tools.runs.session import Session
from lightning_gpu_tools.trainer import compat
from lightning_gpu_tools.trainer.facts import TrainerRun, run_of
from lightning_gpu_tools.trainer.families import Callback, LightningModule, Trainer, lookup
from lightning_gpu_tools.trainer.fit_timer import EvaluationTimer, FitTimer


class FitSession(Session):
    """A session shared by the callbacks of a fit, validate, test or predict, until it ends or the last one releases it.

    Lightning does not notify every callback of the end: a tuner that raises has removed them, and a callback that
    raises at the end prevents calls of the others. So the session detects the end itself, and notifies the rest.
    """

    run: TrainerRun
    timer: FitTimer

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        run = run_of(trainer)
        timer = FitTimer if run.stage == "fit" else EvaluationTimer
        super().__init__(run, lambda clock, enter: timer(trainer, clock, self.ending, enter))
        self._users: list[Callback] = []
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
        return session

    def release(self, user: Callback) -> None:
        """Release the session; its measurements stay readable."""
        self._users = [one for one in self._users if one is not user]
        if not self._users:
            self._end()

    def _end(self) -> None:
        self._on_end.undo()
        self.close()
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
