"""Reports as JSON, in the format of docs/report_schema.md; their files: finding, reading and writing them."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import json
import math
import os
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from lightning_gpu_tools import files
from lightning_gpu_tools.errors import ReportError
from lightning_gpu_tools.processes import is_running
from lightning_gpu_tools.reports.report import CUT_OFF, FILE_NAME, PREVIOUS_NAME, RUNNING, Report
from lightning_gpu_tools.training.run_measurements import ACTIVITIES
from lightning_gpu_tools.units import format_bytes, path_text, printable, printable_path

SCHEMA_VERSION = 3
# NVML counts bytes in 64 bits. Sums and products of smaller numbers cannot overflow.
_MAX_NUMBER = 2**64
# Where reports are in a folder of runs: up to logs/name/version_0.
_BELOW = ("", "*/", "*/*/", "*/*/*/")
_MAX_BYTES = 32 << 20  # a report of 8,192 GPUs has 25 MiB
# A run writes its report at least this often.
WRITE_EVERY_S = 60.0
# Our default: a writer on another machine has ended if its last two writes are missing.
_MAX_SILENCE_S = 3 * WRITE_EVERY_S


def to_json(report: Report) -> str:
    """Return the report as ASCII JSON with ``schema_version``; infinity and NaN become ``null``."""
    summary = report.diagnosis.summary()
    return as_json({"schema_version": SCHEMA_VERSION, "summary": summary, **dataclasses.asdict(report)}) + "\n"


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
    found = files.matching(folder, *(f"{below}{FILE_NAME}" for below in _BELOW))
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
        self._written: object = None
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
                file.write(to_json(report).encode())
                file.flush()  # a full disk fails here, before the former report replaces the previous one
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
                with files.writing(previous) as file:  # a copy, so that a report always exists
                    file.write(files.read(self.path))


def _is_finished(path: str) -> bool:
    try:
        return load_report(path).is_finished
    except ReportError:  # from a newer version, or not ours: keep it
        return True


def warn_if_not_writable(folder: str) -> None:
    """Warn before training if the report cannot be written. The folder is not created, because it may stay empty."""
    try:
        files.check_writable(folder)
    except OSError as error:
        warnings.warn(
            f"The report of this run will be printed, but not written to {folder!r}: {error.strerror or error}. "
            "To get a file, choose another folder: Trainer(default_root_dir=...), its logger, or watch(folder=...).",
            stacklevel=2,
        )
