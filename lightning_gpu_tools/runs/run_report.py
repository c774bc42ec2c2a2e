"""The diagnosis and the report of a run: repeatedly while it runs, and at its end."""

import dataclasses
import math
import os
import sys
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from statistics import fmean
from typing import Any

import torch

from lightning_gpu_tools import files
from lightning_gpu_tools.advice.diagnosis import diagnose
from lightning_gpu_tools.advice.findings import AT_END, Diagnosis
from lightning_gpu_tools.environment import VERSION
from lightning_gpu_tools.errors import LowGPUUtilizationWarning
from lightning_gpu_tools.gpus.metrics import GpuSummary
from lightning_gpu_tools.host import processor_name
from lightning_gpu_tools.processes import process_id
from lightning_gpu_tools.reports.report import COMPLETED, RUNNING, WRITE_EVERY_S, Report, ReportFile
from lightning_gpu_tools.runs.publish import notify, publish, say
from lightning_gpu_tools.runs.session import Session
from lightning_gpu_tools.runs.surroundings import claimed_bytes
from lightning_gpu_tools.training.phases import MONITORING, TRAINING_STEP, base_phase
from lightning_gpu_tools.training.run_measurements import RunMeasurements
from lightning_gpu_tools.training.step_clock import WARM_UP_STEPS
from lightning_gpu_tools.units import check_percentage, printable

# Our default: the report is written at the start, after this time, and whenever the run has doubled in length. A killed
# run loses at most half of its length, or a minute.
FIRST_WRITE_S = 2.0


def conclude(session: Session, measured: RunMeasurements | None = None) -> Diagnosis | None:
    """Return the diagnosis of the measurements, with the advisor's thresholds; ``None`` before training."""
    if session.recorder is None or session.diagnosis is not None:
        return session.diagnosis
    measured = measured or session.recorder.measurements()
    measured = dataclasses.replace(measured, searched=session.loader_result)
    if session.has_finished or session.ending.out_of_memory is not None:
        measured = dataclasses.replace(measured, growth=session.recorder.history.growth())
    diagnosis = diagnose(
        measured, out_of_memory=session.ending.out_of_memory, failure=session.ending.failure, **session.thresholds
    )
    if session.has_finished:
        session.diagnosis = diagnosis
    return diagnosis


def describe(session: Session, measured: RunMeasurements | None = None) -> Report:
    """Return the report of a run: with measurements in any thread, without them in the training thread.

    Until the session has finished, it lacks the timelines of GPUs, the memory of other ranks, and the overhead of
    measuring.
    """
    ended = session.has_finished
    recorder = session.begin() if measured is None else session.recorder
    assert recorder is not None
    measured = measured or recorder.measurements()
    diagnosis = conclude(session, measured)
    assert diagnosis is not None
    run, clock, watch, ending = session.run, session.clock, session.gpus, session.ending
    times, steps, phase_s = measured.step_times, clock.steps, measured.phase_s if ended else clock.so_far()
    thread_s = sum(thread.cpu_s for thread in session.threads) + (0.0 if watch is None else watch.calls_cpu_s)
    no_gpu = f"No GPU: {measured.activity} runs on {run.device.type!r}, so only the host was measured."
    gpus = () if watch is None else watch.summaries(at_end=ended)
    if not ended:
        gpus = tuple(dataclasses.replace(gpu, timelines={}) for gpu in gpus)
    elif watch is not None:
        session.warn(*watch.take_metrics()[1])
    gpus = _with_waits((*gpus, *recorder.ranks.gpus_of_other_nodes()), measured)
    settings: dict[str, Any] = {
        "script": None if sys.argv[:1] in ([], [""], ["-c"]) else os.path.basename(sys.argv[0]),
        "dataset": None if run.loader is None else type(run.loader.dataset).__qualname__,
        "cpu": f"{processor_name()}, {measured.host.cores:g} cores",
        "device": run.device.type,
        "world_size": run.place.world_size,
        "precision": measured.precision,
        "accumulate_grad_batches": measured.accumulate_grad_batches,
        **({} if measured.loader is None else dataclasses.asdict(measured.loader)),
        "torch": torch.__version__,
        "lightning_gpu_tools": VERSION,
        **measured.settings,
        "gpu": sorted({gpu.name for gpu in gpus if gpu.name}),
    }
    batch_size = settings.get("batch_size")

    def us_per_step(seconds: float) -> float | None:
        return seconds / steps * 1e6 if steps else None

    return Report(
        outcome=ending.outcome if ended else RUNNING,
        started_at=datetime.fromtimestamp(session.started_s, timezone.utc).isoformat(timespec="seconds"),
        steps=steps,
        wall_s=sum(phase_s.values()),
        phase_s=phase_s,
        startup_s=session.startup.parts_s,
        diagnosis=diagnosis,
        gpus=gpus,
        gpu_note=session.gpu_note or (no_gpu if watch is None else None),
        step_s_max=None if times is None else times.max_s,
        samples_per_s=batch_size * run.place.world_size * times.count / times.seconds if batch_size and times else None,
        step_s_blocks=tuple(block.step_s for block in measured.blocks),
        warm_up_steps=clock.warm_up_steps,
        monitor_us_per_step=us_per_step(phase_s.get(MONITORING, 0.0)) if ended else None,
        monitor_thread_us_per_step=us_per_step(thread_s),
        others_cores=None if measured.cores is None else measured.cores.others_cores,
        unseen=measured.unseen,
        spans=tuple(measured.spans),
        lines=measured.lines,
        gpu_step_s={}
        if measured.gpu_idle is None
        else {phase: s for phase, s in measured.gpu_idle.work_s.items() if base_phase(phase) == TRAINING_STEP},
        ranks=measured.ranks,
        memory=recorder.ranks.memory_accounts(measured.memory, all_ranks=ended),
        claimed_bytes=recorder.reader.read("the claim", lambda: claimed_bytes(run), None) if ended else None,
        allocator_failures=ending.allocator_failures,
        stalls=() if session.stall_watch is None else session.stall_watch.stalls,
        failure=None if ending.failure is None else str(ending.failure),
        loader=session.loader_result,
        settings=settings,
        process=process_id(os.getpid()),
    )


