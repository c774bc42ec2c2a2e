"""The session of a Trainer's fit."""

from __future__ import annotations

from functools import partial
from weakref import WeakKeyDictionary

from lightning_gpu_tools.runs.session import Session
from lightning_gpu_tools.trainer.facts import TrainerRun
from lightning_gpu_tools.trainer.families import Trainer
from lightning_gpu_tools.trainer.fit_timer import FitTimer


class FitSession(Session):
    """Shared by all who ask for it with :meth:`of`; the last to :meth:`release` it closes it."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(TrainerRun(trainer), partial(FitTimer, trainer))
        self._trainer = trainer
        self._users = 0

    @classmethod
    def of(cls, trainer: Trainer) -> FitSession:
        """Return the session of the fit that is about to begin."""
        session = _sessions.get(trainer)
        if session is not None and session.clock.ran:  # of an earlier fit whose end was not announced
            session._end()
            session = None
        if session is None:
            session = _sessions[trainer] = cls(trainer)
        session._users += 1
        return session

    def release(self) -> None:
        """Give the session back; what it measured stays readable."""
        self._users -= 1
        if self._users <= 0:
            self._end()

    def _end(self) -> None:
        self.close()
        if _sessions.get(self._trainer) is self:
            del _sessions[self._trainer]


_sessions: WeakKeyDictionary[Trainer, FitSession] = WeakKeyDictionary()
