"""Warns during training why the GPU (or without one, the training step) waits, and what to change."""

from __future__ import annotations

import math
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.profilers import PyTorchProfiler
from typing_extensions import override

from lightning_gpu_tools.advice.findings import MIN_SECONDS, MIN_STEPS, MIN_UTILIZATION_PERCENT, Diagnosis
from lightning_gpu_tools.advice.inside_step import wants_profile
from lightning_gpu_tools.errors import LowGPUUtilizationWarning
from lightning_gpu_tools.trainer import compat
from lightning_gpu_tools.trainer.measuring_callback import MeasuringCallback
from lightning_gpu_tools.trainer.session import Session
from lightning_gpu_tools.training.compat import is_profiling
from lightning_gpu_tools.training.step_clock import WARM_UP_STEPS
from lightning_gpu_tools.training.step_profiler import PROFILED_STEPS, StepProfiler


class GPUUtilizationAdvisor(MeasuringCallback):
    """Measures where each training step's time goes and warns, once, when too much of it is lost.

    A GPU that is busy 30 % of the time does not say why. This callback times every phase of the run on the host and
    names what holds training up: the wait for data with the DataLoader settings to use on this machine, a callback or
    logger by name, checkpoints, validation, the start of epochs, the rank that all others wait for. After enough steady
    steps it warns once, on rank zero, with :class:`~lightning_gpu_tools.LowGPUUtilizationWarning`; at the end its
    findings are part of the report of :class:`~lightning_gpu_tools.GPUUtilizationMonitor`, if there is one. Without a
    GPU all of this works, too, and speaks of the training step instead of the GPU.

    On a GPU only the time counts for which the GPU was idle: a wait that overlaps its work costs nothing. Two CUDA
    events around one step in eight show when it ran dry; nothing ever waits for them. What idles inside the step is
    only broken down with ``profile=True``; the advice says when that would help. For a GPU that others use, too, the
    only advice is to take another one.

    Not yet verified on GPU hardware: everything about the GPU was tested on simulated ones.

    Args:
        min_utilization_percent: Utilization below which a GPU counts as underused. The default of 70 is the threshold
            of SageMaker Debugger's LowGPUUtilization rule.
        min_steps: Steady steps needed to judge, 50 by default; the first 20 steps and the first of each epoch do not
            count.
        min_seconds: Seconds of steady steps needed to warn during training, 20 by default. At its end the steps that
            there are decide.
        profile: Whether to run three steps once under torch.profiler, where the GPU idles most inside the step, and one
            more to find the source lines that wait for the GPU's results. Off by default: it takes some seconds,
            clashes with other tools that trace the GPU (Nsight, DCGM), and may slow kernels down for the rest of the
            run.

    Raises:
        ValueError: An argument is out of its range.

    Example::

        trainer = Trainer(callbacks=[GPUUtilizationMonitor(), GPUUtilizationAdvisor()])
    """

    def __init__(
        self,
        *,
        min_utilization_percent: float = MIN_UTILIZATION_PERCENT,
        min_steps: int = MIN_STEPS,
        min_seconds: float = MIN_SECONDS,
        profile: bool = False,
    ) -> None:
        if not 0 <= min_utilization_percent <= 100:
            raise ValueError(f"min_utilization_percent must be between 0 and 100, got {min_utilization_percent!r}.")
        if min_steps < 1:
            raise ValueError(f"min_steps must be at least 1, got {min_steps!r}.")
        if not min_seconds >= 0:
            raise ValueError(f"min_seconds must not be negative, got {min_seconds!r}.")
        super().__init__()
        self.min_utilization_percent = min_utilization_percent
        self.min_steps = min_steps
        self.min_seconds = min_seconds
        self.profile = profile
        self._profiler: StepProfiler | None = None
        self._diagnosis: Diagnosis | None = None
        self._next_judgment = 0
        self._warned = False

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_profiler": None}

    @property
    def diagnosis(self) -> Diagnosis | None:
        """What the measurements say: of the fit that runs, or of the last one; ``None`` before the first."""
        return (self._session.diagnosis() if self._session is not None else None) or self._diagnosis

    @override
    def _opened(self, trainer: Trainer, session: Session) -> None:
        session.thresholds = {
            "min_utilization_percent": self.min_utilization_percent,
            "min_steps": self.min_steps,
        }

    @override
    def _began(self, trainer: Trainer, session: Session) -> None:
        self._next_judgment = WARM_UP_STEPS + self.min_steps
        self._warned = False

    @override
    def _stepped(self, trainer: Trainer, session: Session) -> float:
        if session.clock.steps >= self._next_judgment and not self._warned:
            session.clock.as_own_work(self._judge, trainer, session)
        return math.inf if self._warned else self._next_judgment

    def _judge(self, trainer: Trainer, session: Session) -> None:
        # A tenth later each time: soon enough for short steps, and rare for very short ones.
        later = self._next_judgment + max(10, self._next_judgment // 10)
        if sum(block.wall_s for block in session.clock.blocks) < self.min_seconds:  # spares judging what is too short
            self._next_judgment = later
            return
        session.publish(next_turn=False)  # each rank judges at a moment of its own
        recorder = session.begin()
        measured = recorder.measurements()
        diagnosis = session.diagnosis(measured)
        if diagnosis is None or diagnosis.verdict == "too_short":
            self._next_judgment = later
            return
        wants = self.profile and diagnosis.verdict == "low" and wants_profile(measured)
        if wants and self._profiler is None and can_profile(trainer):
            self._next_judgment += 2 * PROFILED_STEPS  # then judge with what it has found
            self._profiler = StepProfiler(
                compat.step_runner(trainer),
                trainer.lightning_module,
                session.clock.as_own_work,
                lambda profile: setattr(recorder, "profile", profile),
            )
            return
        # Judging costs about a millisecond, so the longer training goes well the less often it is done.
        self._next_judgment *= 2
        if diagnosis.verdict == "low":
            self._warned = True
            session.warn(f"{diagnosis.why} {diagnosis.next_step}", LowGPUUtilizationWarning)

    @override
    def _ended(self, trainer: Trainer, session: Session, outcome: str) -> None:
        self._diagnosis = session.diagnosis()

    @override
    def _give_up(self) -> None:
        if self._profiler is not None:
            self._profiler.close()
            self._profiler = None
        super()._give_up()


def can_profile(trainer: Trainer) -> bool:
    """Return whether a step can be profiled: a process has one profiler, and it may be in use."""
    users_own = isinstance(trainer.profiler, PyTorchProfiler)  # type: ignore[attr-defined]
    return is_profiling() is False and not users_own and compat.step_runner(trainer) is not None
