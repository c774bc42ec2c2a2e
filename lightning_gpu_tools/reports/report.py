"""The report of a training run as data, and as JSON on disk in the format of docs/report_schema.md."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import json
import math
import os
import re
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from lightning_gpu_tools import files
from lightning_gpu_tools.advice.findings import Diagnosis, Finding
from lightning_gpu_tools.advice.loader_plan import LoaderResult, trial_of
from lightning_gpu_tools.advice.memory_account import MemoryAccount
from lightning_gpu_tools.advice.stall_excuses import is_excused
from lightning_gpu_tools.advice.stalls import Stall, explain_process
from lightning_gpu_tools.errors import ReportError
from lightning_gpu_tools.gpus.metrics import GpuSummary
from lightning_gpu_tools.processes import ProcessId
from lightning_gpu_tools.training.lock_alarm import held_in
from lightning_gpu_tools.training.phases import UNEXPLAINED
from lightning_gpu_tools.training.run_measurements import RankStep, SourceLine
from lightning_gpu_tools.training.stall_facts import StallFacts
from lightning_gpu_tools.training.stopwatch import PhaseSpan
from lightning_gpu_tools.training.timeline import series_of
from lightning_gpu_tools.units import format_bytes, printable, printable_path

# Far more than any list or object of a report has: a timeline has 2,000 points.
_MAX_ITEMS = 20_000
# NVML counts bytes in 64 bits. Sums and products of smaller numbers cannot overflow.
_MAX_NUMBER = 2**64
_MAX_DEPTH = 8  # of settings and evidence, which are numbers, strings and lists of them
# Places of times and rates, which are never negative.
_OF_TIMES = re.compile(r"_s(_|$|[.\[])|(^|\.)seconds$")
# By type: what json.loads returns for it, and its name in errors.
_IN_JSON: dict[Any, tuple[Any, str]] = {
    NoneType: (NoneType, "null"),
    bool: (bool, "true or false"),
    int: (int, "an integer"),
    float: ((int, float), "a number"),
    str: (str, "a string"),
    list: (list, "a list"),
    dict: (dict, "an object"),
}


def read(kind: Any, value: Any, kinds: Mapping[str, Any], place: str = "") -> Any:
    """Return a value of parsed JSON as an object of this type. Unknown fields are ignored.

    Args:
        kind: A dataclass, a named tuple (a list in JSON), ``Mapping[str, X]``, ``tuple[X, ...]``, ``Sequence[X]``,
            ``Literal``, a union, ``str``, ``int``, ``float``, ``bool``, or ``Any`` for plain data of little depth.
        value: What ``json.loads`` returned.
        kinds: Types that replace those of dataclass fields, by the field's name.
        place: Where the value stands; used in the error.

    Raises:
        ValueError: The value has another type or too many items, or a number is not finite, too large, a negative
            integer or a negative time.
    """
    options = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    option = next((one for one in options if _fits(one, value)), None)
    if option is None:
        raise _refused(place, f"must be {' or '.join(_in_json(one)[1] for one in options)}", value)
    if get_origin(option) is Literal and value not in get_args(option):
        raise _refused(place, f"must be one of {', '.join(get_args(option))}", value)
    _check_ranges(value, place, _MAX_DEPTH if option is Any else None)
    if option is Any or isinstance(value, (str, int, float, NoneType)):
        return value
    if hasattr(option, "_fields"):
        fields = option._fields
        if not len(fields) - len(option._field_defaults) <= len(value) <= len(fields):
            raise _refused(place, f"must be a list of {', '.join(fields)}, got {len(value)} items")
        value = dict(zip(fields, value, strict=False))
    is_dataclass: bool = dataclasses.is_dataclass(option)
    for field in dataclasses.fields(option) if is_dataclass else ():
        if field.name not in value and field.default is field.default_factory is dataclasses.MISSING:
            raise _refused(place, f"has no {field.name!r}")
    if is_dataclass or hasattr(option, "_fields"):
        types = {name: kinds.get(name, inner) for name, inner in _hints(option).items() if name in value}
        return option(**{name: read(inner, value[name], kinds, _inside(place, name)) for name, inner in types.items()})
    if isinstance(value, dict):
        return {key: read(get_args(option)[1], one, kinds, _inside(place, key)) for key, one in value.items()}
    items = [read(get_args(option)[0], one, kinds, _inside(place, i)) for i, one in enumerate(value)]
    return tuple(items) if get_origin(option) is tuple else items


def _check_ranges(value: Any, place: str, depth: int | None) -> None:
    """Refuse what no report has; ``depth``: levels allowed inside a value of any type, ``None`` for a typed one."""
    if isinstance(value, (list, dict)):
        if depth == 0:
            raise _refused(place, f"is nested deeper than {_MAX_DEPTH} levels")
        if len(value) > _MAX_ITEMS:
            raise _refused(place, f"has {len(value):,} items; at most {_MAX_ITEMS:,} are allowed")
        for one in (value if isinstance(value, list) else value.values()) if depth else ():
            _check_ranges(one, place, depth - 1 if depth else None)
    elif isinstance(value, (int, float)):
        if not abs(value) <= _MAX_NUMBER:  # NaN is not either
            raise _refused(place, "must be a finite number of at most 2^64", value)
        if value < 0 and depth is None and (isinstance(value, int) or _OF_TIMES.search(place)):
            raise _refused(place, "must not be negative", value)


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _fits(kind: Any, value: Any) -> bool:
    return kind is Any or (isinstance(value, _in_json(kind)[0]) and (kind is bool or not isinstance(value, bool)))


@functools.cache
def _in_json(kind: Any) -> tuple[Any, str]:
    plain = str if get_origin(kind) is Literal else kind
    if plain not in _IN_JSON:
        plain = dict if dataclasses.is_dataclass(kind) or get_origin(kind) is Mapping else list
    return _IN_JSON[plain]


def _inside(place: str, key: str | int) -> str:
    return f"{place}[{key}]" if isinstance(key, int) else f"{place}.{key}" if place else key


def _refused(place: str, why: str, *values: Any) -> ValueError:
    for value in values:
        has_items = isinstance(value, (list, dict))
        why += f", got {_IN_JSON[type(value)][1] if has_items else printable(json.dumps(value))}"
    return ValueError(f"{printable(place, 200)} {why}".lstrip())


SCHEMA_VERSION = 3
FILE_NAME = "gpu_report.json"
PREVIOUS_NAME = "gpu_report.previous.json"
# Where a run has no folder of its own, as with logger=False, its report has one.
FOLDER_NAME = "gpu_report"
# Where a folder of runs has their reports: as deep as logs/name/version_0.
_BELOW = tuple("*/" * depth + FILE_NAME for depth in (1, 2, 3))
_MAX_BYTES = 32 << 20  # a report of 8,192 GPUs has 25 MiB
PLOT_NAME = "gpu_report.png"
PAGE_NAME = "gpu_report.html"
RUNNING = "running"
_CUT_OFF = "cut off"
# The report of a run is written at least this often while it runs.
WRITE_EVERY_S = 60.0
# Our default: a writer on another machine has ended if its last two writes are missing.
_MAX_SILENCE_S = 3 * WRITE_EVERY_S


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderSummary:
    """The result of NumWorkersFinder.

    Attributes:
        users: The original settings; ``None`` if the loader is not a torch DataLoader.
        settings: The settings found.
        applied: Whether they were in use at the end.
        confirmed: Whether they were as good in the first hundred steps of their use.
        reason: Why, with numbers.
        users_batches_per_s: Speed of loader and step together with the original settings.
        batches_per_s: Speed with the settings found.
        wait_share: Share of the time in which training waited for data with them.
        seconds: How long the search took.
    """

    users: Mapping[str, Any] | None
    settings: Mapping[str, Any] | None
    applied: bool
    confirmed: bool | None
    reason: str
    users_batches_per_s: float | None
    batches_per_s: float | None
    wait_share: float | None
    seconds: float


def summarize(result: LoaderResult) -> LoaderSummary:
    """Return what a report keeps of a search."""
    before, after = trial_of(result.trials, result.original), trial_of(result.trials, result.settings)
    return LoaderSummary(
        users=None if result.original is None else dataclasses.asdict(result.original),
        settings=None if result.settings is None else dataclasses.asdict(result.settings),
        applied=result.applied,
        confirmed=result.confirmed,
        reason=result.reason,
        users_batches_per_s=None if before is None else before.batches_per_s,
        batches_per_s=None if after is None else after.batches_per_s,
        wait_share=result.wait_share,
        seconds=result.seconds,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """The report of one fit. ``None`` = unknown, or there is none.

    Attributes:
        outcome: ``"completed"``, or for example ``"stopped by KeyError at step 812"``; in a file that was written
            meanwhile ``"running"``, which ``load_report`` turns into ``"running: step 812 so far"`` or, if the process
            is gone, ``"cut off after step 812"``.
        started_at: ISO 8601, UTC.
        steps: Training steps.
        wall_s: Wall time of training; ``phase_s`` adds up to it.
        phase_s: Wall time by phase; see docs/report_schema.md.
        step_s_median: Median time of a step after the warm-up, without validation, checkpoints and starting epochs.
        diagnosis: Verdict and findings.
        gpus: The monitored GPUs.
        gpu_note: Why there are none, or what could not be read.
        step_s_p95: 95th percentile of the same steps.
        step_s_max: The longest of them.
        samples_per_s: Samples of all ranks per second of the same steps.
        step_s_blocks: Mean time per step in each of at most 128 consecutive blocks of steady steps, without validation
            and checkpoints. Their spread is the run's own noise.
        monitor_us_per_step: What this package added to each step at least, in microseconds: its wrappers in the
            training thread, measured in warm caches, and its own work there.
        monitor_thread_us_per_step: CPU time of its background threads per step, in microseconds.
        confirmation: The measured result of following the previous run's advice.
        core_wait_share: Fraction of the steady steps in which the training thread could run and had no core.
        others_cores: How many of this job's cores other programs kept busy, on average.
        unseen: What could not be measured with this kernel, driver, Lightning or torch, or was refused; its time counts
            toward the phase around it.
        spans: The phases over time, in at most 401 parts.
        lines: The source lines at which the training thread of rank 0 and the workers of its loader were seen, at most
            1,000, most frequent first.
        gpu_step_s: How long the GPU works on a training step, by part; without the parts of which that is unknown.
        ranks: The steps of each rank that reported; empty with one rank.
        memory: What the memory of each GPU of the training was used for.
        allocator_failures: How often torch's allocator ran out of memory on rank 0 and the run went on: the program or
            cuDNN caught the error, or a search for the largest batch size provoked it.
        stalls: Times in which the training made no progress, with the reason.
        stall_note: Which of them may be missing.
        failure: What ended the run and what to do, where more is known than its error.
        loader: The result of NumWorkersFinder, if it finished.
        settings: What two runs must share to be compared: CPU, accelerator, precision, batch size, loader, ...; model
            and dataset show whether they are runs of the same program.
        process: Who wrote the report.
    """

    outcome: str
    started_at: str
    steps: int
    wall_s: float
    phase_s: Mapping[str, float]
    step_s_median: float | None
    diagnosis: Diagnosis
    gpus: tuple[GpuSummary, ...] = ()
    gpu_note: str | None = None
    step_s_p95: float | None = None
    step_s_max: float | None = None
    samples_per_s: float | None = None
    step_s_blocks: tuple[float, ...] = ()
    monitor_us_per_step: float | None = None
    monitor_thread_us_per_step: float | None = None
    confirmation: str | None = None
    core_wait_share: float | None = None
    others_cores: float | None = None
    unseen: tuple[str, ...] = ()
    spans: tuple[PhaseSpan, ...] = ()
    lines: tuple[SourceLine, ...] = ()
    gpu_step_s: Mapping[str, float] = dataclasses.field(default_factory=dict)
    ranks: tuple[RankStep, ...] = ()
    memory: tuple[MemoryAccount, ...] = ()
    allocator_failures: int = 0
    stalls: tuple[Stall, ...] = ()
    stall_note: str | None = None
    failure: str | None = None
    loader: LoaderSummary | None = None
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    process: ProcessId | None = None

    @property
    def is_finished(self) -> bool:
        """Whether the run could report its end, even if that was an error."""
        return not self.outcome.startswith((RUNNING, _CUT_OFF))


def to_json(report: Report) -> str:
    """Return the report as ASCII JSON with ``schema_version``; infinity and NaN become ``null``."""
    summary = report.diagnosis.summary()
    return as_json({"schema_version": SCHEMA_VERSION, "summary": summary, **dataclasses.asdict(report)}) + "\n"


def as_json(data: Mapping[str, Any]) -> str:
    """Return plain data like :func:`to_json`, one line a field."""
    compact = functools.partial(json.dumps, separators=(",", ":"))

    def written(value: Any) -> str:
        # Item by item: json.dumps of a thousand GPUs at once would hold Python's lock from the training for 30 ms.
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
    """Return the report that :func:`to_json` wrote; unknown fields are ignored. ``source`` names it in errors.

    Raises:
        ReportError: It is no report, was written by a newer version of this package, or holds a wrong type, a number
            that is not finite, a negative time, or too many items.
    """
    try:
        data = json.loads(text)
        version = data.get("schema_version") if isinstance(data, dict) else None
        if not isinstance(version, int):
            raise ValueError("it is not an object with an integer schema_version")  # noqa: TRY004 - caught below
        if version > SCHEMA_VERSION:
            raise ReportError(
                f"{printable_path(source)} has schema version {printable(version)}, but this version of "
                f"lightning_gpu_tools reads only up to {SCHEMA_VERSION}. Upgrade the package to read it."
            )
        report: Report = read(Report, data, _AS_WRITTEN | (_AS_ONCE_WRITTEN if version < 2 else {}))
        if version < 2:
            report = dataclasses.replace(report, gpus=tuple(map(_with_series, report.gpus)))
        if min(report.step_s_blocks, default=1.0) < _SHORTEST_S:
            raise ValueError("step_s_blocks holds a step of less than a nanosecond")
        if any(one.interval_s < _SHORTEST_S for gpu in report.gpus for one in gpu.timelines.values()):
            raise ValueError("gpus holds a timeline with intervals of less than a nanosecond")
        findings = tuple(map(_unbounded, report.diagnosis.findings))
        return dataclasses.replace(report, diagnosis=dataclasses.replace(report.diagnosis, findings=findings))
    except RecursionError:
        reason = "it is nested too deeply"
    except ValueError as error:
        reason = str(error)
    raise ReportError(
        f"{printable_path(source)} is not a report of lightning_gpu_tools: {reason}. Pass a {FILE_NAME} that "
        "GPUUtilizationMonitor wrote."
    )


# Where to_json writes null for infinity and NaN.
_AS_WRITTEN = {"ceiling": float | None, "ceiling_lower": float | None, "evidence": Mapping[str, Any]}


class _Point(NamedTuple):
    time: float
    value: float


# In schema version 1 timelines were lists of points.
_AS_ONCE_WRITTEN = {"timelines": Mapping[str, Sequence[_Point]]}
_SHORTEST_S = 1e-9  # the resolution of time.perf_counter_ns; no quotient of two such times overflows


def _with_series(gpu: GpuSummary) -> GpuSummary:
    timelines: Mapping[str, Any] = gpu.timelines
    return dataclasses.replace(gpu, timelines={name: series_of(points) for name, points in timelines.items()})


def _unbounded(finding: Finding) -> Finding:
    ceiling, lower = (math.inf if bound is None else bound for bound in (finding.ceiling, finding.ceiling_lower))
    return dataclasses.replace(finding, ceiling=ceiling, ceiling_lower=lower)


def load_report(path: str | os.PathLike[str]) -> Report:
    """Return the report in a file, or the one of a folder: its own ``gpu_report.json``, or else the newest one below.

    Args:
        path: A file or a folder, local or a URL such as ``s3://bucket/run``, for which its fsspec package is needed.

    Raises:
        ReportError: There is no report, it cannot be read, it is from a newer version of this package, or it is forged.
    """
    file = find_report(path)
    try:
        status = files.status(file)
        if status.kind != "file":  # would wait for a writer, or never end
            raise ValueError("it is not a file; save its content to one first")
        if status.size_bytes > _MAX_BYTES:
            raise ValueError(f"it is larger than {format_bytes(_MAX_BYTES)}, the limit for a report")
        text = files.read(file).decode()
    except (OSError, ValueError) as error:
        raise _unreadable(file, error) from None
    report = from_json(text, file)
    if report.outcome != RUNNING:
        return report
    age_s = None if status.modified_s is None else time.time() - status.modified_s
    last = _stall_at_last(report, files.local_path(file))
    return dataclasses.replace(report, outcome=_outcome_now(report, age_s), stalls=(*report.stalls, *last))


def find_report(path: str | os.PathLike[str]) -> str:
    """Return the file that :func:`load_report` reads; ``ReportError`` if a folder has none."""
    folder = os.fspath(path)
    try:
        if files.status(folder).kind != "folder":
            return folder
        own = os.path.join(folder, FILE_NAME)
        found = [own] if files.exists(own) else files.matching(folder, *_BELOW)
    except (OSError, ValueError, ImportError) as error:  # no such file, no such protocol, its package is missing
        raise _unreadable(folder, error) from None
    if not found:
        raise ReportError(f"There is no {FILE_NAME} in {printable_path(folder)} or below it. Pass the file itself.")
    return max(found, key=lambda file: (files.last_modified(file), file))


def _unreadable(path: str, error: Exception) -> ReportError:
    reason = (error.strerror if isinstance(error, OSError) else None) or printable(error)
    if isinstance(error, FileNotFoundError):  # whose text some file systems leave out
        reason = os.strerror(errno.ENOENT)
    return ReportError(f"Cannot read a report from {printable(repr(path), 300)}: {reason}.")


def _stall_at_last(report: Report, file: str | None) -> list[Stall]:
    """Return the stall of a run that could not write its report any more, because C code holds Python's lock."""
    found = None if file is None else held_in(Path(file).parent, report.process)
    if found is None or is_excused(found[0].stack):
        return []
    held, since_s = found
    why = explain_process(StallFacts(phase=UNEXPLAINED, stack=held.stack, lock_is_held=True))
    return [
        Stall(
            began_at=datetime.fromtimestamp(since_s, timezone.utc).isoformat(timespec="seconds"),
            lasted_s=held.lasted_s,
            is_over=False,
            step=report.steps,
            phase=UNEXPLAINED,
            stack=tuple(map(str, held.stack)),
            **why._asdict(),
        )
    ]


