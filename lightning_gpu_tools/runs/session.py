"""The measuring of one training: clock, recorder, GPUs, memory, exchange between ranks, and the diagnosis."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol

from lightning_gpu_tools.advice.diagnosis import diagnose
from lightning_gpu_tools.advice.findings import Diagnosis
from lightning_gpu_tools.advice.growth import pace
from lightning_gpu_tools.advice.loader_trials import LoaderResult
from lightning_gpu_tools.advice.memory_account import MemoryAccount
from lightning_gpu_tools.advice.shortcomings import shortcomings
from lightning_gpu_tools.advice.stalls import Stall
from lightning_gpu_tools.errors import NvmlUnavailableError
from lightning_gpu_tools.gpus import sampler
from lightning_gpu_tools.gpus.metrics import MAX_NAMED_GPUS, GpuSummary, count_gpus, job_metrics
from lightning_gpu_tools.gpus.readings import GpuReading
from lightning_gpu_tools.gpus.watch import GpuWatch
from lightning_gpu_tools.reports.report import FILE_NAME
from lightning_gpu_tools.reports.typed_json import read
from lightning_gpu_tools.runs.ending import Ending
from lightning_gpu_tools.runs.run import Run, gpu_readings
from lightning_gpu_tools.runs.run_memory import MemoryShare, accounts, own_share
from lightning_gpu_tools.runs.run_recorder import RunRecorder
from lightning_gpu_tools.runs.stall_watch import StallAfter, StallWatch
from lightning_gpu_tools.runs.surroundings import read_surroundings
from lightning_gpu_tools.training import compat
from lightning_gpu_tools.training.background import BackgroundJobs
from lightning_gpu_tools.training.memory_counters import MemoryCounters
from lightning_gpu_tools.training.memory_history import MemoryHistory
from lightning_gpu_tools.training.phases import VALIDATION, base_phase
from lightning_gpu_tools.training.rank_exchange import TIMEOUT_S, RankExchange
from lightning_gpu_tools.training.rank_waits import RankWaits
from lightning_gpu_tools.training.run_measurements import RunMeasurements
from lightning_gpu_tools.training.step_clock import WARM_UP_STEPS, StepClock

# Names the board of each training with several ranks, which all of them train in the same order.
_trainings = itertools.count()
_WARM_UP_POLL_S = 0.4
_MAX_TROUBLES = 8  # of other nodes at the end of an epoch: what fits on a screen


def check_interval(interval_s: float) -> None:
    """Raise ``ValueError`` unless GPUs can be polled at this interval."""
    if not 0 < interval_s < math.inf:
        raise ValueError(f"interval_s must be a positive number of seconds, got {interval_s!r}.")


class Timer(Protocol):
    """What drives the clock of a session.

    Attributes:
        rank_waits: Takes waiting for other ranks out of the clock's phases.
        memory: Counts the memory of this rank's GPU; ``None`` on another device.
        fault: The error that has ended the timing; ``None`` if all is well.
    """

    rank_waits: RankWaits
    memory: MemoryCounters | None
    fault: Exception | None

    @property
    def is_trial(self) -> bool:
        """Whether a tuner tries something with the model, of which nothing is measured."""

    @property
    def unseen(self) -> list[str]:
        """What could not be timed."""

    def stop(self) -> None:
        """Stop the clock, and put everything back; nothing happens the second time."""


class Session:
    """Everything that is measured of one training, once.

    Call :meth:`begin` when training starts, :meth:`after_step` after each step, :meth:`finish` at the end, and
    :meth:`close` it then. Everybody who shares it may call every method: only the first call at each moment counts.

    Args:
        run: The training.
        timer: Makes what drives the clock; is given the clock, and what to call with the phase when validation begins
            and when training goes on.

    Attributes:
        run: The training.
        clock: Times its phases.
        timer: Drives the clock.
        recorder: Collects what the diagnosis needs; ``None`` before training begins.
        gpus: Samples the GPUs, in the first process of each node; ``None`` without any.
        gpu_note: Why GPUs are not measured; ``None`` if all is well.
        memory: How much memory this process used over the training.
        background: A thread for what is done beside the training, now and then.
        report_wanted: Whether the report is to be written after the next step.
        started_s: When training began, seconds since the epoch.
        thresholds: Those of the diagnosis that are not its defaults; whoever advises sets them.
        loader_result: What ``NumWorkersFinder`` has found, as soon as it sets it.
        ending: How the training ends, and what is kept for the case that an error ends it.
        stall_watch: Watches for stalls; ``None`` if nobody has asked for that.
    """

    def __init__(self, run: Run, timer: Callable[[StepClock, Callable[[sampler.Phase], None]], Timer]) -> None:
        self.run = run
        self.clock = StepClock()
        self.recorder: RunRecorder | None = None
        self.gpus: GpuWatch | None = None
        self.gpu_note: str | None = None
        self.background = BackgroundJobs()
        self.report_wanted = False
        self.started_s = 0.0
        self.thresholds: Mapping[str, Any] = {}
        self.loader_result: LoaderResult | None = None
        self.ending = Ending(run, self.clock)
        self.stall_watch: StallWatch | None = None
        self._monitored: dict[str, Any] | None = None
        self._exchange: RankExchange | None = None
        self._turn = self._epochs_published = 0
        self._own_pids: frozenset[int] | None = None
        self._pids_are_ours = False
        self._last_step = -1
        self._logs: int | None = None
        self._logged: Mapping[str, float] = {}
        self._warned: set[str] = set()
        self._finished = False
        self._diagnosis: Diagnosis | None = None
        self._name = f"training {next(_trainings) if run.place.world_size > 1 else 0}"
        self.timer = timer(self.clock, self._enter)

    def close(self) -> None:
        """End everything. What was measured stays readable."""
        if self.stall_watch is not None:
            self.stall_watch.close()
        self.background.close()
        self.timer.stop()
        if self.gpus is not None:
            self.gpus.close()
        self.ending.close()

    def monitor(
        self, *, devices: Literal["trainer", "all"], interval_s: float, gpm: bool, stall_after_s: StallAfter
    ) -> None:
        """Ask, before training begins, for it to be logged, watched and reported; see ``GPUUtilizationMonitor``."""
        self._monitored = {"devices": devices, "interval_s": interval_s, "gpm": gpm}
        if stall_after_s is not None and self.stall_watch is None:
            self.stall_watch = StallWatch(self, stall_after_s, self.board("stalls", compat.own_store))

    def begin(self) -> RunRecorder:
        """Begin to measure what is known only when training starts: the loader, the GPUs, the ranks."""
        if self.timer.fault is not None:
            raise self.timer.fault
        if self.recorder is None:
            place = self.run.place
            self.started_s = time.time()
            self.ending.listen()
            self.memory = MemoryHistory(
                self.timer.memory,
                worker_pids=lambda: compat.worker_pids(self.run.iterator),
                is_validating=lambda: base_phase(self.clock.current.phase) == VALIDATION,
            )
            if self._monitored is not None and place.rank == 0:
                self.background.add("Sampling the memory", self._poll_memory)
            self._exchange = self.board("measured")
            self._exchange.publish(0, node=place.node, pid=os.getpid())
            if place.local_rank == 0 and self.gpus is None:  # one process of a node is enough to sample its GPUs
                self._open_gpus(**(self._monitored or {"devices": "trainer", "interval_s": 1.0, "gpm": True}))
            self.recorder = RunRecorder(
                self.run, self.clock, self._exchange, self.timer.rank_waits, self.gpus, self.timer.memory
            )
            if self.timer.memory is not None and self.gpus is not None:
                self.timer.memory.when_read = self.gpus.note_memory
        return self.recorder

    def board(self, name: str, connect: Callable[[], Any] = compat.default_store) -> RankExchange:
        """Return a new board, in a store, on which the ranks of this training exchange something."""
        place = self.run.place
        return RankExchange(f"{self._name}/{name}", rank=place.rank, ranks=place.world_size, connect=connect)

    def _open_gpus(self, devices: str, interval_s: float, gpm: bool) -> None:
        trained_on = gpu_readings(self.run.gpus)
        try:
            gpus = self._every_gpu() if devices == "all" else trained_on
            if not gpus and not trained_on:
                return
            self.gpus = GpuWatch(
                gpus,
                lambda: self._own_pids,
                trained_on=[gpu.uuid for gpu in trained_on if gpu.uuid is not None],
                interval_s=interval_s,
                gpm=gpm,
                node=self.run.place.node,
            )
        except NvmlUnavailableError as error:
            self.gpu_note = f"No GPU was measured. {error}"
            return
        from lightning_gpu_tools.gpus import nvml  # only where there are GPUs: it imports pynvml

        self._pids_are_ours = nvml.pids_are_ours()

    def _every_gpu(self) -> tuple[GpuReading, ...]:
        readings = sampler.read_gpus()
        broken = [f"GPU {gpu.index} is not measured: {gpu.error}." for gpu in readings if gpu.error]
        self.gpu_note = " ".join(broken) or (None if readings else "No GPU: the driver lists none.")
        return tuple(gpu for gpu in readings if not gpu.error)

    def _find_own_pids(self) -> None:
        """Find out this job's processes on the node by the driver's numbers, as soon as all ranks have published."""
        exchange = self._exchange
        if self._own_pids is None and self._pids_are_ours and exchange is not None:
            place = self.run.place
            mates = [facts["pid"] for facts in exchange.read(0) if facts["node"] == place.node]
            if len(mates) >= max(1, exchange.ranks // max(1, place.nodes)):
                self._own_pids = frozenset(mates)

    def _enter(self, phase: sampler.Phase) -> None:
        if self.gpus is not None:
            self.gpus.enter(phase)
        if self.timer.memory is not None:
            self.timer.memory.enter(phase)

    def begin_validation_batch(self, batch: Any, number: int) -> None:
        """Note that a batch of validation begins; number 0 begins another validation."""
        if self.stall_watch is not None:
            self.stall_watch.beats += 1
        self.ending.begin_validation_batch(batch, number)

    def after_step(self, batch: Any = None) -> None:
        """Sample what has to be sampled after a step; nearly always this does nothing.

        Args:
            batch: Of the step; ``None`` if it was noted when the step began.
        """
        if self.clock.steps != self._last_step and self.recorder is not None:
            is_first, self._last_step = self._last_step < 0, self.clock.steps
            if batch is not None:
                self.recorder.note_batch(batch)
            self.recorder.after_step()
            if self.stall_watch is not None and self.stall_watch.notes:
                self.clock.as_own_work(self.stall_watch.pass_on)
            if is_first and self._monitored is not None and self.run.place.rank == 0:
                self.clock.as_own_work(self._check_surroundings, self.recorder.batch_bytes)

    def _check_surroundings(self, batch_bytes: int | None) -> None:
        """Warn, once, of what would end the training later."""
        self._warn_once([*shortcomings(read_surroundings(self.run, batch_bytes))])

    def _poll_memory(self) -> float:
        # What the first steps fill does not count: caches, workers, the allocator, what torch.compile keeps.
        return self.memory.poll() if self.clock.steps > WARM_UP_STEPS else _WARM_UP_POLL_S

    def log_if_due(self) -> float:
        """Log the GPUs at the steps at which loggers get metrics; return after which of the clock's to ask again."""
        every = self.run.log_every_n_steps
        if not every:
            return math.inf
        step = self.run.logged_step
        turn, since = divmod(step + 1, every)
        if self._logs is None:  # of the steps before this one, which may be of an earlier fit
            self._logs = step // every
        if turn > self._logs:
            self._logs = turn
            self.clock.as_own_work(self._log, step)
        return self.clock.steps + every - since  # at least: with accumulated gradients a step has several batches

    def _log(self, step: int) -> None:
        self._warn_once([*map(pace, self.memory.alarms), *self._faults])
        if self.gpus is not None and self.run.place.rank == 0:
            self._find_own_pids()
            metrics, troubles = self.gpus.take()
            self._warn_once(troubles)
            self._log_metrics(metrics, step)
            self._logged = metrics

    @property
    def _faults(self) -> list[str]:
        return [*self.background.faults, *(() if self.stall_watch is None else self.stall_watch.faults)]

    @property
    def stalls(self) -> tuple[Stall, ...]:
        """The times so far in which this rank saw the training make no progress."""
        return () if self.stall_watch is None else self.stall_watch.stalls

    def _log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        for logger in self.run.loggers if metrics else ():
            separator = logger.group_separator
            logger.log_metrics({name.replace("/", separator): value for name, value in metrics.items()}, step=step)

    def _warn_once(self, troubles: list[str]) -> None:
        for trouble in troubles:
            if trouble not in self._warned:
                self._warned.add(trouble)
                self.warn(trouble)

    def warn(self, message: str, category: type[Warning] = UserWarning) -> None:
        """Warn on rank zero, and have the report written: whoever is warned may want to read more."""
        self.report_wanted = True
        if self.run.place.rank == 0:
            warnings.warn(message, category, stacklevel=2)

    def end_epoch(self) -> None:
        """Publish for the other ranks how this epoch went; on rank 0, log the GPUs of the other nodes."""
        place = self.run.place
        if self._exchange is None or self._epochs_published == self.clock.epochs:
            return
        self._epochs_published = self.clock.epochs
        self.publish(next_turn=True)
        if self._monitored is None or place.rank != 0 or place.nodes < 2:
            return
        published = self._wait_for_ranks(self._exchange, TIMEOUT_S)
        self._log_other_nodes([facts for facts in published if facts["rank"] != place.rank and "metrics" in facts])

    def _log_other_nodes(self, others: list[dict[str, Any]]) -> None:
        """Log the GPUs of other nodes by what these have published, and warn of what went wrong there."""
        known = [self._logged, *(facts["metrics"] for facts in others)]
        count, notes = count_gpus(known, self.run.place.nodes), []
        if count > MAX_NAMED_GPUS:
            known[1:] = [job_metrics(known)]
            notes = [
                f"This job has {count:,} GPUs. Loggers get those of node 0 by name, and of all of them "
                f"gpu/all/<metric>/min, mean and max. {FILE_NAME} has every GPU."
            ]
        for metrics in known[1:]:
            self._log_metrics(metrics, self.run.logged_step - 1)
        troubles = [trouble for facts in others for trouble in facts["troubles"] if trouble not in self._warned]
        more = len(troubles) - _MAX_TROUBLES
        rest = [f"{more:,} more warnings about GPUs of other nodes are left out."] if more > 0 else []
        self._warn_once([*notes, *troubles[:_MAX_TROUBLES], *rest])

    def _wait_for_ranks(self, exchange: RankExchange, timeout_s: float) -> list[dict[str, Any]]:
        published = exchange.read(self._turn, timeout_s)
        if exchange.missed:
            self._warn_once([f"Ranks {exchange.missed} reported nothing within {TIMEOUT_S:.0f} s; they are left out."])
        return published

    def publish(self, *, next_turn: bool, at_end: bool = False) -> None:
        """Publish how fast this rank is, and from other nodes than the first also what their GPUs did.

        Args:
            next_turn: Whether all ranks do this at the same moment, so that others may wait for it.
            at_end: Whether to poll the GPUs once more.
        """
        if self.recorder is None or self._exchange is None:
            return
        self._find_own_pids()
        self._turn += next_turn
        facts: dict[str, Any] = {"own_step": self.recorder.own_step()}
        if self.run.place.world_size > 1:
            facts["largest_batch_size"] = self.recorder.largest_batch_size()
            share = own_share(self.run, self.timer.memory, self.gpus, self._own_pids)
            if share is not None:  # without what would be a long message
                share = dataclasses.replace(share, memory=dataclasses.replace(share.memory, timeline=()))
                facts["memory"] = dataclasses.asdict(share)
        if next_turn and self._monitored and self.gpus is not None and self.run.place.rank != 0:
            facts["metrics"], facts["troubles"] = self.gpus.take()
            summaries = self.gpus.summaries(at_end=at_end)
            facts["gpus"] = [dataclasses.asdict(gpu.to_send(at_end=at_end)) for gpu in summaries]
        self._exchange.publish(self._turn, **facts)

    def finish(self, timeout_s: float) -> None:
        """Stop the clock, publish a last time, and on rank 0 wait, at most so long, for the other ranks to do so."""
        if self._finished:
            return
        if self.stall_watch is not None:
            self.stall_watch.close(self.ending.outcome)
            self.stall_watch.pass_on()
        self.background.close()
        self._finished = True
        self._warn_once(self._faults)
        self.timer.stop()
        if self.recorder is not None and self._exchange is not None and self.clock.ran:
            self.publish(next_turn=True, at_end=True)
            if self.run.place.rank == 0:
                self._wait_for_ranks(self._exchange, timeout_s)

    @property
    def own_pids(self) -> frozenset[int] | None:
        """This job's processes on the node by the driver's numbers; ``None`` if they are not known."""
        self._find_own_pids()
        return self._own_pids

    def gpu_summaries(self) -> tuple[GpuSummary, ...]:
        """Return each GPU of this node over the whole run so far; at its end they are polled once more."""
        if self.gpus is None:
            return ()
        summaries = self.gpus.summaries(at_end=self._finished)
        if self._finished:
            self._warn_once(self.gpus.take()[1])
        return summaries

    def gpus_of_other_nodes(self) -> tuple[GpuSummary, ...]:
        """Return the GPUs that the first ranks of the other nodes published last, as far as they could be heard."""
        published = [] if self._exchange is None else self._exchange.read(self._turn)
        return tuple(read(GpuSummary, gpu, {}) for facts in published for gpu in facts.get("gpus", ()))

    def memory_accounts(self, *, all_ranks: bool) -> tuple[MemoryAccount, ...]:
        """Return what the memory of each GPU was used for.

        Args:
            all_ranks: Of every rank that could be heard; else of this one alone, which is faster.
        """
        self._find_own_pids()
        share = own_share(self.run, self.timer.memory, self.gpus, self._own_pids)
        shares = [] if share is None else [share]
        if all_ranks and self._exchange is not None:
            others = (one for one in self._exchange.read(self._turn) if one["rank"] != self.run.place.rank)
            shares += (read(MemoryShare, facts["memory"], {}) for facts in others if facts.get("memory"))
        return accounts(shares)

    def diagnosis(self, measured: RunMeasurements | None = None) -> Diagnosis | None:
        """Return what the measurements say, by the advisor's thresholds; ``None`` before training begins."""
        if self.recorder is None:
            return None
        if self._diagnosis is not None:
            return self._diagnosis
        measured = measured or self.recorder.measurements()
        diagnosis = diagnose(
            measured,
            searched=self.loader_result,
            growth=self.memory.growth() if self._finished else self.memory.alarms,
            out_of_memory=self.ending.out_of_memory,
            failure=self.ending.failure,
            **self.thresholds,
        )
        if self._finished:
            self._diagnosis = diagnosis
        return diagnosis

    @property
    def unseen(self) -> list[str]:
        """What could not be measured with this version of Lightning or torch."""
        counters = self.timer.memory
        uncounted = None if counters is None else counters.failure
        deaf = self._exchange is not None and self._exchange.ranks < self.run.place.world_size
        return [
            *self.timer.unseen,
            *(self.recorder.unseen if self.recorder is not None else ()),
            *(["torch.distributed's store"] if deaf else ()),
            *([f"torch's counters of memory ({uncounted!r})"] if uncounted is not None else ()),
        ]
