"""What the monitor and the advisor share: the session of a Trainer's fit, from ``setup`` to the end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from typing_extensions import override

from lightning_gpu_tools.environment import is_disabled
from lightning_gpu_tools.loaders.workers import deaths_ignored
from lightning_gpu_tools.runs.session import Session
from lightning_gpu_tools.trainer.facts import TrainerRun
from lightning_gpu_tools.trainer.families import Callback, LightningModule, Trainer
from lightning_gpu_tools.trainer.fit_timer import FitTimer
from lightning_gpu_tools.trainer.guarded_callback import GuardedCallback
from lightning_gpu_tools.training.rank_exchange import TIMEOUT_S


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


class MeasuringCallback(GuardedCallback):
    """Takes part in the session of each fit, from ``setup`` to its end."""

    def __init__(self) -> None:
        self.yields = False  # to a callback of the user's of the same class
        self._session: FitSession | None = None
        self._next_step = 0.0

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_session": None}

    def _opened(self, trainer: Trainer, session: FitSession) -> None:
        """Act before the fit begins."""

    def _began(self, trainer: Trainer, session: FitSession) -> None:
        """Act when training starts."""

    def _stepped(self, trainer: Trainer, session: FitSession) -> float:
        """Act after a step; return the clock's step after which to be called again."""
        return math.inf

    def _ended(self, trainer: Trainer, session: FitSession, outcome: str) -> None:
        """Act when the fit has ended."""

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        is_replaced = self.yields and self._is_replaced(trainer.callbacks)  # type: ignore[attr-defined]
        if stage == "fit" and not is_disabled() and not is_replaced:
            self._give_up()  # a fit whose end was not announced
            self._session = FitSession.of(trainer)
            self._opened(trainer, self._session)

    def _is_replaced(self, callbacks: Sequence[Callback]) -> bool:
        # Lightning has added ours to the user's list, perhaps for an earlier Trainer, too.
        same = [other for other in callbacks if isinstance(other, type(self))]
        return any(not other.yields for other in same) or self not in same[:1]

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._session is not None:
            self._session.begin()
            self._next_step = 0.0
            self._began(trainer, self._session)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._session is not None:
            self._session.ending.begin_step(batch)

    @override
    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if self._session is not None:
            self._session.begin_validation_batch(batch, batch_idx)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        session = self._session
        if session is not None:
            session.after_step(batch)
            if session.clock.steps >= self._next_step or session.report_wanted:
                self._next_step = self._stepped(trainer, session)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self._session is not None:
            with deaths_ignored():
                outcome = self._session.ending.note_error(self._session, exception, trainer.global_step)
                self._end(trainer, outcome, timeout_s=0.0)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._end(trainer, "completed", timeout_s=TIMEOUT_S)

    def _end(self, trainer: Trainer, outcome: str, timeout_s: float) -> None:
        session = self._session
        if session is not None:
            session.finish(timeout_s)
            self._ended(trainer, session, outcome)
        self._give_up()

    @override
    def _give_up(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.release()
