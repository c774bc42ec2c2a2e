"""Make the report of a run, print it, and write it to the log directory."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import logging
import math
import os
import shlex
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch

from lightning_gpu_tools.advice.diagnosis import diagnose
from lightning_gpu_tools.advice.findings import Diagnosis
from lightning_gpu_tools.environment import VERSION
from lightning_gpu_tools.gpus.metrics import GpuSummary
from lightning_gpu_tools.host import processor_name
from lightning_gpu_tools.processes import process_id
from lightning_gpu_tools.reports.comparison import confirm, earlier_report, is_of_one_run
from lightning_gpu_tools.reports.page import render_page
from lightning_gpu_tools.reports.report import COMPLETED, PREVIOUS_NAME, RUNNING, Report
from lightning_gpu_tools.reports.report_file import WRITE_EVERY_S, ReportFile, run_folder
from lightning_gpu_tools.reports.text import in_color, render_text
from lightning_gpu_tools.runs import drawing
from lightning_gpu_tools.runs.notify import notify
from lightning_gpu_tools.runs.run import Run
from lightning_gpu_tools.runs.session import Session
from lightning_gpu_tools.runs.surroundings import claimed_bytes
from lightning_gpu_tools.training.phases import MONITORING, TRAINING_STEP, base_phase
from lightning_gpu_tools.training.run_measurements import RunMeasurements
from lightning_gpu_tools.units import printable, printable_path, wrapped

# Our default: the report is written at the start, after this time, and whenever the run has doubled in length. A killed
# run loses at most half of its length, or a minute.
FIRST_WRITE_S = 2.0
_MAX_WAIT_S = 5.0  # our default: for the next step


class Snapshot(NamedTuple):
    """Facts that only the training thread can measure, because they belong to CUDA or to the Trainer."""

    measured: RunMeasurements
    settings: Mapping[str, Any]
    unseen: tuple[str, ...]


def take_snapshot(session: Session) -> Snapshot:
    """Return a new snapshot, in the training thread."""
    recorder = session.begin()
    run, loader, read, measured = recorder.run, recorder.loaders.settings, recorder.reader.read, recorder.measurements()
    of_driver: Mapping[str, Any] = read("the Trainer's settings", lambda: run.settings, {})
    settings = {
        "script": None if sys.argv[:1] in ([], [""], ["-c"]) else os.path.basename(sys.argv[0]),
        "dataset": None if run.loader is None else type(run.loader.dataset).__qualname__,
        "cpu": f"{processor_name()}, {measured.host.cores:g} cores",
        "device": run.device.type,
        "world_size": run.place.world_size,
        "precision": measured.precision,
        "accumulate_grad_batches": run.accumulate_grad_batches,
        **({} if loader is None else dataclasses.asdict(loader)),
        "torch": torch.__version__,
        "lightning_gpu_tools": VERSION,
        **of_driver,
    }
    return Snapshot(measured, settings, tuple(session.unseen))


def conclude(session: Session, measured: RunMeasurements | None = None) -> Diagnosis | None:
    """Return the diagnosis of the measurements, with the advisor's thresholds; ``None`` before training."""
    if session.recorder is None or session.diagnosis is not None:
        return session.diagnosis
    measured = measured or session.recorder.measurements()
    measured = dataclasses.replace(measured, searched=session.loader_result)
    if session.has_finished or session.ending.out_of_memory is not None:
        measured = dataclasses.replace(measured, growth=session.recorder.history.growth())
    diagnosis = diagnose(
        measured,
        out_of_memory=session.ending.out_of_memory,
        failure=session.ending.failure,
        **session.thresholds,
    )
    if session.has_finished:
        session.diagnosis = diagnosis
    return diagnosis


