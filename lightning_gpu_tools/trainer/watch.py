"""The monitor and the advisor for loops without a Trainer: plain PyTorch, or Fabric."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import AbstractContextManager, nullcontext, suppress
from types import TracebackType
from typing import Any, Generic, Literal, TypeVar

from lightning_gpu_tools.advice.findings import MIN_SECONDS, MIN_STEPS, MIN_UTILIZATION_PERCENT, Diagnosis
from lightning_gpu_tools.environment import is_disabled
from lightning_gpu_tools.loaders.workers import deaths_ignored, is_of_dead_worker
from lightning_gpu_tools.reports.report import ReportFile
from lightning_gpu_tools.runs.advisor import Advisor, Thresholds
from lightning_gpu_tools.runs.run_report import RunningReport, describe, publish, say_verdict, warn_if_not_writable
from lightning_gpu_tools.runs.session import Session, check_interval
from lightning_gpu_tools.runs.stall_watch import StallAfter, check_stall_after
from lightning_gpu_tools.trainer.loop_run import FabricRun, LoopRun
from lightning_gpu_tools.trainer.loop_timer import Loop, LoopTimer
from lightning_gpu_tools.training.phases import MONITORING
from lightning_gpu_tools.training.rank_exchange import TIMEOUT_S
from lightning_gpu_tools.units import printable

_T = TypeVar("_T")


def watch(
    fabric: Any = None,
    *,
    folder: str | None = None,
    interval_s: float = 1.0,
    min_utilization_percent: float = MIN_UTILIZATION_PERCENT,
    min_steps: int = MIN_STEPS,
    min_seconds: float = MIN_SECONDS,
    stall_after_s: float | Literal["auto"] | None = "auto",
) -> TrainingWatch:
    """Measure, report and diagnose a loop of your own, as monitor and advisor do for a Trainer.

    Two added lines are enough. At the end, also after an error, rank 0 prints the report and writes
    ``gpu_report.json``; while the loop runs, it warns once of a low utilization.

    With Fabric, ``backward``, the optimizer's step, clipping, saving and moving a batch to the device are told apart,
    and metrics go to Fabric's loggers every 50 batches. Without it, moving a batch and clipping are part of the step
    around them. Several ranks, as torchrun starts them, make one report, once they have met in a process group.

    With ``LIGHTNING_GPU_TOOLS_DISABLE=1`` all of this does nothing.

    Args:
        fabric: A ``Fabric`` of ``lightning`` or ``lightning_fabric``, after its ``launch``.
        folder: Where the report goes. By default the log directory of Fabric's first logger, or the current directory.
        interval_s: Seconds between two polls of the GPUs, 1 by default.
        min_utilization_percent: Utilization below which a GPU counts as underused, 70 by default.
        min_steps: Steady steps needed to judge, 50 by default.
        min_seconds: Seconds of steady steps needed to warn while the loop runs, 20 by default.
        stall_after_s: After how many seconds without progress to warn; see ``GPUUtilizationMonitor``.

    Raises:
        ValueError: An argument is out of its range.

    Example::

        with watch() as run:
            for batch in run.batches(loader):
                ...
    """
    check_interval(interval_s)
    check_stall_after(stall_after_s)
    thresholds = Thresholds(min_utilization_percent, min_steps, min_seconds)
    return TrainingWatch(fabric, folder, interval_s, thresholds, stall_after_s)


class TrainingWatch:
    """What :func:`watch` returns: a context manager in which loops are measured.

    No failure of the measuring reaches the loop: it is one warning, and nothing more is measured.
    """

    def __init__(
        self, fabric: Any, folder: str | None, interval_s: float, thresholds: Thresholds, stall_after_s: StallAfter
    ) -> None:
        self._fabric = fabric
        self._folder = folder
        self._interval_s = interval_s
        self._thresholds = thresholds
        self._stall_after_s = stall_after_s
        self._is_on = False
        self._reset()

    def _reset(self) -> None:
        self._session: Session | None = None
        self._run: LoopRun | None = None
        self._timer: LoopTimer | None = None
        self._advisor: Advisor | None = None
        self._running: RunningReport | None = None
        self._diagnosis: Diagnosis | None = None
        self._next_step = 0.0

    def __enter__(self) -> TrainingWatch:
        self._reset()
        self._is_on = not is_disabled()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._session is not None:
                with nullcontext() if error is None else deaths_ignored():
                    self._safely(self._finish, error)
            elif self._is_on and kind is None:
                self._safely(warnings.warn, "watch() has no report: no batch went through run.batches(loader).")
        finally:  # also if Ctrl-C comes meanwhile
            self._close()

    def batches(self, loader: Iterable[_T]) -> Iterable[_T]:
        """Return the loader's batches to iterate over, measured; each pass over them is an epoch.

        A step lasts from one batch to the next. In a nested loop, the innermost one with an optimizer's step in each
        pass counts. A loop without gradients in a training that has had some is validation.

        Args:
            loader: A DataLoader, or anything else that can be iterated over.
        """
        return _Batches(self, loader)

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Return a context for what is no step: its time gets a line of its own in the report.

        Args:
            name: A phase of the report, such as ``"validation"``, ``"checkpoint"`` or ``"logging"``, or a name of your
                own.
        """
        return nullcontext() if self._timer is None else self._timer.aside(name)

    @property
    def diagnosis(self) -> Diagnosis | None:
        """What the measurements say: of the loop that runs, or of the last one; ``None`` before the first batch."""
        return (self._session.diagnosis() if self._session is not None else None) or self._diagnosis

    # What the loops call. Whatever goes wrong here is not theirs.

    def _safely(self, action: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return action(*arguments)
        except Exception as error:
            if is_of_dead_worker(error):  # which is the loop's
                raise
            self._close()
            what = printable("".join(traceback.format_exception_only(error)).strip(), max_length=200)
            with warnings.catch_warnings():
                warnings.simplefilter("always")  # no filter hides it, or turns it into an error of the loop
                warnings.warn(f"watch() is off, without a report, because of an error in it: {what}", stacklevel=2)
            return None

    def _begin(self, loader: object) -> LoopTimer:
        """Begin to measure, at the first batch: by then the ranks have met and the model is on its device."""
        run = self._run = LoopRun() if self._fabric is None else FabricRun(self._fabric)
        run.follow(loader)
        session = self._session = Session(
            run, lambda clock, enter: LoopTimer(run, self._fabric, clock, enter, self._after_step)
        )
        assert isinstance(session.timer, LoopTimer)
        timer = self._timer = session.timer
        session.monitor(devices="trainer", interval_s=self._interval_s, gpm=True, stall_after_s=self._stall_after_s)
        self._advisor = Advisor(session, self._thresholds)
        timer.start()
        with session.clock.booked(MONITORING):
            session.begin()
            if run.place.rank == 0:
                folder = self._folder or run.folder
                warn_if_not_writable(folder)
                self._running = RunningReport(session, ReportFile(folder))
        return timer

    def _after_step(self) -> None:
        session = self._session
        assert session is not None
        assert self._advisor is not None
        session.begin()  # which raises what has ended the timing
        session.after_step()
        if session.clock.steps >= self._next_step or session.report_wanted:
            self._next_step = min(session.log_if_due(), self._advisor.after_step())
            if session.report_wanted and self._running is not None:
                self._running.measure()

    def _open(self, loop: Loop, loader: object) -> None:
        timer = self._timer or self._begin(loader)
        timer.open(loop, loader)

    def _end_fetch(self, timer: LoopTimer, loop: Loop, batch: object) -> None:
        session = self._session
        if timer.end_fetch(loop) and session is not None:
            session.ending.begin_step(batch)
            session.begin().note_batch(batch)
        elif loop.is_validation and session is not None:
            session.begin_validation_batch(batch, loop.batches)
            loop.batches += 1

    def _finish(self, error: BaseException | None) -> None:
        session, timer = self._session, self._timer
        assert session is not None
        assert timer is not None
        if error is None:
            timer.end_step()
            outcome = "completed"
        else:
            outcome = session.ending.note_error(session, error, session.run.logged_step)
        session.finish(TIMEOUT_S if error is None else 0.0)
        self._diagnosis = session.diagnosis()
        running, self._running = self._running, None
        if running is not None:
            publish(describe(session, outcome), running.file, session.run)
        elif session.ending.out_of_memory is not None and self._diagnosis is not None:
            say_verdict(self._diagnosis)

    def _close(self) -> None:
        """End the measuring; nothing happens the second time."""
        session, run, timer, running = self._session, self._run, self._timer, self._running
        self._session = self._run = self._timer = self._advisor = self._running = None
        self._is_on = False
        # What is broken may break here, too.
        if timer is not None:
            with suppress(Exception):
                timer.stop()
        if session is not None:
            with suppress(Exception):
                session.close()
        if running is not None:
            with suppress(Exception):
                running.give_up()
        if run is not None:
            run.forget()


class _Batches(Generic[_T]):
    """Iterates over a loader, and tells a watch when it asks for a batch and when it has one."""

    def __init__(self, watch: TrainingWatch, loader: Iterable[_T]) -> None:
        self._watch = watch
        self._loader = loader

    def __len__(self) -> int:
        if not isinstance(self._loader, Sized):
            raise TypeError(f"a {type(self._loader).__qualname__} has no length")
        return len(self._loader)

    def __iter__(self) -> Iterator[_T]:
        return self._measured() if self._watch._is_on else iter(self._loader)

    def _measured(self) -> Iterator[_T]:
        watch, loop = self._watch, Loop()
        watch._safely(watch._open, loop, self._loader)
        try:
            iterator = iter(self._loader)
            if (timer := watch._timer) is not None:
                watch._safely(timer.opened, loop)
            while True:
                if (timer := watch._timer) is not None:
                    watch._safely(timer.begin_fetch, loop)
                try:
                    # In a list, so that nothing here keeps a batch that the loop has dropped.
                    fetched = [next(iterator)]
                except StopIteration:
                    return
                if (timer := watch._timer) is not None:
                    watch._safely(watch._end_fetch, timer, loop, fetched[0])
                yield fetched.pop()
        finally:
            if (timer := watch._timer) is not None:
                watch._safely(timer.close, loop)
