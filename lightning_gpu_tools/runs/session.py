"""The measurement of one run: opening, stepping, finishing."""

import itertools
import math
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, Literal

from lightning_gpu_tools.advice.findings import Diagnosis
from lightning_gpu_tools.advice.verdict import early_warnings
from lightning_gpu_tools.background import BackgroundJobs
from lightning_gpu_tools.gpus.watch import GpuWatch, Phase
from lightning_gpu_tools.reports.report import COMPLETED
from lightning_gpu_tools.runs.ending import Ending
from lightning_gpu_tools.runs.run import Run, Timer
from lightning_gpu_tools.runs.run_gpus import open_gpus
from lightning_gpu_tools.runs.run_recorder import RunRecorder
from lightning_gpu_tools.runs.stall_watch import StallAfter, StallWatch
from lightning_gpu_tools.runs.surroundings import shortcomings
from lightning_gpu_tools.selection import claims
from lightning_gpu_tools.training import compat
from lightning_gpu_tools.training.rank_exchange import TIMEOUT_S, Board
from lightning_gpu_tools.training.run_measurements import LoaderResult
from lightning_gpu_tools.training.step_clock import Startup, StepClock

_trainings = itertools.count()  # in the same order on all ranks
_LOG_EVERY_S = 1.0  # our default: at most this often, unless the GPUs are polled more often


class Session:
    """All measurements of one run, each made once.

    Call :meth:`begin` when training starts, :meth:`after_step` after each step, :meth:`finish` at the end, and then
    :meth:`close`. Callbacks can share a session, of which the monitor makes these calls.

    ``timer`` creates the driver of the clock, from the clock and a function to call when validation begins and ends.
    """

    def __init__(self, run: Run, timer: Callable[[StepClock, Callable[[Phase], None]], Timer]) -> None:
        self.run = run
        self.clock = StepClock()
        self.startup = Startup(self.clock)
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
        self._sampling: dict[str, Any] = {"devices": "trainer", "interval_s": 1.0}
        self.threads: list[BackgroundJobs] = [self.background]
        self._has_stepped = False
        self._logs: int | None = None
        self._next_log_s = 0.0  # by the clock
        self._alarms = 0  # of the memory's history, that were passed on
        self._warned: set[str] = set()
        self.has_finished = False
        self.diagnosis: Diagnosis | None = None  # the last one, of a run that has finished
        self._name = f"training {next(_trainings)}" if run.place.world_size > 1 else ""
        self.timer = timer(self.clock, self._enter)

    @property
    def is_of_parent(self) -> bool:
        """Whether this process was forked during training, and therefore has none of its threads."""
        return os.getpid() != self._process

    def close(self) -> None:
        """Stop all measuring. Measurements stay readable."""
        timer = self.timer
        parts: list[Any] = [*self.threads, timer.worker_lines, timer.memory, self.gpus, self.ending]
        timer.stop()
        for part in parts:
            if part is not None and not self.is_of_parent:
                part.close()

    # Opening

    def monitor(
        self, *, devices: Literal["trainer", "all"], interval_s: float, stall_after_s: StallAfter, folder: str | None
    ) -> None:
        """Enable logging, stall watch and report; call this before training begins.

        ``folder`` is that of the report, if there will be one.
        """
        self._sampling = {"devices": devices, "interval_s": interval_s}
        if stall_after_s is not None:
            board = Board(f"{self._name}/stalls", self.run.place, self._own_store)
            self.stall_watch = StallWatch(
                self.timer, self.run.place, board, stall_after_s, write_report=self.background.run_now, folder=folder
            )
            self.threads.append(self.stall_watch.jobs)

    def begin(self) -> RunRecorder:
        """Start to measure the loader, the GPUs and the ranks, which are known only now."""
        if self.timer.fault is not None:
            raise self.timer.fault
        if self.recorder is None:
            self.started_s = time.time()
            self.ending.listen()
            if self.run.place.local_rank == 0:  # one process per node samples its GPUs
                self.gpus, self.gpu_note = open_gpus(
                    self.run,
                    lambda: None if self.recorder is None else self.recorder.ranks.pids_on_node(),
                    **self._sampling,
                )
                self.warn(*([self.gpu_note] if self.gpu_note else []))
            name = f"{self._name}/measured"
            recorder = RunRecorder(self.run, self.timer, self.gpus, name=name, store=self._store)
            for what, job in recorder.jobs():
                self.background.add(what, job)
            if claims.held_claims():
                self.background.add("Keeping the claim", self._keep_claims)
            recorder.lines.start(self.clock.thread_id)
            self.threads += recorder.lines, recorder.ranks.exchange
            if self.gpus is not None:
                self.threads.append(self.gpus.jobs)
            self.recorder = self.ending.recorder = recorder
        return self.recorder

    @cached_property
    def _own_store(self) -> Any:
        return compat.own_store() if self.run.place.world_size > 1 else None

    @property
    def _store(self) -> Any:
        return self._own_store or compat.default_store()

    def board(self, name: str) -> Board:
        """Return a new board for the ranks of this run."""
        return Board(f"{self._name}/{name}", self.run.place, self._store)

    def _keep_claims(self) -> float:
        self.background.faults += claims.keep_claims()
        return claims.KEEP_EVERY_S

    # Stepping

    def _enter(self, phase: Phase) -> None:
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
        recorder = self.recorder
        if recorder is None:
            return
        if batch is not None:
            recorder.note_batch(batch)
        recorder.after_step()
        if not self._has_stepped:
            self._has_stepped = True
            self.startup.end(recorder.reader.read("the compilations", recorder.compilations.total_s, 0.0))
            if self.run.place.rank == 0:
                self.clock.as_own_work(self._warn_of_shortcomings, recorder)

    def _warn_of_shortcomings(self, recorder: RunRecorder) -> None:
        nothing: list[str] = []
        find = partial(shortcomings, self.run)
        self.warn(*recorder.reader.read("the disk and the claims of this machine", find, nothing))

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
                self.clock.as_own_work(self._log, self.begin(), step)
        return self.clock.steps + every - since  # a lower bound: with accumulated gradients, a step has several batches

    def _log(self, recorder: RunRecorder, step: int) -> None:
        self.warn(*self._faults)
        alarms = recorder.history.alarms[self._alarms :]  # memory that grows
        self._alarms += len(alarms)
        if alarms:
            self.warn(*(finding.advice for finding in early_warnings(replace(recorder.measurements(), growth=alarms))))
        if self.run.place.rank == 0 and self.gpus is not None:
            self._log_metrics(*self.gpus.take_metrics(), step)
        self._log_metrics(*recorder.ranks.take_metrics(), step)

    def _log_metrics(self, metrics: Mapping[str, float], troubles: Sequence[str], step: int) -> None:
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

    # Finishing

    def note_error(self, error: BaseException, step: int) -> None:
        """Record the error that ends the run, and explain it."""
        self.ending.note_error(error, step, self.begin)

    def finish(self) -> None:
        """Stop the clock, publish one last time, and on rank 0 wait for the other ranks, but not after an error."""
        if self.stall_watch is not None:
            self.stall_watch.close(self.ending.outcome)
        self.background.close()
        self.has_finished = True
        self.warn(*self._faults)
        self.timer.stop()
        if self.recorder is not None and self.clock.ran:
            self.warn(*self.recorder.finish(TIMEOUT_S if self.ending.outcome == COMPLETED else 0.0))
            self._log_metrics(*self.recorder.ranks.take_metrics(), self.run.logged_step - 1)

    @property
    def _faults(self) -> list[str]:
        return [fault for thread in self.threads for fault in thread.faults]
