"""Says during training why the GPU (or without one, the training step) stands waiting, and what to change."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from lightning_gpu_tools.advice.diagnosis import diagnose
from lightning_gpu_tools.advice.findings import Diagnosis
from lightning_gpu_tools.environment import is_disabled
from lightning_gpu_tools.errors import LowGPUUtilizationWarning
from lightning_gpu_tools.monitoring.measurements import RunRecorder, batch_bytes
from lightning_gpu_tools.monitoring.step_clock import WARM_UP_STEPS, StepClock


class GPUUtilizationAdvisor(Callback):
    """Measures where each training step's time goes and warns, once, when too much of it is lost.

    A GPU that is busy 30 % of the time does not say why. This callback times every phase of the run on the host,
    without synchronising CUDA, and names what holds training up: the wait for data with the DataLoader settings to use
    on this machine, a callback or logger by name, checkpoints, the start of epochs. After enough steady steps it warns
    once, on rank zero, with :class:`~lightning_gpu_tools.LowGPUUtilizationWarning`; at the end its findings are part of
    the report of :class:`~lightning_gpu_tools.GPUUtilizationMonitor`, if there is one. Without a GPU all of this works,
    too, and speaks of the training step instead of the GPU.

    On a GPU the loss is capped by the GPU's idle time, because a wait that overlaps GPU work costs nothing. Which wait
    overlaps which work is not measured, so of several causes the second may be overestimated. Not yet verified on GPU
    hardware.

    Args:
        min_utilization_percent: Utilization below which a GPU counts as badly used. The default is where SageMaker
            Debugger's LowGPUUtilization rule draws the line.
        min_steps: Steady steps needed to judge; the first 20 steps and the first of each epoch are not steady.
        min_seconds: Seconds of steady steps needed to judge.

    Raises:
        ValueError: An argument is out of its range.

    Example::

        trainer = Trainer(callbacks=[GPUUtilizationMonitor(), GPUUtilizationAdvisor()])
    """

    def __init__(
        self, *, min_utilization_percent: float = 70.0, min_steps: int = 50, min_seconds: float = 20.0
    ) -> None:
        if not 0 <= min_utilization_percent <= 100:
            raise ValueError(f"min_utilization_percent must be between 0 and 100, got {min_utilization_percent!r}.")
        if min_steps < 1:
            raise ValueError(f"min_steps must be at least 1, got {min_steps!r}.")
        if not min_seconds >= 0:
            raise ValueError(f"min_seconds must not be negative, got {min_seconds!r}.")
        self.min_utilization_percent = min_utilization_percent
        self.min_steps = min_steps
        self.min_seconds = min_seconds
        self._clock: StepClock | None = None
        self._recorder: RunRecorder | None = None
        self._diagnosis: Diagnosis | None = None
        self._next_look = 0
        self._warned = False

    @property
    def diagnosis(self) -> Diagnosis | None:
        """What the measurements say: of the fit that runs, or of the last one; ``None`` before the first."""
        return self._diagnose() if self._recorder is not None else self._diagnosis

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit" and not is_disabled():
            self._clock = StepClock.attach(trainer)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._clock is not None:
            self._recorder = RunRecorder(trainer, self._clock)
            self._next_look = WARM_UP_STEPS + self.min_steps
            self._warned = False

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._clock is None or self._recorder is None:
            return
        if self._recorder.batch_bytes is None:
            self._recorder.batch_bytes = batch_bytes(batch)
        if self._clock.steps >= self._next_look and not self._warned:
            self._clock.as_own_work(self._look)

    def _look(self) -> None:
        assert self._clock is not None
        # A tenth later each time: soon enough for short steps, and rare for very short ones.
        later = self._next_look + max(10, self._next_look // 10)
        if sum(block.wall_s for block in self._clock.blocks) < self.min_seconds:  # spares judging what is too short
            self._next_look = later
            return
        diagnosis = self._diagnose()
        if diagnosis.verdict == "too_short":
            self._next_look = later
            return
        # Judging costs about a millisecond, so the longer training goes well the less often it is done.
        self._next_look *= 2
        if diagnosis.verdict == "low":
            self._warned = True
            rank_zero_warn(f"{diagnosis.why} {diagnosis.next_step}", category=LowGPUUtilizationWarning)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._finish(trainer)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._finish(trainer)

    def _finish(self, trainer: Trainer) -> None:
        if self._clock is None:
            return
        self._clock.stop()
        self._diagnosis = self.diagnosis
        if self._recorder is not None:
            self._recorder.close()
        self._clock.detach(trainer)
        self._clock = self._recorder = None

    def _diagnose(self) -> Diagnosis:
        assert self._recorder is not None
        return diagnose(
            self._recorder.measurements(),
            min_utilization_percent=self.min_utilization_percent,
            min_steps=self.min_steps,
            min_seconds=self.min_seconds,
        )