def _with_waits(gpus: Iterable[GpuSummary], measured: RunMeasurements) -> tuple[GpuSummary, ...]:
    """Return the GPUs with the share of the steps in which they waited for other ranks."""
    step_s = fmean(block.step_s for block in measured.blocks) if measured.blocks else 0.0
    waits_s = {(rank.node, rank.gpu): rank.others_late_s for rank in measured.ranks}
    found = []
    for gpu in gpus:
        wait_s = waits_s.get((gpu.node, gpu.index))
        if step_s and wait_s is not None:
            gpu = dataclasses.replace(gpu, rank_wait_percent=min(100.0, 100 * wait_s / step_s))
        found.append(gpu)
    return tuple(found)


def check_thresholds(min_utilization_percent: float, min_steps: int, min_seconds: float) -> dict[str, float]:
    """Return the thresholds of a judgment by name; see ``GPUUtilizationAdvisor``.

    Raises:
        ValueError: One is out of range.
    """
    check_percentage(min_utilization_percent, "min_utilization_percent")
    if min_steps < 1:
        raise ValueError(f"min_steps must be at least 1, got {min_steps!r}.")
    if not min_seconds >= 0:
        raise ValueError(f"min_seconds must not be negative, got {min_seconds!r}.")
    return {"min_utilization_percent": min_utilization_percent, "min_steps": min_steps, "min_seconds": min_seconds}


