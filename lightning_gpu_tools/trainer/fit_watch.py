"""Watches one fit for the monitor: logs the GPUs, exchanges with the other ranks, describes the fit in a report."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from datetime import datetime, timezone
from statistics import median
from typing import Any

import lightning
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_warn

from lightning_gpu_tools.advice.diagnosis import diagnose
from lightning_gpu_tools.advice.findings import Diagnosis
from lightning_gpu_tools.advice.loader_trials import LoaderResult
from lightning_gpu_tools.environment import VERSION
from lightning_gpu_tools.gpus import sampler
from lightning_gpu_tools.gpus.metrics import GpuSummary
from lightning_gpu_tools.gpus.readings import GpuReading
from lightning_gpu_tools.gpus.watch import GpuWatch
from lightning_gpu_tools.host import processor_name, read_host_budget
from lightning_gpu_tools.reports.loader_summary import LoaderSummary, summarize
from lightning_gpu_tools.reports.report import RankSpeed, Report
from lightning_gpu_tools.trainer.facts import train_loader, train_loader_settings
from lightning_gpu_tools.trainer.run_recorder import RunRecorder
from lightning_gpu_tools.trainer.step_clock import StepClock
from lightning_gpu_tools.trainer.wrappers import Wrappers
from lightning_gpu_tools.training.memory_history import MemoryHistory
from lightning_gpu_tools.training.phases import MONITORING
from lightning_gpu_tools.training.rank_exchange import PATIENCE_S, RankExchange


class FitWatch:
    """One fit, from the start of training on; make it in ``on_train_start`` and close it at the end.

    Args:
        trainer: Whose fit.
        clock: Its step clock.
        exchange: Where the ranks tell each other what they measured.

    Attributes:
        every: How many steps lie between two logs; 0 = none.
        epoch_loop: The Trainer's, which counts the steps that the loggers' axis shows.
        logged_step: The last step that was logged.
        watch: Watches the GPUs; ``None`` without any, until somebody sets it.
        gpu_note: Why GPUs are not measured.
        recorder: Collects what the diagnosis needs.
    """

    def __init__(self, trainer: Trainer, clock: StepClock, exchange: RankExchange) -> None:
        self.every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        self.epoch_loop = trainer.fit_loop.epoch_loop
        self.logged_step = -1
        self.watch: GpuWatch | None = None
        self.gpu_note: str | None = None
        self._trainer = trainer
        self._clock = clock
        self._exchange = exchange
        self._turn = 0
        self._started_s = time.time()
        self._memory = MemoryHistory(trainer.strategy.root_device)
        self._told: set[str] = set()
        self._wrappers = Wrappers()
        self.recorder = RunRecorder(trainer, clock, exchange)

    def every_gpu(self) -> tuple[GpuReading, ...]:
        """Return the GPUs of this node that can be read; the others become a note."""
        readings = sampler.read_gpus()
        broken = [f"GPU {gpu.index} is not measured: {gpu.error}." for gpu in readings if gpu.error]
        self.gpu_note = " ".join(broken) or (None if readings else "No GPU: the driver lists none.")
        return tuple(gpu for gpu in readings if not gpu.error)

    def enter(self, phase: sampler.Phase) -> None:
        """Keep what the GPUs do from here on apart from the other phase."""
        self.recorder.enter(phase)
        if self.watch is not None:
            self.watch.enter(phase)

    def show_on_progress_bar(self) -> None:
        """Add the running utilization to what the progress bar shows, which it asks for when it is drawn."""
        bar, watch = self._trainer.progress_bar_callback, self.watch
        if bar is None or watch is None:
            return

        def wrapper(get_metrics: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
            def with_utilization(*args: Any, **kwargs: Any) -> dict[str, Any]:
                percent = watch.latest_percent
                shown: dict[str, Any] = {} if percent is None else {"gpu_busy": f"{percent:.0f}%"}
                return {**get_metrics(*args, **kwargs), **shown}

            return with_utilization

        self._wrappers.put(bar, "get_metrics", wrapper)

    def log(self, step: int) -> None:
        """Log this node's GPUs on rank 0, and look at the memory."""
        self._memory.look()
        self._warn([str(growth) for growth in self._memory.alarms()])
        if self.watch is None or not self._trainer.is_global_zero:
            return
        self._learn_own_pids(self.watch)
        metrics, troubles = self.watch.take()
        self._warn(troubles)
        self._log_metrics(metrics, step)

    def _log_metrics(self, metrics: dict[str, float], step: int) -> None:
        if metrics:
            for logger in self._trainer.loggers:
                separator = logger.group_separator
                logger.log_metrics({name.replace("/", separator): value for name, value in metrics.items()}, step=step)

    def _warn(self, troubles: list[str]) -> None:
        for trouble in troubles:
            if trouble not in self._told:
                self._told.add(trouble)
                rank_zero_warn(trouble)

    def _learn_own_pids(self, watch: GpuWatch) -> None:
        if watch.own_pids is None:
            watch.own_pids = self.recorder.own_pids()

    def exchange_epoch(self) -> None:
        """Tell the others how this epoch went here; on rank 0, log the GPUs of the other nodes."""
        self.tell(at_end=False)
        if not self._trainer.is_global_zero or self._trainer.num_nodes < 2:
            return
        for facts in self._exchange.read(self._turn, PATIENCE_S):
            if facts["rank"] != self._trainer.global_rank:
                self._warn(facts.get("troubles", []))
                self._log_metrics(facts.get("metrics", {}), self.epoch_loop._batches_that_stepped - 1)
        if self._exchange.missed:
            self._warn([f"Ranks {self._exchange.missed} told nothing within {PATIENCE_S:.0f} s; they are left out."])

    def tell(self, *, at_end: bool) -> None:
        """Put on the board how fast this rank is, and on other nodes than the first what their GPUs did."""
        self._turn += 1
        facts: dict[str, Any] = {"own_step": self.recorder.own_step()}
        if self.watch is not None and not self._trainer.is_global_zero:
            self._learn_own_pids(self.watch)
            facts["metrics"], facts["troubles"] = self.watch.take()
            summaries = self.watch.summaries(at_end=at_end)
            facts["gpus"] = [dataclasses.asdict(dataclasses.replace(gpu, timelines={})) for gpu in summaries]
        self._exchange.tell(self._turn, **facts)

    def report(self, outcome: str, patience_s: float) -> Report:
        """Describe the fit, with what the other ranks told last."""
        clock, trainer = self._clock, self._trainer
        steady_s = tuple((block.wall_s - block.paused_s) / block.steps for block in clock.blocks)
        step_s = median(steady_s) if steady_s else None
        settings = _settings(trainer)
        batch_size = settings.get("batch_size")
        ranks = self._exchange.read(self._turn, patience_s)
        gpus: tuple[GpuSummary, ...] = ()
        if self.watch is not None:
            self._learn_own_pids(self.watch)
            gpus = self.watch.summaries(at_end=True)
            self._warn(self.watch.take()[1])
        names = {gpu.name for gpu in gpus}
        return Report(
            outcome=outcome,
            started_at=datetime.fromtimestamp(self._started_s, timezone.utc).isoformat(timespec="seconds"),
            steps=clock.steps,
            wall_s=clock.wall_s,
            phase_s=clock.seconds,
            step_s_median=step_s,
            diagnosis=_advisors_diagnosis(trainer) or diagnose(self.recorder.measurements()),
            gpus=gpus + tuple(_of_other_node(gpu) for facts in ranks for gpu in facts.get("gpus", ())),
            gpu_note=self.gpu_note,
            samples_per_s=batch_size * trainer.world_size / step_s if batch_size and step_s else None,
            step_s_blocks=steady_s,
            monitor_us_per_step=self._us_per_step(clock.cost_s() + clock.seconds.get(MONITORING, 0.0)),
            monitor_thread_us_per_step=None if self.watch is None else self._us_per_step(self.watch.thread_cpu_s),
            unseen=tuple(clock.unseen),
            spans=tuple(clock.timeline.spans()),
            ranks=_speeds(ranks),
            memory_growth=self._memory.growth(),
            loader=_finders_result(trainer),
            settings={**settings, "gpu": sorted(name for name in names if name)},
        )

    def _us_per_step(self, seconds: float) -> float | None:
        return seconds / self._clock.steps * 1e6 if self._clock.steps else None

    def close(self) -> None:
        """Let go of everything."""
        self._wrappers.undo()
        if self.watch is not None:
            self.watch.close()
        self.recorder.close()


