"""The measurement of one training: opening, stepping, finishing, judging."""

from __future__ import annotations

import itertools
import math
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, Literal, Protocol

from lightning_gpu_tools.advice.diagnosis import diagnose
from lightning_gpu_tools.advice.findings import Diagnosis
from lightning_gpu_tools.advice.loader_plan import LoaderResult
from lightning_gpu_tools.advice.memory_account import pace
from lightning_gpu_tools.advice.memory_causes.stray_contexts import stray_contexts
from lightning_gpu_tools.advice.out_of_memory import OutOfMemory, OutOfMemoryMessage
from lightning_gpu_tools.advice.shortcomings import shortcomings
from lightning_gpu_tools.advice.stalls import Stall
from lightning_gpu_tools.errors import NvmlUnavailableError
from lightning_gpu_tools.gpus import limits, sampler
from lightning_gpu_tools.gpus.metrics import GpuSummary
from lightning_gpu_tools.gpus.watch import GpuWatch
from lightning_gpu_tools.reports.report import COMPLETED
from lightning_gpu_tools.runs.ending import Ending
from lightning_gpu_tools.runs.failures import failure_of, worker_exits
from lightning_gpu_tools.runs.out_of_memory import message_of, out_of_memory_facts
from lightning_gpu_tools.runs.ranks import Ranks
from lightning_gpu_tools.runs.run import Run, gpu_readings
from lightning_gpu_tools.runs.run_recorder import RunRecorder
from lightning_gpu_tools.runs.stall_watch import StallAfter, StallWatch
from lightning_gpu_tools.runs.surroundings import read_surroundings
from lightning_gpu_tools.selection import claims, yielding
from lightning_gpu_tools.training import compat
from lightning_gpu_tools.training.background import BackgroundJobs
from lightning_gpu_tools.training.cores import CoreUsers
from lightning_gpu_tools.training.drift import GraphSizes
from lightning_gpu_tools.training.line_sampler import LineSampler, WorkerLines
from lightning_gpu_tools.training.memory_counters import MemoryCounters
from lightning_gpu_tools.training.memory_history import MemoryHistory
from lightning_gpu_tools.training.phases import CAPTURED, OPTIMIZER, VALIDATION, base_phase, is_backward
from lightning_gpu_tools.training.rank_exchange import Board, RankExchange
from lightning_gpu_tools.training.rank_waits import RankWaits
from lightning_gpu_tools.training.run_measurements import RunMeasurements
from lightning_gpu_tools.training.step_clock import WARM_UP_STEPS, StepClock

_trainings = itertools.count()  # with several ranks, in the same order on all of them
_WARM_UP_POLL_S = 0.4
_LOG_EVERY_S = 1.0  # at most, unless the GPUs are polled more often: our default
_MAX_NOT_ASKED = 16  # our default: steps in a row without a look at whether it is time to log


def check_interval(interval_s: float) -> None:
    """Raise ``ValueError`` if GPUs cannot be polled at this interval."""
    if not 0 < interval_s < math.inf:
        raise ValueError(f"interval_s must be a positive number of seconds, got {interval_s!r}.")


class Timer(Protocol):
    """The driver of a session's clock."""

    rank_waits: RankWaits  # takes waiting for other ranks out of the clock's phases
    worker_lines: WorkerLines
    graph: GraphSizes
    memory: MemoryCounters | None  # of this rank's GPU; None on another device
    fault: Exception | None  # the error that ended the timing

    @property
    def is_trial(self) -> bool:
        """Whether a tuner runs a trial, which is not measured."""

    @property
    def unseen(self) -> list[str]:
        """The parts that could not be timed."""

    def stop(self) -> None:
        """Stop the clock and restore everything, once."""