class RunReporter:
    """What is told of a run: metrics, a warning about low utilization, and the report, also while the run goes on.

    The background thread writes the last measurement with the clock's times, so that a killed run leaves a report. It
    requests a new measurement after the training thread's next step, and writes that at once.

    ``folder`` is that of the report, and ``thresholds`` are the advisor's; ``None`` = there is none.
    """

    def __init__(self, session: Session, folder: str | None, thresholds: Mapping[str, float] | None) -> None:
        self._session = session
        self._folder = folder
        self._next_step = 0.0  # of the clock: after which to act
        self._next_judgment = math.inf  # a step of the clock
        self._min_seconds = 0.0
        if thresholds is not None:
            self._min_seconds = thresholds["min_seconds"]
            self._next_judgment = WARM_UP_STEPS + thresholds["min_steps"]
            session.thresholds = {**thresholds, "min_seconds": AT_END * self._min_seconds}
        self._file = ReportFile(folder) if folder is not None and session.run.place.rank == 0 else None
        self._measured: RunMeasurements | None = None  # once training has begun
        self._is_fresh = False  # whether the measurement has not been written yet
        self._saved: Report | None = None
        if self._file is not None:
            try:
                files.check_writable(self._file.folder)  # without creating it, because it may stay empty
            except OSError as error:
                where = f"not written to {folder!r}: {error.strerror or error}"
                session.warn(
                    f"The report of this run will be printed, but {where}. To get a file, choose another folder: "
                    "Trainer(default_root_dir=...), its logger, or watch(folder=...)."
                )

    def begin(self) -> None:
        """Begin, once training has begun."""
        recorder = self._session.begin()
        self._next_step = 0.0
        if self._file is not None and self._session.clock.ran and self._measured is None:
            self._measured, self._is_fresh = recorder.measurements(), True
            self._session.background.add("Writing the report while training runs", self._write)

    def after_step(self, batch: Any = None) -> None:
        """Act after a step. This runs in every step, so it makes as few calls as possible."""
        session = self._session
        session.after_step(batch)
        if session.clock.steps >= self._next_step or session.report_wanted:
            self._next_step = session.log_if_due()
            if session.clock.steps >= self._next_judgment:
                session.clock.as_own_work(self._judge)
            self._next_step = min(self._next_step, self._next_judgment)
            if session.report_wanted and self._measured is not None:
                session.clock.as_own_work(self._measure)

    def _judge(self) -> None:
        """Warn once if the utilization is low."""
        session = self._session
        # 10% later each time: early enough for short steps, and rare for very short ones.
        later = self._next_judgment + max(10, self._next_judgment // 10)
        if sum(block.wall_s for block in session.clock.blocks) < self._min_seconds:
            self._next_judgment = later
            return
        recorder = session.begin()
        exchange, measured = recorder.ranks.exchange, recorder.measurements()
        # Rank 0 may still lack the speed of other ranks.
        is_early = session.run.place.rank == 0 and exchange.ranks > max(1, len(measured.ranks))
        diagnosis = conclude(session, measured)
        if diagnosis is None or diagnosis.verdict == "too_short" or is_early:
            self._next_judgment = later
        elif diagnosis.verdict != "low":
            self._next_judgment *= 2  # judging costs about a millisecond
        else:
            self._next_judgment = math.inf
            # The cost of the first cause and the change, without their details: the report has these.
            sentences = diagnosis.why.split(". ")
            costs = next((sentence for sentence in sentences if "of the wall time" in sentence), sentences[0])
            change, _, _ = diagnosis.next_step.partition(". ")
            message = f"{costs.partition(' (')[0].rstrip('.')}. {change.rstrip('.')}."
            session.warn(message, category=LowGPUUtilizationWarning)

    def _measure(self) -> None:
        self._session.report_wanted = False
        self._measured, self._is_fresh = self._session.begin().measurements(), True
        self._session.background.run_now()

    def _write(self) -> float:
        assert self._file is not None
        if not self._is_fresh:
            self._session.begin().cores.read_ahead()  # the slowest part
            self._session.report_wanted = True
        self._is_fresh = False
        self._saved = describe(self._session, self._measured)
        self._file.save(self._saved)
        return min(WRITE_EVERY_S, max(FIRST_WRITE_S, self._saved.wall_s))

    def finish(self) -> Diagnosis | None:
        """Publish the report of a run that has ended, and return its diagnosis; ``None`` if it had not begun."""
        session, recorder, ending = self._session, self._session.recorder, self._session.ending
        session.finish()
        diagnosis = conclude(session)
        self._saved = None
        if self._folder is None:
            return diagnosis
        if recorder is None or diagnosis is None:
            if self._file is not None and ending.outcome != COMPLETED:
                notify("error", self._folder, outcome=ending.outcome)
        elif self._file is None:
            if ending.out_of_memory is not None:  # rank 0 may wait for this rank forever
                say(f"Why:  {printable(diagnosis.why, 1000)}\nNext: {printable(diagnosis.next_step, 1000)}")
        elif not session.clock.ran and ending.out_of_memory is None and ending.failure is None:
            missing = ", ".join(recorder.unseen)  # printed, because filters may hide a warning
            say(f"This run has no report, because this version of Lightning lacks {missing}.")
        else:
            publish(describe(session), self._file, session.run.loggers, session.run.logged_step - 1)
        return diagnosis

    def give_up(self) -> None:
        """Publish nothing more, and record in the file of a run in progress that measuring has stopped."""
        saved, self._saved = self._saved, None
        if saved is not None and self._file is not None and not self._session.is_of_parent:
            self._session.background.close()
            self._file.save(dataclasses.replace(saved, outcome=f"measured only up to step {saved.steps}"))
