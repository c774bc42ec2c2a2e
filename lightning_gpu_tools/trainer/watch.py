"""The monitor and the advisor for loops without a Trainer."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from types import TracebackType
from typing import Any, Generic, Literal, TypeVar

from lightning_gpu_tools.advice.findings import MIN_SECONDS, MIN_STEPS, MIN_UTILIZATION_PERCENT, Diagnosis
from lightning_gpu_tools.environment import is_disabled
from lightning_gpu_tools.loaders.workers import deaths_ignored, is_of_dead_worker
from lightning_gpu_tools.memory.readings import out_of_memory
from lightning_gpu_tools.runs.run_report import RunReporter, check_thresholds, conclude
from lightning_gpu_tools.runs.session import Session
from lightning_gpu_tools.runs.stall_watch import StallAfter, check_stall_after
from lightning_gpu_tools.trainer.facts import FabricRun, LoopRun
from lightning_gpu_tools.trainer.families import warn_that_off
from lightning_gpu_tools.trainer.loop_timer import Loop, LoopTimer
from lightning_gpu_tools.training.phases import MONITORING
from lightning_gpu_tools.units import check_seconds, checked, printable

_T = TypeVar("_T")


@checked
def watch(
    fabric: Any = None,
    *,
    folder: str | os.PathLike[str] | None = None,
    interval_s: float = 1.0,
    min_utilization_percent: float = MIN_UTILIZATION_PERCENT,
    min_steps: int = MIN_STEPS,
    min_seconds: float = MIN_SECONDS,
    stall_after_s: float | Literal["auto"] | None = "auto",
) -> TrainingWatch:
    """Measure, report and diagnose your own loop, as the monitor and the advisor do for a Trainer.

    At the end, even after an error, rank 0 prints the report and writes ``gpu_report.json``; while the loop runs, it
    warns once about low utilization. Ranks of a process group share one report. Without a process group, each process
    is a run of its own: a process whose ``RANK`` is not 0 writes its report to the folder's subfolder ``rank_<RANK>``.

    With Fabric, clipping, saving and moving a batch have their own phases, and metrics go to its loggers every 50
    batches. ``LIGHTNING_GPU_TOOLS_DISABLE=1`` turns all of this off. A shell command in
    ``LIGHTNING_GPU_TOOLS_NOTIFY`` is run when the loop ends, fails or stalls.

    Args:
        fabric: A ``Fabric`` of ``lightning`` or ``lightning_fabric``, after its ``launch``.
        folder: Folder of the report, a local path or a URL; by default the log directory of Fabric's first logger, or
            without a logger the folder ``gpu_report`` in the current directory.
        interval_s: Seconds between two polls of the GPUs, 1 by default.
        min_utilization_percent: Utilization below which a GPU counts as underused, 70 by default.
        min_steps: Steady steps needed for a verdict, 50 by default.
        min_seconds: Seconds of steady steps needed to warn while the loop runs, 20 by default. A quarter of that is
            needed for the verdict at the end; a shorter run is ``too_short``.
        stall_after_s: Seconds without progress after which to warn; see ``GPUUtilizationMonitor``.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: An argument is out of range.

    Example::

        with watch() as run:
            for batch in run.batches(loader):
                ...
    """
    if fabric is not None and not hasattr(fabric, "launch"):
        raise TypeError(
            f"fabric must be a Fabric, got {printable(repr(fabric))}. To set the folder, use watch(folder=...)."
        )
    check_seconds(interval_s, "interval_s")
    check_stall_after(stall_after_s)
    thresholds = check_thresholds(min_utilization_percent, min_steps, min_seconds)
    folder = None if folder is None else os.fspath(folder)
    return TrainingWatch(partial(_LoopSession, fabric, folder, interval_s, thresholds, stall_after_s))


class TrainingWatch:
    """The context manager that :func:`watch` returns, in which loops are measured.

    If measuring fails, it warns once, and the loop continues.
    """

    def __init__(self, measure: Callable[[object], _LoopSession]) -> None:
        self._measure = measure
        self._is_on = False
        self._session: _LoopSession | None = None
        self._diagnosis: Diagnosis | None = None

    def __enter__(self) -> TrainingWatch:
        self._diagnosis = None
        self._is_on = not is_disabled()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        session = self._session
        try:
            if session is not None and not session.is_of_parent:
                with nullcontext() if error is None else deaths_ignored():
                    self._safely(self._finish, session, error)
            elif session is None and self._is_on and (error is None or out_of_memory(error) is not None):
                message = "watch() has no report: no batch was measured. Iterate over run.batches(loader)."
                self._safely(warnings.warn, message)
        finally:  # even after Ctrl-C
            self._close()

    def batches(self, loader: Iterable[_T]) -> Iterable[_T]:
        """Iterate over a DataLoader, or any other iterable, and measure it.

        Each pass is an epoch, and a step lasts from one batch to the next. Of nested loops, the innermost one with an
        optimizer step in each pass counts. Once a loop has had gradients, one without them, or without a backward,
        counts as validation.
        """
        return _Batches(self, loader)

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Return a context for work that is not a step and gets its own line in the report.

        ``name`` is a phase of the report (``"validation"``, ``"checkpoint"``, ``"logging"``, ...) or your own.
        """
        return nullcontext() if self._session is None else self._session.timer.aside(name)

    @property
    def diagnosis(self) -> Diagnosis | None:
        """The diagnosis of the running loop, or of the last one; ``None`` before the first batch."""
        return (conclude(self._session) if self._session is not None else None) or self._diagnosis

    def _safely(self, action: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return action(*arguments)
        except Exception as error:
            if is_of_dead_worker(error):  # an error of the loop itself
                raise
            self._close()
            warn_that_off("watch() is off, without a report", error)
            return None

    def _open(self, loop: Loop) -> None:
        if self._session is None:  # by the first batch, the ranks have met and the model is on its device
            self._session = self._measure(loop.loader)
            self._session.start()
        self._session.timer.open(loop)

    def _finish(self, session: _LoopSession, error: BaseException | None) -> None:
        if error is None:
            session.timer.end_step()
        else:
            session.note_error(error, session.run.logged_step)
        self._diagnosis = session.reporter.finish()

    def _close(self) -> None:
        session, self._session, self._is_on = self._session, None, False
        if session is None:
            return
        for end in session.timer.stop, session.close, session.run.forget, session.reporter.give_up:
            with suppress(Exception):  # may fail for the same reason
                end()


class _LoopSession(Session):
    """The session of a loop, from its first batch on."""

    run: LoopRun
    timer: LoopTimer

    def __init__(
        self,
        fabric: Any,
        folder: str | None,
        interval_s: float,
        thresholds: Mapping[str, float],
        stall_after_s: StallAfter,
        loader: object,
    ) -> None:
        run = LoopRun() if fabric is None else FabricRun(fabric)
        run.follow(loader)
        super().__init__(run, lambda clock, enter: LoopTimer(run, fabric, clock, enter, self._step_ended))
        folder = run.folder_in(folder)
        self.monitor(devices="trainer", interval_s=interval_s, stall_after_s=stall_after_s, folder=folder)
        self.reporter = RunReporter(self, folder, thresholds)

    def start(self) -> None:
        self.timer.start()
        with self.clock.booked(MONITORING):
            self.reporter.begin()

    def _step_ended(self) -> None:
        self.begin()  # raises the error that ended the timing
        self.reporter.after_step()

    def end_fetch(self, loop: Loop, batch: object) -> None:
        if self.timer.end_fetch(loop, batch):
            self.ending.begin_step(batch)
            self.begin().note_batch(batch)
        elif loop.is_validation:
            self.begin_validation_batch(batch, loop.batches)
            loop.batches += 1


class _Batches(Generic[_T]):
    """An iterable over a loader that reports its batches to a watch."""

    def __init__(self, watch: TrainingWatch, loader: Iterable[_T]) -> None:
        self._watch = watch
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]  # raises if it has none

    def __iter__(self) -> Iterator[_T]:
        return self._measured() if self._watch._is_on else iter(self._loader)

    def _measured(self) -> Iterator[_T]:
        watch, loop = self._watch, Loop(self._loader)
        watch._safely(watch._open, loop)
        try:
            iterator = iter(self._loader)
            if (session := watch._session) is not None:
                watch._safely(session.timer.opened, loop)
            while True:
                if (session := watch._session) is not None:
                    watch._safely(session.timer.begin_fetch, loop)
                try:
                    # In a list, so as not to keep a batch that the loop has dropped.
                    fetched = [next(iterator)]
                except StopIteration:
                    return
                if (session := watch._session) is not None:
                    watch._safely(session.end_fetch, loop, fetched[0])
                yield fetched.pop()
        finally:
            if (session := watch._session) is not None:
                watch._safely(session.timer.close, loop)