class Session:
    """All measurements of one training, each made once.

    Call :meth:`begin` when training starts, :meth:`after_step` after each step, :meth:`finish` at the end, and then
    :meth:`close`. All that share it may call every method: only the first call at each moment counts.

    ``timer`` makes the driver of the clock, from the clock and a function to call when validation begins and ends.
    """

    # Since training has begun:
    memory: MemoryHistory  # of this process
    ranks: Ranks

    def __init__(self, run: Run, timer: Callable[[StepClock, Callable[[sampler.Phase], None]], Timer]) -> None:
        self.run = run
        self.clock = StepClock()
        self.ending = Ending(run, self.clock)
        self.background = BackgroundJobs()
        self.recorder: RunRecorder | None = None  # None before training begins
        self.gpus: GpuWatch | None = None  # in the first process of each node
        self.gpu_note: str | None = None  # why GPUs are not measured
        self.stall_watch: StallWatch | None = None
        self.started_s = 0.0  # time.time()
        self.report_wanted = False  # after the next step
        # Set by an advisor, or by a search for settings:
        self.thresholds: Mapping[str, Any] = {}
        self.loader_result: LoaderResult | None = None
        self._process = os.getpid()
        self._is_monitored = False
        self._sampling: dict[str, Any] = {"devices": "trainer", "interval_s": 1.0, "gpm": True}
        self._threads: list[BackgroundJobs | RankExchange] = [self.background]
        self.last_step = -1  # of the clock: the last one after which it sampled
        self._logs: int | None = None
        self._next_log_s = 0.0  # by the clock
        self._next_look_at_contexts = 0
        self._warned: set[str] = set()
        self._finished = False
        self._diagnosis: Diagnosis | None = None
        # A rank that begins the next training must not replace entries of this one that rank 0 has yet to read.
        self._name = f"training {next(_trainings) % 2 if run.place.world_size > 1 else 0}"
        self.timer = timer(self.clock, self._enter)

    @property
    def is_of_parent(self) -> bool:
        """Whether this process was forked during the training, and therefore has none of its threads."""
        return os.getpid() != self._process

    def close(self) -> None:
        """End everything. What was measured stays readable."""
        if self.is_of_parent:
            self.timer.stop()
            return
        if self.stall_watch is not None:
            self.stall_watch.close()
        for thread in self._threads:
            thread.close()
        self.timer.stop()
        self.timer.worker_lines.close()
        if self.timer.memory is not None:
            self.timer.memory.close()
        if self.gpus is not None:
            self.gpus.close()
        self.ending.close()

    # Opening

    def monitor(
        self, *, devices: Literal["trainer", "all"], interval_s: float, gpm: bool, stall_after_s: StallAfter
    ) -> None:
        """Log, watch and report the training; call this before it begins."""
        self._is_monitored = True
        self._sampling = {"devices": devices, "interval_s": interval_s, "gpm": gpm}
        if stall_after_s is not None and self.stall_watch is None:
            board = Board(f"{self._name}/stalls", self.run.place, self._own_store)
            self.stall_watch = StallWatch(
                self.clock,
                self.run.place,
                board,
                stall_after_s,
                is_trial=lambda: self.timer.is_trial,
                gpu_percent=lambda: None if self.gpus is None else self.gpus.latest_percent,
                write_report=self.background.run_now,
            )
            self._threads.append(self.stall_watch.jobs)

    def begin(self) -> RunRecorder:
        """Start to measure what is known only now: the loader, the GPUs, the ranks."""
        if self.timer.fault is not None:
            raise self.timer.fault
        if self.recorder is None:
            place, memory = self.run.place, self.timer.memory
            self.started_s = time.time()
            self.ending.listen()
            self.memory = MemoryHistory(
                memory,
                worker_pids=lambda: compat.worker_pids(self.run.iterator),
                is_validating=lambda: base_phase(self.clock.current.phase) == VALIDATION,
            )
            if self._is_monitored and place.rank == 0:
                self.background.add("Sampling the memory", self._poll_memory)
            if self._is_monitored and claims.held_claims():
                self.background.add("Keeping the claim", self._keep_claims)
            if place.local_rank == 0:  # one process of a node is enough to sample its GPUs
                self._open_gpus(**self._sampling)
                self.warn(*([self.gpu_note] if self.gpu_note else []))
            core_users = CoreUsers(lambda: self.clock.core_wait_s, lambda: self.ranks.pids_on_node() or ())
            lines = LineSampler(self.clock, self.timer.worker_lines)
            rank_waits, graph = self.timer.rank_waits, self.timer.graph
            recorder = RunRecorder(self.run, self.clock, rank_waits, self.gpus, memory, core_users, lines, graph)
            self.ranks = Ranks(f"{self._name}/measured", self._store, recorder, is_monitored=self._is_monitored)
            if place.rank == 0:
                self.background.add("Sampling who uses the cores", recorder.core_users.poll)
                self.background.add("Reading what torch.compile has compiled", recorder.compilations.poll)
                self.background.add("Looking at the storage", recorder.poll_storage)
                self.background.add("Reading what grows during training", recorder.drift.poll)
            lines.start()
            self._threads += lines, self.ranks.exchange
            if memory is not None and self.gpus is not None:
                memory.when_read = self.gpus.note_memory
            if memory is not None and self._is_monitored:
                self.background.add("The search for the largest batch", recorder.find_largest_batch)
            self.recorder = recorder
        return self.recorder

    @cached_property
    def _own_store(self) -> Any:
        return compat.own_store() if self.run.place.world_size > 1 else None

    @property
    def _store(self) -> Any:
        return self._own_store or compat.default_store()

    def board(self, name: str) -> Board:
        """Return a new board for the ranks of this training."""
        return Board(f"{self._name}/{name}", self.run.place, self._store)

    def _open_gpus(self, devices: str, interval_s: float, gpm: bool) -> None:
        gpus = trained_on = gpu_readings(self.run.gpus)
        try:
            if devices == "all":
                from lightning_gpu_tools.gpus import nvml  # imports pynvml

                readings = nvml.read_gpus(limit_s=limits.LIMIT_S)
                gpus = tuple(gpu for gpu in readings if not gpu.error)
                broken = [f"GPU {gpu.index} is not measured: {gpu.error}." for gpu in readings if gpu.error]
                self.gpu_note = " ".join(broken) or (None if readings else "No GPU: the driver lists none.")
            if gpus or trained_on:
                self.gpus = GpuWatch(
                    gpus,
                    lambda: self.ranks.pids_on_node(),
                    trained_on=trained_on,
                    interval_s=interval_s,
                    gpm=gpm,
                    node=self.run.place.node,
                )
                self._look_for_waiting_jobs(self.gpus, [str(gpu.uuid) for gpu in trained_on])
        except NvmlUnavailableError as error:
            self.gpu_note = f"No GPU was measured. {error}"

    def _look_for_waiting_jobs(self, gpus: GpuWatch, uuids: Sequence[str]) -> None:
        if self._is_monitored and uuids and not claims.is_kept():
            # It may print from the thread: nothing trains on GPUs that have been idle for half an hour.
            reminder = yielding.Reminder(uuids, lambda: gpus.idle_s(uuids), claims.warn)
            self.background.add("Looking for jobs that wait", reminder.look)

    # Stepping

    def _enter(self, phase: sampler.Phase) -> None:
        if phase == "validation" and self.clock.running:
            self.clock.validations += 1
        if self.gpus is not None:
            self.gpus.enter(phase)
        if self.timer.memory is not None:
            self.timer.memory.enter(phase)

    def begin_validation_batch(self, batch: Any, number: int) -> None:
        """Record a validation batch; number 0 begins another validation."""
        if self.stall_watch is not None:
            self.stall_watch.beats += 1
        self.ending.begin_validation_batch(batch, number)

    def after_step(self, batch: Any = None) -> None:
        """Sample what is due after a step; ``batch`` is its batch, unless recorded when the step began."""
        if self.clock.steps != self.last_step and self.recorder is not None:
            is_first, self.last_step = self.last_step < 0, self.clock.steps
            if batch is not None:
                self.recorder.note_batch(batch)
            self.recorder.after_step()
            if self.ranks.exchange.wanted:
                self.clock.as_own_work(self.ranks.publish)
            if self.stall_watch is not None and self.stall_watch.notes:
                self.clock.as_own_work(self.stall_watch.pass_on)
            if is_first:
                self.clock.as_own_work(self.recorder.own_contexts)
                if self._is_monitored and self.run.place.rank == 0:
                    self.clock.as_own_work(self._check_surroundings, self.recorder)

    def _check_surroundings(self, recorder: RunRecorder) -> None:
        """Warn of shortages that would end the training later."""
        read = partial(read_surroundings, self.run, recorder.batch_bytes)
        found = recorder.facts.read("disks, memory and claims around the training", read, None)
        self.warn(*(() if found is None else shortcomings(found)))

    def _poll_memory(self) -> float:
        # Memory that the first steps fill, such as caches, does not count.
        return self.memory.poll() if self.clock.steps > WARM_UP_STEPS else _WARM_UP_POLL_S

    def _keep_claims(self) -> float:
        self.background.faults += claims.keep_claims()
        return claims.KEEP_EVERY_S

    def log_if_due(self) -> float:
        """Log the GPUs when loggers get metrics, unless nothing can be new since the last time.

        Returns the step of the clock after which to call this again.
        """
        every = self.run.log_every_n_steps
        if not every:
            return math.inf
        step = self.run.logged_step
        turn, since = divmod(step + 1, every)
        if self._logs is None:  # of the steps before this one, which may be of an earlier fit
            self._logs = step // every
        if turn > self._logs:
            self._logs = turn
            if self.clock.since_s >= self._next_log_s:
                self._next_log_s = self.clock.since_s + min(_LOG_EVERY_S, self._sampling["interval_s"])
                self.clock.as_own_work(self._log, step)
        if every == 1:  # half of the steps until then at their pace so far, because they may slow down
            steps, left_s = self.clock.steps, max(0.0, self._next_log_s - self.clock.since_s)
            return steps + 1 + min(_MAX_NOT_ASKED, int(left_s / 2 * steps / self.clock.wall_s))
        return self.clock.steps + every - since  # at least: with accumulated gradients a step has several batches

    def _log(self, step: int) -> None:
        self.warn(*map(pace, self.memory.alarms), *self._faults)
        if self.run.place.rank == 0:
            if self.clock.steps >= self._next_look_at_contexts:
                self._look_at_contexts()
            if self.gpus is not None:
                self._log_gpus(self.gpus, step)
        self._log_gpus(self.ranks, step)

    def _look_at_contexts(self) -> None:
        """Warn of contexts on GPUs of other ranks; look ever less often."""
        if self.recorder is not None and len(self.ranks.exchange.entries()) == self.ranks.exchange.ranks:
            self._next_look_at_contexts = 2 * self.clock.steps
            self.warn(*(one.advice for one in stray_contexts(self.recorder.contexts())))

    def _log_gpus(self, source: GpuWatch | Ranks, step: int) -> None:
        metrics, troubles = source.take_metrics()
        self.warn(*troubles)
        for logger in self.run.loggers if metrics else ():
            separator = getattr(logger, "group_separator", "/")
            named = {name.replace("/", separator): value for name, value in metrics.items()}
            logger.log_metrics(metrics=named, step=step)  # by keyword, as Lightning does

    def warn(self, *messages: str, category: type[Warning] = UserWarning) -> None:
        """Warn of each message once, on rank 0, and request a write of the report, which has more."""
        for message in messages:
            if message not in self._warned:
                self._warned.add(message)
                self.report_wanted = True
                if self.run.place.rank == 0:
                    warnings.warn(message, category, stacklevel=2)

    # Finishing, and judging

    def note_error(self, error: BaseException, step: int) -> str:
        """Return the outcome of a training that an error ended; the first call keeps the explanation."""
        ending = self.ending
        if ending.outcome == COMPLETED:
            is_wanted = not isinstance(error, Exception)  # Ctrl-C, sys.exit
            exits = [] if is_wanted else worker_exits(self.run, error)
            kills, message = ending.kills, message_of(error, exits)
            failure = None if is_wanted else failure_of(error, exits, kills)
            if failure is not None or (message is not None and message.is_certain):
                self.begin()  # the error may have come before training began
            found = None if message is None else self._out_of_memory(message, error, step, kills)
            ending.note_error(error, step, failure, found)
        return ending.outcome

    def _out_of_memory(
        self, message: OutOfMemoryMessage, error: BaseException, step: int, kills: int
    ) -> OutOfMemory | None:
        memory, job_pids = self.timer.memory, None
        if self.recorder is not None:
            self.ranks.exchange.read_node()
            job_pids = self.ranks.pids_on_node()
        return out_of_memory_facts(
            message,
            error,
            step,
            run=self.run,
            clock=self.clock,
            failures=self.ending.allocator,
            memory=None if memory is None else memory.facts(),
            growth=() if self.recorder is None else self.memory.growth(),
            gpus=self.gpus,
            job_pids=job_pids,
            kills=kills,
        )

    def finish(self, timeout_s: float) -> None:
        """Stop the clock, publish one last time, and on rank 0 wait at most ``timeout_s`` for the other ranks."""
        if self._finished:
            return
        if self.stall_watch is not None:
            self.stall_watch.close(self.ending.outcome)
            self.stall_watch.pass_on()
        self.background.close()
        self._finished = True
        self.warn(*self._faults)
        self.timer.stop()
        if self.recorder is not None and self.clock.ran:
            self.recorder.own_contexts(at_end=True)
            self.warn(*self.ranks.finish(timeout_s))
            self._log_gpus(self.ranks, self.run.logged_step - 1)

    def gpu_summaries(self) -> tuple[GpuSummary, ...]:
        """Return a summary of each GPU of this node over the whole run so far."""
        if self.gpus is None:
            return ()
        summaries = self.gpus.summaries(at_end=self._finished)
        if self._finished:
            self.warn(*self.gpus.take_metrics()[1])
        return summaries

    def diagnosis(self, measured: RunMeasurements | None = None) -> Diagnosis | None:
        """Return the diagnosis of the measurements, by the advisor's thresholds; ``None`` before training."""
        if self.recorder is None or self._diagnosis is not None:
            return self._diagnosis
        measured = measured or self.recorder.measurements()
        oom = self.ending.out_of_memory  # which has no contexts yet: those of other ranks may come later
        diagnosis = diagnose(
            measured,
            searched=self.loader_result,
            growth=self.memory.growth() if self._finished else self.memory.alarms,
            out_of_memory=None if oom is None else replace(oom, contexts=measured.contexts),
            failure=self.ending.failure,
            **self.thresholds,
        )
        if self._finished:
            self._diagnosis = diagnosis
        return diagnosis

    @property
    def stalls(self) -> tuple[Stall, ...]:
        """The times in which this rank saw no progress of the training."""
        return () if self.stall_watch is None else self.stall_watch.stalls

    @property
    def thread_cpu_s(self) -> float:
        """The CPU time of all threads except the GPUs' sampler."""
        return sum(thread.cpu_s for thread in self._threads)

    @property
    def _faults(self) -> list[str]:
        return [fault for thread in self._threads for fault in thread.faults]

    @property
    def unseen(self) -> list[str]:
        """The facts that could not be measured with this version of Lightning or torch."""
        found = list(self.timer.unseen)
        if self.recorder is not None:
            found += self.recorder.unseen
        if self.gpus is not None:
            found += self.gpus.refused
            if self.ranks.exchange.ranks < self.run.place.world_size:
                found.append("torch.distributed's store")
        phases = self.clock.seconds
        has_backward = any(map(is_backward, phases))
        if CAPTURED in phases or (self.clock.replays and not has_backward):
            found.append("the parts of a step inside a CUDA graph")
        elif OPTIMIZER in phases and not has_backward and self.recorder is not None and self.recorder.has_compiled:
            found.append("backward inside compiled code")
        if self.timer.rank_waits.unseen:
            found.append("waiting for other ranks within backward")
        if self.clock.knows_core_wait is False:
            found.append("waiting for a CPU core (schedstat)")
        if self.timer.memory is not None and self.timer.memory.failure is not None:
            found.append(f"torch's counters of memory ({self.timer.memory.failure!r})")
        return found
