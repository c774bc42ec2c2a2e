"""The report of a training run as data, as JSON (docs/report_schema.md describes it), and its files."""

import dataclasses
import errno
import functools
import json
import math
import os
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from lightning_gpu_tools import files
from lightning_gpu_tools.advice.findings import Diagnosis
from lightning_gpu_tools.advice.memory_account import MemoryAccount
from lightning_gpu_tools.advice.stalls import Stall
from lightning_gpu_tools.errors import ReportError
from lightning_gpu_tools.gpus.metrics import GpuSummary
from lightning_gpu_tools.processes import ProcessId, is_running
from lightning_gpu_tools.training.run_measurements import ACTIVITIES, LoaderResult, PhaseSpan, RankStep, SourceLine
from lightning_gpu_tools.units import format_bytes, path_text, printable, printable_path

FILE_NAME = "gpu_report.json"
PREVIOUS_NAME = "gpu_report.previous.json"
DRAWN = "gpu_report.png", "gpu_report.html"  # with the extra ``plot``
# The folder of the report if the run has no folder of its own, as with logger=False.
FOLDER_NAME = "gpu_report"
COMPLETED = "completed"
# The first words of an outcome: of a run in progress, and of a run that ended without a final report.
RUNNING, CUT_OFF = "running", "cut off"
# Limits for a report that is read from a file.
Count = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(ge=0)]
StepSeconds = Annotated[float, Meta(ge=1e-9)]  # the resolution of time.perf_counter_ns
SCHEMA_VERSION = 3
# NVML counts bytes in 64 bits. Sums and products of smaller numbers cannot overflow.
_MAX_NUMBER = 2**64
_MAX_BYTES = 32 << 20  # a report of 8,192 GPUs has 25 MiB
# A run writes its report at least this often.
WRITE_EVERY_S = 60.0
# Our default: a writer on another machine has ended if its last two writes are missing.
_MAX_SILENCE_S = 3 * WRITE_EVERY_S


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """The report of one run: of a fit, validate, test or predict. ``None`` = unknown or absent.

    Attributes:
        outcome: ``"completed"``, or for example ``"stopped by KeyError at step 812"``. A file written during the run
            has ``"running"``, which ``load_report`` turns into ``"running: step 812 so far"`` or, if the process has
            ended, ``"cut off after step 812"``.
        started_at: Start time, ISO 8601, UTC.
        steps: Number of training steps; for validate, test and predict, of batches.
        wall_s: Wall time of the run; ``phase_s`` adds up to it.
        phase_s: Wall time by phase; see docs/report_schema.md.
        diagnosis: Verdict and findings.
        gpus: Monitored GPUs.
        gpu_note: Reason why there are none, or values that could not be read.
        startup_s: Wall time from the start of the process to the end of the first step, by part: ``own_code`` (also
            imports), ``setup``, ``sanity_check``, ``first_batch``, ``compilation``, ``first_step`` and ``other``. For a
            later run of the process, and in a notebook, from the start of the run. Empty before the end of that step.
            ``wall_s`` starts after the sanity check.
        step_s_max: Longest steady step; ``diagnosis`` has the median and the 95th percentile.
        samples_per_s: Samples of all ranks per second, over steady steps.
        step_s_blocks: Mean time per step in each of at most 128 consecutive blocks of steady steps, without validation
            and checkpoints. Their spread is the run's own noise.
        warm_up_steps: Number of first steps that are not steady: 20, or more if the workers keep many batches ready, or
            if the loader's settings changed.
        monitor_us_per_step: Lower bound on the time that this package added to each step, in microseconds: its own work
            in the training thread, without its wrappers.
        monitor_thread_us_per_step: CPU time of its background threads per step, in microseconds.
        confirmation: Measured result of following the previous run's advice.
        others_cores: Mean number of this job's cores that other programs kept busy.
        unseen: Facts that could not be measured with this kernel, driver, Lightning or torch, or without permission;
            their time counts toward the surrounding phase.
        spans: Phases over time, in at most 401 parts.
        lines: Source lines at which the training thread of rank 0 and the workers of its loader were sampled, at most
            1,000, most frequent first.
        gpu_step_s: GPU time of a training step, by part; parts whose time is unknown are absent.
        ranks: Steps of each rank that reported; empty with one rank.
        memory: Memory use of each GPU of the job.
        claimed_bytes: Memory of each GPU of rank 0's node that the job claimed with ``min_free``.
        allocator_failures: Number of times that torch's allocator ran out of memory on rank 0 and the run continued:
            the program or cuDNN caught the error, or a search for the largest batch size provoked it.
        stalls: Times in which training made no progress, with the reason.
        failure: Why the run ended and what to do, if known beyond its error.
        loader: Result of NumWorkersFinder, if it finished.
        settings: Settings that two runs must share to be compared: CPU, accelerator, precision, batch size, loader,
            ...; model, dataset and stage (if it is not a fit) show whether they are runs of the same program.
        process: Process that wrote the report.
    """

    outcome: str
    started_at: str
    steps: Count
    wall_s: Seconds
    phase_s: Mapping[str, Seconds]
    diagnosis: Diagnosis
    gpus: tuple[GpuSummary, ...] = ()
    gpu_note: str | None = None
    startup_s: Mapping[str, Seconds] = dataclasses.field(default_factory=dict)
    step_s_max: Seconds | None = None
    samples_per_s: float | None = None
    step_s_blocks: tuple[StepSeconds, ...] = ()
    warm_up_steps: Count = 20
    monitor_us_per_step: float | None = None
    monitor_thread_us_per_step: float | None = None
    confirmation: str | None = None
    others_cores: float | None = None
    unseen: tuple[str, ...] = ()
    spans: tuple[PhaseSpan, ...] = ()
    lines: tuple[SourceLine, ...] = ()
    gpu_step_s: Mapping[str, float] = dataclasses.field(default_factory=dict)
    ranks: tuple[RankStep, ...] = ()
    memory: tuple[MemoryAccount, ...] = ()
    claimed_bytes: Count | None = None
    allocator_failures: int = 0
    stalls: tuple[Stall, ...] = ()
    failure: str | None = None
    loader: LoaderResult | None = None
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    process: ProcessId | None = None

    @property
    def is_finished(self) -> bool:
        """Whether the run wrote a final report, even after an error."""
        return not self.outcome.startswith((RUNNING, CUT_OFF))

    @property
    def activity(self) -> str:
        """What the run did, in a word."""
        return ACTIVITIES.get(str(self.settings.get("stage")), "training")