def describe(session: Session, outcome: str, snapshot: Snapshot | None = None) -> Report:
    """Return the report of a run: with a snapshot in any thread, without one in the training thread.

    During the run, it lacks the timelines of GPUs, the memory of other ranks, and the overhead of measuring.
    """
    ended = outcome != RUNNING
    measured, settings, unseen = snapshot or take_snapshot(session)
    diagnosis, recorder = conclude(session, measured), session.recorder
    assert diagnosis is not None
    assert recorder is not None
    run, clock, watch, ending = session.run, session.clock, session.gpus, session.ending
    times, steps, phase_s = measured.step_times, clock.steps, measured.phase_s if ended else clock.so_far()
    thread_s = sum(thread.cpu_s for thread in session.threads) + (0.0 if watch is None else watch.cpu_s)
    no_gpu = f"No GPU: {measured.activity} runs on {run.device.type!r}, so only the host was measured."
    batch_size = settings.get("batch_size")
    gpus = () if watch is None else watch.summaries(at_end=ended)
    if not ended:
        gpus = tuple(dataclasses.replace(gpu, timelines={}) for gpu in gpus)
    elif watch is not None:
        session.warn(*watch.take_metrics()[1])
    gpus = _with_waits((*gpus, *recorder.ranks.gpus_of_other_nodes()), measured)

    def us_per_step(seconds: float) -> float | None:
        return seconds / steps * 1e6 if steps else None

    return Report(
        outcome=outcome,
        started_at=datetime.fromtimestamp(session.started_s, timezone.utc).isoformat(timespec="seconds"),
        steps=steps,
        wall_s=sum(phase_s.values()),
        phase_s=phase_s,
        startup_s=session.startup.parts_s,
        step_s_median=measured.step_p50_s,
        diagnosis=diagnosis,
        gpus=gpus,
        gpu_note=session.gpu_note or (no_gpu if watch is None else None),
        step_s_p95=measured.step_p95_s,
        step_s_max=None if times is None else times.max_s,
        samples_per_s=batch_size * run.place.world_size * times.count / times.seconds if batch_size and times else None,
        step_s_blocks=tuple(block.step_s for block in measured.blocks),
        warm_up_steps=clock.warm_up_steps,
        monitor_us_per_step=us_per_step(phase_s.get(MONITORING, 0.0)) if ended else None,
        monitor_thread_us_per_step=us_per_step(thread_s),
        core_wait_share=None if measured.cores is None else measured.cores.wait_share,
        others_cores=None if measured.cores is None else measured.cores.others_cores,
        unseen=unseen,
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
        settings={**settings, "gpu": sorted({gpu.name for gpu in gpus if gpu.name})},
        process=process_id(os.getpid()),
    )


def _with_waits(gpus: Iterable[GpuSummary], measured: RunMeasurements) -> tuple[GpuSummary, ...]:
    """Return the GPUs with the share of the steps in which they waited for other ranks."""
    step_s = fmean(block.step_s for block in measured.blocks) if measured.blocks else 0.0
    waits = {(rank.node, rank.gpu): rank.others_late_s for rank in measured.ranks}
    found = []
    for gpu in gpus:
        wait_s = waits.get((gpu.node, gpu.index))
        if step_s and wait_s is not None:
            gpu = dataclasses.replace(gpu, rank_wait_percent=min(100.0, 100 * wait_s / step_s))
        found.append(gpu)
    return tuple(found)


class RunningReport:
    """The report of a run in progress, so that a killed run leaves one.

    The background thread requests a measurement after the training thread's next step, judges it, and writes the
    report. If that step takes too long, it writes the last measurement, with the clock's times.
    """

    def __init__(self, session: Session, file: ReportFile) -> None:
        self.file = file
        self._session = session
        self._recorder = session.begin()
        self._snapshot = take_snapshot(session)
        self._is_fresh, self._asked = True, False
        self._saved: Report | None = None
        session.background.add("Writing the report while training runs", self._write)

    def measure(self) -> None:
        """Measure in the training thread, and request an immediate write."""
        self._session.clock.as_own_work(self._measure)

    def _measure(self) -> None:
        self._session.report_wanted = False
        self._snapshot = take_snapshot(self._session)
        self._is_fresh = True
        self._session.background.run_now()

    def _write(self) -> float:
        session = self._session
        stalls = () if session.stall_watch is None else session.stall_watch.stalls
        has_stalled = any(not one.is_over for one in stalls[-1:])
        if not self._is_fresh and not self._asked and not has_stalled:
            self._recorder.cores.read_ahead()  # the slowest part
            self._asked = session.report_wanted = True
            return _MAX_WAIT_S
        self._is_fresh = self._asked = False
        report = describe(session, RUNNING, self._snapshot)
        self.file.save(report)
        self._saved = report
        return min(WRITE_EVERY_S, max(FIRST_WRITE_S, report.wall_s))

    def give_up(self) -> None:
        """Record in the file that measuring has stopped."""
        self._session.background.close()
        if self._saved is not None:
            outcome = f"measured only up to step {self._saved.steps}"
            self.file.save(dataclasses.replace(self._saved, outcome=outcome))


