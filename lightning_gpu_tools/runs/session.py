"""The measurement of one run: opening, stepping, finishing, judging."""

from __future__ import annotations

import itertools
import math
import os
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, Literal

from lightning_gpu_tools.advice.causes.memory.memory_growth import pace
from lightning_gpu_tools.advice.causes.memory.stray_contexts import stray_contexts
from lightning_gpu_tools.advice.diagnosis import diagnose
from lightning_gpu_tools.advice.findings import Diagnosis
from lightning_gpu_tools.advice.loader_plan import LoaderResult
from lightning_gpu_tools.advice.shortcomings import shortcomings
from lightning_gpu_tools.advice.stalls import Stall
from lightning_gpu_tools.errors import NvmlUnavailableError
from lightning_gpu_tools.gpus import limits, sampler
from lightning_gpu_tools.gpus.metrics import GpuSummary
from lightning_gpu_tools.gpus.watch import GpuWatch
from lightning_gpu_tools.memory.history import MemoryHistory
from lightning_gpu_tools.reports.report import COMPLETED
from lightning_gpu_tools.runs.ending import Ending
from lightning_gpu_tools.runs.failures import failure_of, worker_exits
from lightning_gpu_tools.runs.out_of_memory import message_of, out_of_memory_facts
from lightning_gpu_tools.runs.ranks import Ranks
from lightning_gpu_tools.runs.run import Run, Timer, gpu_readings
from lightning_gpu_tools.runs.run_recorder import RunRecorder
from lightning_gpu_tools.runs.stall_watch import StallAfter, StallWatch
from lightning_gpu_tools.runs.surroundings import read_surroundings
from lightning_gpu_tools.selection import claims
from lightning_gpu_tools.training import compat
from lightning_gpu_tools.training.background import BackgroundJobs
from lightning_gpu_tools.training.cores import CoreUsers
from lightning_gpu_tools.training.phases import CAPTURED, OPTIMIZER, is_backward
from lightning_gpu_tools.training.rank_exchange import Board
from lightning_gpu_tools.training.run_measurements import RunMeasurements
from lightning_gpu_tools.training.step_clock import WARM_UP_STEPS, StepClock

_trainings = itertools.count()  # in the same order on all ranks
_WARM_UP_POLL_S = 0.4
_LOG_EVERY_S = 1.0  # our default: at most this often, unless the GPUs are polled more often


