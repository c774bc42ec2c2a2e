"""The measuring of one training: clock, recorder, GPUs, memory, exchange between ranks, and the diagnosis."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
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
from lightning_gpu_tools.training.rank_exchange import MAX_ENTRY_BYTES, Board, Entry, RankExchange
from lightning_gpu_tools.training.rank_waits import RankWaits
from lightning_gpu_tools.training.run_measurements import RunMeasurements
from lightning_gpu_tools.training.step_clock import WARM_UP_STEPS, StepClock
from lightning_gpu_tools.units import format_bytes, number_ranges, printable

# Counts the trainings with several ranks, which all of them train in the same order.
_trainings = itertools.count()
_WARM_UP_POLL_S = 0.4
_MAX_TROUBLES = 8  # of other nodes at a time: what fits on a screen


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
        self._heard: dict[str, float] = {}
        self._heard_troubles: list[str] = []
        self._heard_turns: dict[int, int] = {}
        self._own_pids: frozenset[int] | None = None
        self._pids_are_ours = False
        self._last_step = -1
        self._logs: int | None = None
        self._logged: Mapping[str, float] = {}
        self._warned: set[str] = set()
        self._finished = False
        self._diagnosis: Diagnosis | None = None
        # A rank that begins the next training must not replace what rank 0 has yet to read of this one.
        self._name = f"training {next(_trainings) % 2 if run.place.world_size > 1 else 0}"
        self.timer = timer(self.clock, self._enter)

    def close(self) -> None:
        """End everything. What was measured stays readable."""
        if self.stall_watch is not None:
            self.stall_watch.close()
        self.background.close()
        if self._exchange is not None:
            self._exchange.close()
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
            board = Board(f"{self._name}/stalls", self.run.place, self._own_store)
            self.stall_watch = StallWatch(self, stall_after_s, board)

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
            self._exchange = RankExchange(f"{self._name}/measured", place, self._store, self._hear)
            self._exchange.publish(pid=os.getpid())
            if place.local_rank == 0 and self.gpus is None:  # one process of a node is enough to sample its GPUs
                self._open_gpus(**(self._monitored or {"devices": "trainer", "interval_s": 1.0, "gpm": True}))
            self.recorder = RunRecorder(self.run, self.clock, self.timer.rank_waits, self.gpus, self.timer.memory)
            if self.timer.memory is not None and self.gpus is not None:
                self.timer.memory.when_read = self.gpus.note_memory
        return self.recorder

    @cached_property
    def _own_store(self) -> Any:
        return compat.own_store() if self.run.place.world_size > 1 else None

    @property
    def _store(self) -> Any:
        return self._own_store or compat.default_store()

    def board(self, name: str) -> Board:
        """Return a new board on which the ranks of this training exchange something."""
        return Board(f"{self._name}/{name}", self.run.place, self._store)

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
        exchange, place = self._exchange, self.run.place
        if self._own_pids is None and self._pids_are_ours and exchange is not None:
            mates = [entry["pid"] for entry in exchange.entries() if entry["node"] == place.node]
            if len(mates) >= min(place.local_ranks, exchange.ranks):
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
            if self._exchange is not None and self._exchange.wanted:
                self.clock.as_own_work(self._publish)
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
        self._log_other_nodes(step)

    def _log_other_nodes(self, step: int) -> None:
        """Log what has been heard of the GPUs of other nodes since the last time; what is late comes the next time."""
        metrics, self._heard = self._heard, {}
        self._log_metrics(metrics, step)
        troubles, self._heard_troubles = self._heard_troubles, []
        self._warn_once(troubles)

    def _hear(self, entries: Sequence[Entry]) -> None:
        """Take in, on rank 0, what the ranks have published; in the thread of the exchange."""
        if self.recorder is not None:
            self.recorder.hear(entries)
        others = [entry for entry in entries if "metrics" in entry]
        news = [entry for entry in others if entry["turn"] > self._heard_turns.get(entry["rank"], 0)]
        self._heard_turns |= {entry["rank"]: entry["turn"] for entry in news}
        if not news:
            return
        known, notes = [self._logged, *(entry["metrics"] for entry in others)], []
        count = count_gpus(known, self.run.place.nodes)
        heard = [self._heard, *(entry["metrics"] for entry in news)]
        if count > MAX_NAMED_GPUS:
            heard = [job_metrics(known)]
            notes = [
                f"This job has {count:,} GPUs. Loggers get those of node 0 by name, and of all of them "
                f"gpu/all/<metric>/min, mean and max. {FILE_NAME} has every GPU."
            ]
        self._heard = {name: value for metrics in heard for name, value in metrics.items()}
        troubles = [trouble for entry in news for trouble in entry["troubles"] if trouble not in self._warned]
        more = len(troubles) - _MAX_TROUBLES
        rest = [f"{more:,} more warnings about GPUs of other nodes are left out."] if more > 0 else []
        self._heard_troubles = [*self._heard_troubles, *notes, *troubles[:_MAX_TROUBLES], *rest]

    @property
    def _entries(self) -> list[Entry]:
        """What was published by each rank that was heard; see ``RankExchange.entries``."""
        return [] if self._exchange is None else self._exchange.entries()

    @property
    def _threads(self) -> list[BackgroundJobs | RankExchange | StallWatch]:
        return [one for one in (self.background, self._exchange, self.stall_watch) if one is not None]

    @property
    def _faults(self) -> list[str]:
        return [fault for one in self._threads for fault in one.faults]

    @property
    def thread_cpu_s(self) -> float:
        """CPU time of all threads of the session so far but that of the GPUs' sampler."""
        return sum(one.cpu_s for one in self._threads)

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

    def _publish(self, *, at_end: bool = False) -> None:
        """Publish how fast this rank is, and from the first rank of another node also what its GPUs did.

        Args:
            at_end: Whether to poll the GPUs once more.
        """
        assert self.recorder is not None
        assert self._exchange is not None
        self._find_own_pids()
        facts: dict[str, Any] = {"own_step": self.recorder.own_step()}
        metrics: Mapping[str, float] | None = None
        if self.run.place.world_size > 1:
            facts["throttled"] = {} if self.gpus is None else self.gpus.throttled_percent()
            facts["largest_batch_size"] = self.recorder.largest_batch_size()
            if self._monitored and self.gpus is not None and self.run.place.rank != 0:
                metrics, facts["troubles"] = self.gpus.take()
                summaries = self.gpus.summaries(at_end=at_end)
                facts["gpus"] = [dataclasses.asdict(gpu.to_send(at_end=at_end)) for gpu in summaries]
            share = own_share(self.run, self.timer.memory, self.gpus, self._own_pids)
            if share is not None:  # without what would be a long message
                share = dataclasses.replace(share, memory=dataclasses.replace(share.memory, timeline=()))
                facts["memory"] = dataclasses.asdict(share)
            if metrics is not None:  # the first that is left out where an entry is too long
                facts["metrics"] = metrics
        self._exchange.publish(**facts)

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
            self._publish(at_end=True)
            late = self._exchange.finish(timeout_s)
            if self.run.place.rank == 0:
                self._warn_of_ranks(late, timeout_s)
                if self._monitored:
                    self._log_other_nodes(self.run.logged_step - 1)

    def _warn_of_ranks(self, late: list[int], timeout_s: float) -> None:
        if late and timeout_s:
            self._warn_once(
                [
                    f"{_ranks(late)} did not report within {timeout_s:.0f} s after the end. The report has what came "
                    "from there before."
                ]
            )
        cut = [entry["rank"] for entry in self._entries if "left_out" in entry]
        if cut:
            names = sorted({name for entry in self._entries for name in entry.get("left_out", ())})
            self._warn_once(
                [
                    f"{_ranks(cut)} had more to report than {format_bytes(MAX_ENTRY_BYTES)}. Left out: "
                    f"{', '.join(map(printable, names))}."
                ]
            )

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
        return tuple(read(GpuSummary, gpu, {}) for entry in self._entries for gpu in entry.get("gpus", ()))

    def memory_accounts(self, *, all_ranks: bool) -> tuple[MemoryAccount, ...]:
        """Return what the memory of each GPU was used for.

        Args:
            all_ranks: Of every rank that could be heard; else of this one alone, which is faster.
        """
        self._find_own_pids()
        share = own_share(self.run, self.timer.memory, self.gpus, self._own_pids)
        shares = [] if share is None else [share]
        if all_ranks:
            others = (entry for entry in self._entries if entry["rank"] != self.run.place.rank)
            shares += (read(MemoryShare, entry["memory"], {}) for entry in others if entry.get("memory"))
        return accounts(shares)

    def misses_ranks(self, measured: RunMeasurements) -> bool:
        """Return whether it is too early to judge: not every rank that can be heard has said how fast it is."""
        ranks = 1 if self._exchange is None or self.run.place.rank else self._exchange.ranks
        return ranks > 1 and len(measured.ranks) < ranks

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


def _ranks(numbers: list[int]) -> str:
    return f"Rank{'s' * (len(numbers) > 1)} {number_ranges(numbers)}"