def publish(report: Report, file: ReportFile, run: Run | None = None) -> None:
    """Write the report, log its summary, print it, and start to draw its picture and page.

    A failure affects only its own part, and is printed.
    """
    lines = [""]
    written: list[str] = []
    path = ""
    with _failure_added_to(lines, "The report could not be compared with the previous one"):
        earlier = earlier_report(file.folder)
        confirmation = None if earlier is None else confirm(report, earlier)
        if confirmation is not None:
            report = dataclasses.replace(report, confirmation=confirmation)
    with _failure_added_to(lines, f"The report could not be written to {printable_path(file.folder)}"):
        path = file.save(report)
        written.append(f"Report: {_shown(path)}")
        with _failure_added_to(lines, "The report could not be drawn"):
            if names := drawing.start(report, file.folder, say):
                written[0] += f" ({' and '.join(names)} will follow)"
            elif report.diagnosis.verdict == "too_short":
                written[0] += " (the run is too short for a picture)"
    text = ""
    with _failure_added_to(lines, "The report could not be shown"):
        text = render_text(report)
        lines.insert(1, in_color(text, report, sys.stdout))
    if run is not None:
        for logger in run.loggers:
            with _failure_added_to(lines, f"The summary could not be sent to {type(logger).__name__}"):
                _log_summary(report, text, logger, run.logged_step - 1)
    if path and report.diagnosis.verdict == "low":
        written += _how_to_verify(file)
    with _failure_added_to(lines, "The notification failed"):
        diagnosis = report.diagnosis
        texts = {"verdict": diagnosis.verdict, "why": diagnosis.why, "next_step": diagnosis.next_step}
        is_end = report.outcome == COMPLETED
        notify("end" if is_end else "error", file.folder, outcome=report.outcome, report=path, **texts)
    say("\n".join([*lines, *written]))


def _log_summary(report: Report, text: str, logger: Any, step: int) -> None:
    """Log the diagnosis, the use of memory, and the report: as a page, or as text where a logger shows no page."""
    parts = report.memory[0].parts_bytes if report.memory else {}
    sizes = {f"memory_{name}_bytes": float(size) for name, size in parts.items()}
    summary = {**report.diagnosis.summary(), **sizes}
    separator = getattr(logger, "group_separator", "/")
    named = {f"gpu_tools{separator}{name}": value for name, value in summary.items()}
    numbers = {name: value for name, value in named.items() if isinstance(value, float) and math.isfinite(value)}
    if numbers:
        logger.log_metrics(metrics=numbers, step=step)
    texts = {name: value for name, value in named.items() if isinstance(value, str)}
    page = f"gpu_tools{separator}report"
    # Lightning's loggers share no method for texts, and CSV files have no place for them. A page has no picture, which
    # is not drawn yet.
    experiment: Any = getattr(logger, "experiment", None)  # Lightning's base class does not have it
    if hasattr(experiment, "add_text"):  # TensorBoard, which shows text as Markdown
        for name, value in {**texts, page: textwrap.indent(text, "    ")}.items():
            experiment.add_text(name, value, step)
    elif hasattr(experiment, "set_tag"):  # MLflow
        for name, value in texts.items():
            experiment.set_tag(logger.run_id, name, value)
        experiment.log_text(logger.run_id, render_page(report), f"{page}.html")
    elif hasattr(experiment, "log_other"):  # Comet
        for name, value in texts.items():
            experiment.log_other(name, value)
        experiment.log_asset_data(render_page(report), name=f"{page}.html")
    elif hasattr(experiment, "summary"):  # Weights & Biases
        for name, value in texts.items():
            experiment.summary[name] = value
        if "wandb" in sys.modules:
            html = sys.modules["wandb"].Html(io.StringIO(render_page(report)), inject=False)  # without its style sheet
            logger.log_metrics({page: html}, step)


@contextlib.contextmanager
def _failure_added_to(lines: list[str], what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # noqa: BLE001 - the disk, a font, a forged file
        lines.append(f"{what}: {type(error).__name__}: {printable(error, 300)}")


def _how_to_verify(file: ReportFile) -> list[str]:
    """Return the command that compares the next run with this one, if its folder is known."""
    new, old = file.folder, os.path.join(file.folder, PREVIOUS_NAME)  # the next run renames this report
    if is_of_one_run(file.folder):
        new, old = os.path.dirname(file.folder.rstrip("/")), file.folder
        if run_folder(old) == new:  # of predict: the next run's is in another folder than that of this one
            return []
    new, old = shlex.quote(_shown(new)), shlex.quote(_shown(old))
    return [f"After the next run: lightning-gpu-tools report {new} --against {old}"]


def _shown(path: str | Path) -> str:
    """Return a path for printing, relative to the current folder if it is inside."""
    text = os.fspath(path)
    with contextlib.suppress(OSError):  # the current folder has been removed
        text = text.removeprefix(os.path.join(os.getcwd(), ""))
    return printable_path(text)


def say(text: str) -> None:
    """Print text in the terminal's encoding, in one write: Rich's bar in a notebook repeats unfinished lines."""
    try:
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        sys.stdout.write(text.encode(encoding, "replace").decode(encoding) + "\n")
        sys.stdout.flush()
    except Exception:  # a closed terminal, a notebook's own stream
        logging.getLogger(__name__).warning("The report could not be printed.", exc_info=True)


def say_verdict(diagnosis: Diagnosis) -> None:
    """Print why memory ran out, on a rank without its own report."""
    texts = {"Why:  ": diagnosis.why, "Next: ": diagnosis.next_step}
    say("\n".join(wrapped(printable(text, 1000), title, "      ") for title, text in texts.items()))