class Session:
    """All measurements of one run, each made once.

    Call :meth:`begin` when training starts, :meth:`after_step` after each step, :meth:`finish` at the end, and then
    :meth:`close`. Several callbacks can share a session and call every method: only the first call of each step counts.

    ``timer`` creates the driver of the clock, from the clock and a function to call when validation begins and ends.
    """

    # Set when training begins:
    memory: MemoryHistory  # of this process
    ranks: Ranks

    def __init__(self, run: Run, timer: Callable[[StepClock, Callable[[sampler.Phase], None]], Timer]) -> None:
        self.run = run
        self.clock = StepClock()
        self.ending = Ending(run, self.clock)
        self.background = BackgroundJobs()
        self.recorder: RunRecorder | None = None  # None before training begins
        self.gpus: GpuWatch | None = None  # in the first process of each node
        self.gpu_note: str | None = None  # the reason why GPUs are not measured
        self.stall_watch: StallWatch | None = None
        self.started_s = 0.0  # time.time()
        self.report_wanted = False  # after the next step
        # Set by an advisor, or by a search for settings:
        self.thresholds: Mapping[str, Any] = {}
        self.loader_result: LoaderResult | None = None
        self._process = os.getpid()
        self._is_monitored = False
        self._sampling: dict[str, Any] = {"devices": "trainer", "interval_s": 1.0, "gpm": True}
        self._threads: list[BackgroundJobs] = [self.background]
        self.last_step = -1  # of the clock: the last sampled step
        self._logs: int | None = None
        self._next_log_s = 0.0  # by the clock
        self._next_check_of_contexts = 0
        self._warned: set[str] = set()
        self._finished = False
        self._diagnosis: Diagnosis | None = None
        # A rank that begins the next run must not replace entries of this run that rank 0 has not read yet.
        self._name = f"training {next(_trainings) % 2 if run.place.world_size > 1 else 0}"
        self.timer = timer(self.clock, self._enter)

    @property
    def is_of_parent(self) -> bool:
        """Whether this process was forked during training, and therefore has none of its threads."""
        return os.getpid() != self._process

    def close(self) -> None:
        """Stop all measuring. Measurements stay readable."""
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
        self,
        *,
        devices: Literal["trainer", "all"],
        interval_s: float,
        gpm: bool,
        stall_after_s: StallAfter,
        folder: str | None,
    ) -> None:
        """Enable logging, stall watch and report; call this before training begins.

        ``folder`` is that of the report, if there will be one.
        """
        self._is_monitored = True
        self._sampling = {"devices": devices, "interval_s": interval_s, "gpm": gpm}
        if stall_after_s is not None and self.stall_watch is None:
            board = Board(f"{self._name}/stalls", self.run.place, self._own_store)
            self.stall_watch = StallWatch(
                self.clock,
                self.run.place,
                board,
                stall_after_s,
                stacks=self.timer.worker_lines.stacks,
                is_trial=lambda: self.timer.is_trial,
                write_report=self.background.run_now,
                folder=folder,
            )
            self._threads.append(self.stall_watch.jobs)

    def begin(self) -> RunRecorder:
        """Start to measure the loader, the GPUs and the ranks, which are known only now."""
        if self.timer.fault is not None:
            raise self.timer.fault
        if self.recorder is None:
            place, memory = self.run.place, self.timer.memory
            self.started_s = time.time()
            self.ending.listen()
            self.memory = MemoryHistory(
                memory,
                worker_pids=lambda: compat.worker_pids(self.run.iterator),
            )
            if self._is_monitored and place.rank == 0:
                self.background.add("Sampling the memory", self._poll_memory)
            if self._is_monitored and claims.held_claims():
                self.background.add("Keeping the claim", self._keep_claims)
            if place.local_rank == 0:  # one process per node samples its GPUs
                self._open_gpus(**self._sampling)
                self.warn(*([self.gpu_note] if self.gpu_note else []))
            core_users = CoreUsers(
                lambda: self.clock.core_wait_s,
                lambda: self.ranks.pids_on_node() or (),
                lambda: {*self.timer.worker_lines.pids, *compat.worker_pids(self.run.iterator)},
            )
            recorder = RunRecorder(self.run, self.clock, self.timer, self.gpus, core_users)
            self.ranks = Ranks(f"{self._name}/measured", self._store, recorder, is_monitored=self._is_monitored)
            if place.rank == 0:
                self.background.add("Sampling the use of the cores", recorder.core_users.poll)
                self.background.add("Sampling the threads of the loader's workers", recorder.poll_worker_threads)
                self.background.add("Reading the compilations of torch.compile", recorder.compilations.poll)
                self.background.add("Reading the storage", recorder.read_storage)
                self.background.add("Sampling quantities that may grow", recorder.poll_readings)
            recorder.lines.start()
            self._threads += recorder.lines, self.ranks.exchange
            if memory is not None:
                self.ending.usual = lambda: memory.usual
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
        except NvmlUnavailableError as error:
            self.gpu_note = f"No GPU was measured. {error}"

    # Stepping

    def _enter(self, phase: sampler.Phase) -> None:
        if phase == "validation" and self.clock.running:
            self.clock.validations += 1
        self.ending.enter(phase)
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
        """Warn about shortages that would end training later."""
        read = partial(read_surroundings, self.run, recorder.batch_bytes)
        found = recorder.facts.read("the disks, memory and claims of this machine", read, None)
        self.warn(*(() if found is None else shortcomings(found)))

    def _poll_memory(self) -> float:
        # Memory that the first steps fill, such as caches, does not count.
        return self.memory.poll() if self.clock.steps > WARM_UP_STEPS else _WARM_UP_POLL_S

    def _keep_claims(self) -> float:
        self.background.faults += claims.keep_claims()
        return claims.KEEP_EVERY_S

    def log_if_due(self) -> float:
        """Log the GPUs when loggers get metrics, unless there can be no new sample.

        Returns the step of the clock after which to call this again.
        """
        every = self.run.log_every_n_steps
        if not every:
            return math.inf
        step = self.run.logged_step
        turn, since = divmod(step + 1, every)
        if self._logs is None:  # earlier steps may belong to an earlier fit
            self._logs = step // every
        if turn > self._logs:
            self._logs = turn
            if self.clock.since_s >= self._next_log_s:
                self._next_log_s = self.clock.since_s + min(_LOG_EVERY_S, self._sampling["interval_s"])
                self.clock.as_own_work(self._log, step)
        return self.clock.steps + every - since  # a lower bound: with accumulated gradients, a step has several batches

    def _log(self, step: int) -> None:
        self.warn(*map(pace, self.memory.alarms), *self._faults)
        if self.run.place.rank == 0:
            if self.clock.steps >= self._next_check_of_contexts:
                self._check_contexts()
            if self.gpus is not None:
                self._log_gpus(self.gpus, step)
        self._log_gpus(self.ranks, step)

    def _check_contexts(self) -> None:
        """Warn about contexts on GPUs of other ranks, less and less often."""
        if self.recorder is not None and len(self.ranks.exchange.entries()) == self.ranks.exchange.ranks:
            self._next_check_of_contexts = 2 * self.clock.steps
            self.warn(*(one.advice for one in stray_contexts(self.recorder.contexts())))

    def _log_gpus(self, source: GpuWatch | Ranks, step: int) -> None:
        metrics, troubles = source.take_metrics()
        self.warn(*troubles)
        for logger in self.run.loggers if metrics else ():
            separator = getattr(logger, "group_separator", "/")
            named = {name.replace("/", separator): value for name, value in metrics.items()}
            logger.log_metrics(metrics=named, step=step)  # by keyword, as Lightning does

    def warn(self, *messages: str, category: type[Warning] = UserWarning) -> None:
        """Warn with each message once, on rank 0, and request a write of the report."""
        for message in messages:
            if message not in self._warned:
                self._warned.add(message)
                self.report_wanted = True
                if self.run.place.rank == 0:
                    # Without the path and the code of this package, where no line of the program called it.
                    warnings.warn_explicit(message, category, "lightning_gpu_tools", 1)

    # Finishing, and judging

    def note_error(self, error: BaseException, step: int) -> str:
        """Return the outcome of a run that ended with an error; the first call records the explanation."""
        ending = self.ending
        if ending.outcome == COMPLETED:
            is_intended = not isinstance(error, Exception)  # Ctrl-C, sys.exit
            exits = [] if is_intended else worker_exits(self.run, error)
            kills, message = ending.kills, message_of(error, exits)
            failure = None if is_intended else failure_of(error, exits, kills)
            if failure is not None or (message is not None and message.is_certain):
                self.begin()  # the error may have been raised before training began
            found = None
            if message is not None:
                found = out_of_memory_facts(
                    message,
                    error,
                    step,
                    ending=ending,
                    memory=None if self.timer.memory is None else self.timer.memory.facts(),
                    growth=() if self.recorder is None else self.memory.growth(),
                    ranks=None if self.recorder is None else self.ranks,
                    kills=kills,
                )
            ending.note_error(error, step, failure, found)
            if found is not None and self.timer.memory is not None:
                self.timer.memory.note_failure(found.begin_bytes, found.allocated_bytes)
        return ending.outcome

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
        """Return the diagnosis of the measurements, with the advisor's thresholds; ``None`` before training."""
        if self.recorder is None or self._diagnosis is not None:
            return self._diagnosis
        measured = measured or self.recorder.measurements()
        oom = self.ending.out_of_memory  # still without contexts: those of other ranks may arrive later
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
        """The stalls of this rank."""
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
            found.append(f"torch's memory counters ({self.timer.memory.failure!r})")
        return found
