"""The interfaces of a measured run (a Trainer, Fabric, or the user's own loop) and of its timer."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader

from lightning_gpu_tools.loaders.held import Inside
from lightning_gpu_tools.memory.counters import MemoryCounters
from lightning_gpu_tools.memory.holdings import Training
from lightning_gpu_tools.patches import Patches
from lightning_gpu_tools.training.line_sampler import WorkerLines
from lightning_gpu_tools.training.phases import LOGGING
from lightning_gpu_tools.training.rank_exchange import RankPlace
from lightning_gpu_tools.training.rank_waits import RankWaits
from lightning_gpu_tools.training.run_measurements import LoaderFacts, LoaderSettings, Stage
from lightning_gpu_tools.training.step_clock import StepClock


class Run(Training, Protocol):
    """The facts that the Trainer, Fabric or loop knows about a run; ``None`` = unknown, or none."""

    has_trainer: bool  # whether a Trainer drives it, so that advice can name its options
    validation_loaders: tuple[LoaderSettings, ...] = ()  # of validations within a fit, if they are torch's
    validation_facts: tuple[LoaderFacts, ...] = ()  # of those without workers, before their first batch
    slowest: int = 0  # place of the loader that training waits for most, among the loaders
    stage: Stage = "fit"
    place: RankPlace  # of this rank in the job
    gpus: Sequence[torch.device]  # the NVIDIA GPUs on which the ranks of this node train
    loggers: Sequence[Any]  # Lightning's
    log_every_n_steps: int  # number of steps between metrics for the loggers; 0 = never

    @property
    def loaders(self) -> Sequence[Inside]:
        """The training loaders, at least one once training has begun."""

    @property
    def loader(self) -> DataLoader[Any] | None:
        """The loader that training waits for most, as far as known, if it is torch's."""
        loaders = self.loaders
        loader = loaders[min(self.slowest, len(loaders) - 1)].loader if loaders else None
        return loader if isinstance(loader, DataLoader) else None

    @property
    def iterator(self) -> object | None:
        """The iterator of that loader."""

    @property
    def logged_step(self) -> int:
        """The step number of metrics for the loggers."""

    @property
    def accumulate_grad_batches(self) -> int:
        """Batches per step of the optimizer."""

    @property
    def epoch_steps(self) -> int | None:
        """Steps of a whole epoch."""

    @property
    def checkpoint_folder(self) -> str | None:
        """The folder of checkpoints: a path or a URL."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """More settings for the report: at least ``model``, the name of the model."""


class Timer:
    """The driver of a session's clock."""

    def __init__(self, clock: StepClock, weights: Callable[[], Iterable[torch.Tensor]]) -> None:
        """``weights`` returns those whose gradients DistributedDataParallel sends."""
        self.clock = clock
        self.rank_waits = RankWaits(clock, weights)  # moves waiting for other ranks out of the clock's phases
        self.memory: MemoryCounters | None = None  # of this rank's GPU; None on another device
        self.fault: Exception | None = None  # the error that ended the timing
        self.patches = Patches()  # whose missing ones are the parts that could not be timed
        self.worker_lines = WorkerLines()

    def time_loggers(self, loggers: Sequence[Any]) -> None:
        """Time what the loggers write, which no action of a Trainer covers."""
        for logger in loggers:
            timed = partial(self.clock.timed, f"{LOGGING}/{type(logger).__name__}")
            for method in ("log_metrics", "save"):
                self.patches.put(logger, method, timed)

    @property
    def is_trial(self) -> bool:
        """Whether a tuner runs a trial. Trials are not measured."""
        return False

    def stop(self) -> None:
        """Stop the clock and restore everything, once."""
        self.clock.stop()
        self.patches.undo()
