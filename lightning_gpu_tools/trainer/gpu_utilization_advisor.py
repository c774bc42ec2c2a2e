"""Says during training why the GPU (or without one, the training step) stands waiting, and what to change."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from lightning_gpu_tools.advice.diagnosis import diagnose
from lightning_gpu_tools.advice.findings import Diagnosis
from lightning_gpu_tools.advice.inside_step import wants_profile
from lightning_gpu_tools.environment import is_disabled
from lightning_gpu_tools.errors import LowGPUUtilizationWarning
from lightning_gpu_tools.loaders.settings import batch_bytes
from lightning_gpu_tools.trainer.facts import rank_exchange
from lightning_gpu_tools.trainer.never_stop_training import never_stops_training
from lightning_gpu_tools.trainer.run_recorder import RunRecorder
from lightning_gpu_tools.trainer.step_clock import WARM_UP_STEPS, StepClock
from lightning_gpu_tools.trainer.step_profiler import PROFILED_STEPS, StepProfiler, can_profile
from lightning_gpu_tools.training.rank_exchange import PATIENCE_S, RankExchange
from lightning_gpu_tools.training.run_measurements import ProfiledSteps, RunMeasurements


class GPUUtilizationAdvisor(Callback):
    """Measures where each training step's time goes and warns, once, when too much of it is lost.

    A GPU that is busy 30 % of the time does not say why. This callback times every phase of the run on the host and
    names what holds training up: the wait for data with the DataLoader settings to use on this machine, a callback or
    logger by name, checkpoints, validation, the start of epochs, the rank that all others wait for. After enough steady
    steps it warns once, on rank zero, with :class:`~lightning_gpu_tools.LowGPUUtilizationWarning`; at the end its
    findings are part of the report of :class:`~lightning_gpu_tools.GPUUtilizationMonitor`, if there is one. Without a
    GPU all of this works, too, and speaks of the training step instead of the GPU.

    On a GPU only the time counts for which the GPU stood idle: a wait that overlaps its work costs nothing. Two CUDA
    events around one step in eight tell when it ran dry; nothing ever waits for them. If the GPU idles most inside the
    step, three steps run once under torch.profiler, and one more to find the source lines that wait for the GPU's
    results; that takes some seconds of one run. A GPU that others use, too, gets no advice but to take another one.

    Not yet verified on GPU hardware: everything about the GPU was tested on simulated ones.

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
        self._exchange: RankExchange | None = None
        self._profiler: StepProfiler | None = None
        self._fits = self._turn = 0
        self._diagnosis: Diagnosis | None = None
        self._next_look = 0
        self._warned = False

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), **dict.fromkeys(("_clock", "_recorder", "_exchange", "_profiler"))}

    @property
    def diagnosis(self) -> Diagnosis | None:
        """What the measurements say: of the fit that runs, or of the last one; ``None`` before the first."""
        return self._diagnose() if self._recorder is not None else self._diagnosis

    @override
    @never_stops_training
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit" and not is_disabled():
            self._give_up(trainer)  # a fit whose end it was not told of
            self._clock = StepClock.attach(trainer)

    @override
    @never_stops_training
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._clock is None:
            return
        self._fits += 1
        place = trainer.callbacks.index(self)  # type: ignore[attr-defined]
        self._exchange = rank_exchange(trainer, f"advisor/{self._fits}/{place}")
        self._turn = 0
        self._recorder = RunRecorder(trainer, self._clock, self._exchange)
        self._next_look = WARM_UP_STEPS + self.min_steps
        self._warned = False

    @override
    @never_stops_training
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._clock is None or self._recorder is None:
            return
        if self._recorder.batch_bytes is None:
            self._recorder.batch_bytes = batch_bytes(batch)
        self._recorder.after_step()
        if self._clock.steps >= self._next_look and not self._warned:
            self._clock.as_own_work(self._look, trainer)

    def _look(self, trainer: Trainer) -> None:
        assert self._clock is not None
        assert self._recorder is not None
        # A tenth later each time: soon enough for short steps, and rare for very short ones.
        later = self._next_look + max(10, self._next_look // 10)
        if sum(block.wall_s for block in self._clock.blocks) < self.min_seconds:  # spares judging what is too short
            self._next_look = later
            return
        self._tell(next_turn=False)  # each rank looks when it likes
        measured = self._recorder.measurements()
        diagnosis = self._diagnose(measured)
        if diagnosis.verdict == "too_short":
            self._next_look = later
            return
        if self._profiler is None and diagnosis.verdict == "low" and wants_profile(measured) and can_profile(trainer):
            self._next_look += 2 * PROFILED_STEPS  # then judge with what it has found
            self._profiler = StepProfiler(trainer, self._clock.as_own_work, self._take_profile)
            return
        # Judging costs about a millisecond, so the longer training goes well the less often it is done.
        self._next_look *= 2
        if diagnosis.verdict == "low":
            self._warned = True
            rank_zero_warn(f"{diagnosis.why} {diagnosis.next_step}", category=LowGPUUtilizationWarning)

    def _take_profile(self, profile: ProfiledSteps) -> None:
        if self._recorder is not None:
            self._recorder.profile = profile

    def _tell(self, *, next_turn: bool) -> None:
        """Tell the other ranks how fast this one is; a turn is what all of them take at the same moment."""
        if self._exchange is not None and self._recorder is not None and self._exchange.ranks > 1:
            self._turn += next_turn
            self._exchange.tell(self._turn, own_step=self._recorder.own_step())

    @override
    @never_stops_training
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._tell(next_turn=True)

    @override
    @never_stops_training
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._recorder is not None:
            self._recorder.enter("validation")

    @override
    @never_stops_training
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._recorder is not None:
            self._recorder.enter("training")

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._finish(trainer, patience_s=0.0)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._finish(trainer, patience_s=PATIENCE_S)

    @never_stops_training
    def _finish(self, trainer: Trainer, patience_s: float) -> None:
        if self._clock is None:
            return
        if self._profiler is not None:
            self._profiler.close()
        self._clock.stop()
        if self._exchange is not None and self._clock.ran:
            self._tell(next_turn=True)
            if trainer.is_global_zero:
                self._exchange.read(self._turn, patience_s)
        self._diagnosis = self.diagnosis
        self._give_up(trainer)

    def _give_up(self, trainer: Trainer) -> None:
        clock, recorder, profiler = self._clock, self._recorder, self._profiler
        self._clock = self._recorder = self._exchange = self._profiler = None
        if profiler is not None:
            profiler.close()
        if recorder is not None:
            recorder.close()
        if clock is not None:
            clock.detach(trainer)

    def _diagnose(self, measured: RunMeasurements | None = None) -> Diagnosis:
        assert self._recorder is not None
        return diagnose(
            measured or self._recorder.measurements(),
            min_utilization_percent=self.min_utilization_percent,
            min_steps=self.min_steps,
            min_seconds=self.min_seconds,
        )