def _speeds(ranks: list[dict[str, Any]]) -> tuple[RankSpeed, ...]:
    if len(ranks) < 2:
        return ()
    return tuple(
        RankSpeed(rank=facts["rank"], node=facts["node"], own_step_s=facts["own_step"]["own_s"])
        for facts in ranks
        if facts.get("own_step") is not None
    )


def _of_other_node(facts: dict[str, Any]) -> GpuSummary:
    return GpuSummary(**{**facts, "errors": tuple(facts["errors"])})


def _advisors_diagnosis(trainer: Trainer) -> Diagnosis | None:
    """Return what an advisor among the callbacks says, which may have thresholds of its own."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        diagnosis = getattr(callback, "diagnosis", None)
        if isinstance(diagnosis, Diagnosis):
            return diagnosis
    return None


def _finders_result(trainer: Trainer) -> LoaderSummary | None:
    """Return what a NumWorkersFinder among the callbacks has found."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        result = getattr(callback, "result", None)
        if isinstance(result, LoaderResult):
            return summarize(result)
    return None


def _settings(trainer: Trainer) -> dict[str, Any]:
    loader, settings = train_loader(trainer), train_loader_settings(trainer)
    return {
        "model": type(trainer.lightning_module).__qualname__,
        "dataset": None if loader is None else type(loader.dataset).__qualname__,
        "cpu": f"{processor_name()}, {read_host_budget().cores:g} cores",
        "accelerator": type(trainer.accelerator).__name__,
        "device": trainer.strategy.root_device.type,
        "world_size": trainer.world_size,
        "precision": trainer.precision,
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
        **({} if settings is None else dataclasses.asdict(settings)),
        "torch": torch.__version__,
        "lightning": lightning.__version__,
        "lightning_gpu_tools": VERSION,
    }