def to_json(report: Report) -> str:
    """Return the report as ASCII JSON with ``schema_version``; infinity and NaN become ``null``."""
    summary = report.diagnosis.summary()
    return as_json({"schema_version": SCHEMA_VERSION, "summary": summary, **dataclasses.asdict(report)})


def as_json(data: Mapping[str, Any]) -> str:
    """Return plain data in the format of :func:`to_json`, one line per field."""
    compact = functools.partial(json.dumps, separators=(",", ":"))

    def written(value: Any) -> str:
        # Item by item: json.dumps of a thousand GPUs at once would hold the GIL for 30 ms.
        items = isinstance(value, (list, tuple))
        return f"[{','.join(compact(_finite(item)) for item in value)}]" if items else compact(_finite(value))

    return "{\n" + ",\n".join(f"{compact(name)}: {written(value)}" for name, value in data.items()) + "\n}"


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def from_json(text: str, source: str = "the text") -> Report:
    """Return the report that :func:`to_json` wrote; unknown fields are ignored. ``source`` is its name in errors.

    Raises:
        ReportError: It is not a report, was written by another version of this package, or has a wrong type or a number
            out of range.
    """
    try:
        data = json.loads(text, parse_float=_number, parse_int=_number, parse_constant=_number)
        version = data.get("schema_version") if isinstance(data, dict) else None
        if not isinstance(version, int):
            raise ValueError("it is not an object with an integer schema_version")  # noqa: TRY004 - caught below
        if version != SCHEMA_VERSION:
            raise ReportError(
                f"{printable_path(source)} has schema version {version}, but this version of lightning_gpu_tools reads "
                f"only {SCHEMA_VERSION}. Read it with the version of the package that wrote it."
            )
        _use_infinity(data)
        return msgspec.convert(data, Report)
    except RecursionError:
        reason = "it is nested too deeply"
    except (ValueError, msgspec.ValidationError) as error:  # only in newer msgspec is one the other
        reason = printable(error, 300)
    raise ReportError(
        f"{printable_path(source)} is not a report of lightning_gpu_tools: {reason}. Pass a {FILE_NAME} that "
        "GPUUtilizationMonitor wrote."
    )


def _number(text: str) -> float:
    value = int(text) if text.lstrip("-").isdigit() else float(text)
    if not -_MAX_NUMBER <= value <= _MAX_NUMBER:  # true for NaN
        raise ValueError(f"`{printable(text, 40)}` is out of range")
    return value


def _use_infinity(data: dict[str, Any]) -> None:
    """Put infinity back where :func:`to_json` writes ``null`` for it, and leave out evidence that was not a number."""
    match data:
        case {"diagnosis": {"findings": [*findings]}}:
            for finding in findings:
                match finding:
                    case {"evidence": {**evidence}}:
                        for name in ("ceiling", "ceiling_lower"):
                            if finding.get(name, 0) is None:
                                finding[name] = math.inf
                        finding["evidence"] = {name: value for name, value in evidence.items() if value is not None}


