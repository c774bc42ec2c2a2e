"""A callback that warns, during training, about the causes of low GPU utilization."""

from __future__ import annotations

import math

from typing_extensions import override

from lightning_gpu_tools.advice.findings import MIN_SECONDS, MIN_STEPS, MIN_UTILIZATION_PERCENT, Diagnosis
from lightning_gpu_tools.arguments import checked
from lightning_gpu_tools.environment import is_disabled
from lightning_gpu_tools.runs.advisor import Advisor, Thresholds
from lightning_gpu_tools.runs.run_report import conclude
from lightning_gpu_tools.trainer.families import LightningModule, Trainer
from lightning_gpu_tools.trainer.gpu_utilization_monitor import GPUUtilizationMonitor
from lightning_gpu_tools.trainer.measuring_callback import FitSession, MeasuringCallback


class GPUUtilizationAdvisor(MeasuringCallback):
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

    @checked
    def __init__(
        self,
        *,
        min_utilization_percent: float = MIN_UTILIZATION_PERCENT,
        min_steps: int = MIN_STEPS,
        min_seconds: float = MIN_SECONDS,
    ) -> None:
        self._thresholds = Thresholds(min_utilization_percent, min_steps, min_seconds)
        super().__init__()
        self.min_utilization_percent = min_utilization_percent
        self.min_steps = min_steps
        self.min_seconds = min_seconds
        self._diagnosis: Diagnosis | None = None

    @property
    def diagnosis(self) -> Diagnosis | None:
        """The diagnosis of the running fit, or of the last one, or of validate, test or predict; ``None`` before."""
        return (conclude(self._session) if self._session is not None else None) or self._diagnosis

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        has_monitor = any(isinstance(callback, GPUUtilizationMonitor) for callback in callbacks)
        if not has_monitor and self in callbacks and not is_disabled():
            monitor = GPUUtilizationMonitor()
            monitor.yields = True
            callbacks.insert(callbacks.index(self) + 1, monitor)  # Lightning then sets it up after this one
        super().setup(trainer, pl_module, stage)

    @override
    def _opened(self, trainer: Trainer, session: FitSession) -> None:
        session.advisor = Advisor(session, self._thresholds)

    @override
    def _stepped(self, trainer: Trainer, session: FitSession) -> float:
        return math.inf if session.advisor is None else session.advisor.after_step()

    @override
    def _ended(self, trainer: Trainer, session: FitSession, outcome: str) -> None:
        self._diagnosis = conclude(session)