def _outcome_now(report: Report, age_s: float | None) -> str:
    runs = None if report.process is None else report.process.is_running
    if runs is None:  # it may be on another machine
        runs = age_s is None or age_s < _MAX_SILENCE_S
    return f"{RUNNING}: step {report.steps} so far" if runs else f"{_CUT_OFF} after step {report.steps}"


class ReportFile:
    """The ``gpu_report.json`` of one run in a folder or at a URL, which may be written again and again.

    What another run has left there is kept as ``gpu_report.previous.json``, but the report of a run that was cut off
    never takes the place of one that is finished.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = os.fspath(folder)
        self.path = os.path.join(self.folder, FILE_NAME)
        self._written: object = None
        self._writing = threading.Lock()

    def save(self, report: Report) -> str:
        """Write the report, completely or not at all, and return its path.

        Raises:
            OSError: The folder is not writable, or the disk does not answer, so that another thread is still writing.
        """
        if not self._writing.acquire(blocking=False):
            raise TimeoutError("the disk does not answer")
        try:
            with files.writing(self.path) as file:
                file.write(to_json(report).encode())
                file.flush()  # a full disk shows here, before the former report takes the place of the one before it
                self._keep_former()
            self._written = files.status(self.path).content
        finally:
            self._writing.release()
        return self.path

    def _keep_former(self) -> None:
        previous = os.path.join(self.folder, PREVIOUS_NAME)
        with contextlib.suppress(FileNotFoundError):
            if files.status(self.path).content == self._written:
                return
            if _is_finished(self.path) or not files.exists(previous) or not _is_finished(previous):
                with files.writing(previous) as file:  # a copy, so that there is a report at every moment
                    file.write(files.read(self.path))


def _is_finished(path: str) -> bool:
    try:
        return load_report(path).is_finished
    except ReportError:  # of a newer version, or not ours: not to be lost
        return True