def load_report(path: str | os.PathLike[str]) -> Report:
    """Return the report in a file or a folder: the folder's own ``gpu_report.json``, or else the newest one below it.

    Args:
        path: A file or a folder, local or a URL such as ``s3://bucket/run``, which needs its fsspec package.

    Raises:
        ReportError: There is no report, it cannot be read, it is from a newer version of this package, or it is forged.
    """
    file = find_report(path)
    try:
        status = files.status(file)
        if status.kind != "file":  # reading would wait for a writer, or never end
            raise ValueError("it is not a regular file; save its content to a file first")
        if status.size_bytes > _MAX_BYTES:
            raise ValueError(f"it is larger than {format_bytes(_MAX_BYTES)}, the limit for a report")
        text = files.read(file).decode()
    except (OSError, ValueError) as error:
        raise _unreadable(file, error) from None
    report = from_json(text, file)
    if report.outcome != RUNNING:
        return report
    runs = None if report.process is None else is_running(report.process)
    if runs is None:  # it may be on another machine
        runs = status.modified_s is None or time.time() - status.modified_s < _MAX_SILENCE_S
    outcome = f"{RUNNING}: step {report.steps} so far" if runs else f"{CUT_OFF} after step {report.steps}"
    return dataclasses.replace(report, outcome=outcome)


def find_report(path: str | os.PathLike[str]) -> str:
    """Return the file that :func:`load_report` reads; raise ``ReportError`` if a folder has none."""
    folder = path_text(path)
    try:
        if files.status(folder).kind != "folder":
            return folder
        own = os.path.join(folder, FILE_NAME)
        newest = own if files.exists(own) else next(find_reports(folder), None)
    except OSError as error:
        raise _unreadable(folder, error) from None
    if newest is None:
        raise ReportError(f"There is no {FILE_NAME} in {printable_path(folder)} or below it. Pass the file itself.")
    return newest


def run_folder(folder: str | os.PathLike[str]) -> str:
    """Return the folder of a run from that of a report: those of validate, test and predict are in folders below."""
    path = os.fspath(folder).rstrip("/")
    return os.path.dirname(path) if os.path.basename(path) in ACTIVITIES else path


def find_reports(folder: str) -> Iterator[str]:
    """Yield the reports of runs in a folder and below it, newest first, each followed by the one before it.

    Those of validate, test and predict are left out if their run has a fit.
    """
    found = files.matching(folder, *("*/" * depth + FILE_NAME for depth in range(4)))  # up to logs/name/version_0
    for file in sorted(found, key=lambda file: (files.last_modified(file), file), reverse=True):
        folder = os.path.dirname(file)
        run = run_folder(folder)
        if run == folder or not files.exists(os.path.join(run, FILE_NAME)):
            yield file
            previous = os.path.join(folder, PREVIOUS_NAME)
            if files.exists(previous):
                yield previous


def _unreadable(path: str, error: Exception) -> ReportError:
    reason = (error.strerror if isinstance(error, OSError) else None) or printable(error)
    if isinstance(error, FileNotFoundError):  # some file systems raise it without text
        reason = os.strerror(errno.ENOENT)
    return ReportError(f"Cannot read a report from {printable(repr(path), 300)}: {reason}.")


class ReportFile:
    """The ``gpu_report.json`` of one run in a folder or at a URL, which may be written repeatedly.

    An earlier run's report is kept as ``gpu_report.previous.json``. There, an unfinished report never replaces a
    finished one.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = os.fspath(folder)
        self.path = os.path.join(self.folder, FILE_NAME)
        self._is_ours = False
        self._writing = threading.Lock()

    def save(self, report: Report) -> str:
        """Write the report completely or not at all, and return its path.

        Raises:
            OSError: The folder is not writable, or another thread is still writing because the disk does not respond.
        """
        if not self._writing.acquire(blocking=False):
            raise TimeoutError("the disk does not respond")
        try:
            with files.writing(self.path) as file:
                file.write(f"{to_json(report)}\n".encode())
                file.flush()  # a full disk fails here, before the former report replaces the previous one
                if not self._is_ours:
                    self._keep_former()
            self._is_ours = True
        finally:
            self._writing.release()
        return self.path

    def _keep_former(self) -> None:
        previous = os.path.join(self.folder, PREVIOUS_NAME)
        keeps = _is_finished(self.path) or not files.exists(previous) or not _is_finished(previous)
        if keeps and files.exists(self.path):
            with files.writing(previous) as file:  # a copy, so that a report always exists
                file.write(files.read(self.path))


def _is_finished(path: str) -> bool:
    try:
        return load_report(path).is_finished
    except ReportError:  # from a newer version, or not ours: keep it
        return True
