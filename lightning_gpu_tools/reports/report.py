"""The report of a training run: as data, and as JSON on disk. See docs/report_schema.md for the format."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median_low
from typing import Any

from lightning_gpu_tools.advice.findings import Diagnosis, Finding
from lightning_gpu_tools.errors import ReportError
from lightning_gpu_tools.gpus.metrics import GpuSummary
from lightning_gpu_tools.reports.loader_summary import LoaderSummary
from lightning_gpu_tools.reports.typed_json import read
from lightning_gpu_tools.training.memory_growth import MemoryGrowth
from lightning_gpu_tools.training.stopwatch import PhaseSpan
from lightning_gpu_tools.units import format_bytes, printable, printable_path

SCHEMA_VERSION = 1
FILE_NAME = "gpu_report.json"
# A report with all there can be has 6 MiB: 16 GPUs with timelines of 2000 points, 1,024 ranks, 401 spans.
_MAX_BYTES = 16 << 20
PLOT_NAME = "gpu_report.png"


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSpeed:
    """How long one rank works on a step before any other rank can make it wait.

    Attributes:
        rank: Global rank.
        node: Number of its node.
        own_step_s: Median time of a steady step outside of backward and optimizer, where ranks wait for each other.
    """

    rank: int
    node: int
    own_step_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Everything worth knowing of one fit.

    Attributes:
        outcome: ``"completed"``, or for example ``"stopped by KeyError at step 812"``.
        started_at: ISO 8601, UTC.
        steps: Training steps.
        wall_s: Wall time of training; ``phase_s`` adds up to it.
        phase_s: Wall time by phase, see :mod:`lightning_gpu_tools.trainer.step_clock`.
        step_s_median: Median time from step to step, steady steps only; ``None`` if there were none.
        diagnosis: Verdict and findings.
        gpus: The GPUs watched.
        gpu_note: Why there are none, or what could not be read; ``None`` if all is well.
        samples_per_s: Samples of all ranks in a second of steady steps; ``None`` where the batch size is unknown.
        step_s_blocks: Mean time of a step in each of at most 128 consecutive blocks of steady steps, without validation
            and checkpoints. Their spread is the run's own noise.
        monitor_us_per_step: What this package itself added to a step at least, in microseconds: its wrappers in the
            training thread, by what they cost in warm caches, and what it did there; ``None`` if it was not measured.
        monitor_thread_us_per_step: CPU time of its own thread beside that, likewise; ``None`` without GPUs.
        confirmation: What following the advice of the run before has brought, in words; ``None`` if there is nothing to
            tell.
        unseen: What could not be timed with this version of Lightning; it stays part of the phase around it.
        spans: What the run was spent on over time, in at most 400 parts.
        ranks: How fast each rank is, as far as they could be heard; empty with one rank.
        memory_growth: Memory that grew steadily.
        loader: What NumWorkersFinder found; ``None`` without one, and if it had not finished.
        settings: What two runs must have in common to be compared: CPU, accelerator, precision, batch size, loader,
            ...; model and dataset tell whether one is the other with a change.
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
    samples_per_s: float | None = None
    step_s_blocks: tuple[float, ...] = ()
    monitor_us_per_step: float | None = None
    monitor_thread_us_per_step: float | None = None
    confirmation: str | None = None
    unseen: tuple[str, ...] = ()
    spans: tuple[PhaseSpan, ...] = ()
    ranks: tuple[RankSpeed, ...] = ()
    memory_growth: tuple[MemoryGrowth, ...] = ()
    loader: LoaderSummary | None = None
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def slowest_rank(ranks: Sequence[RankSpeed]) -> tuple[RankSpeed, float] | None:
    """Return the rank that takes longest, and by how many seconds a step it is behind the median rank.

    Of an even number of ranks the faster one of the two in the middle counts as the median. ``None`` with one rank.
    """
    if len(ranks) < 2:
        return None
    slowest = max(ranks, key=lambda rank: rank.own_step_s)
    return slowest, slowest.own_step_s - median_low(rank.own_step_s for rank in ranks)


def to_json(report: Report) -> str:
    """Return the report as JSON text in ASCII, an object with ``schema_version``.

    Numbers that JSON lacks become ``null``.
    """
    return as_json({"schema_version": SCHEMA_VERSION, **dataclasses.asdict(report)}) + "\n"


def as_json(data: Any) -> str:
    """Return plain data as JSON text in ASCII, with ``null`` for the numbers that JSON lacks."""
    return json.dumps(_finite(data), indent=1)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def from_json(text: str, source: str = "the text") -> Report:
    """Return the report that :func:`to_json` wrote. Fields that this version does not know are passed over.

    Args:
        text: The JSON text.
        source: Where it comes from; used in the error.

    Raises:
        ReportError: It is no report, one of a newer version of this package, or holds what no report does: another
            type, a number that is not finite or a negative time, more items than any training has.
    """
    try:
        data = json.loads(text)
        version = data.get("schema_version") if isinstance(data, dict) else None
        if not isinstance(version, int):
            raise ValueError("it is no object with an integer as schema_version")  # noqa: TRY004 - caught below
        if version > SCHEMA_VERSION:
            raise ReportError(
                f"{printable_path(source)} was written by a newer version of lightning_gpu_tools (schema "
                f"{printable(version)}, this one reads up to {SCHEMA_VERSION}): upgrade the package to read it."
            )
        report: Report = read(Report, data, _AS_WRITTEN)
        if min(report.step_s_blocks, default=1.0) < _SHORTEST_S:
            raise ValueError("step_s_blocks holds a step of less than a nanosecond")
    except RecursionError:
        reason = "it is nested too deep"
    except ValueError as error:
        reason = str(error)
    else:
        findings = tuple(map(_unbounded, report.diagnosis.findings))
        return dataclasses.replace(report, diagnosis=dataclasses.replace(report.diagnosis, findings=findings))
    raise ReportError(
        f"{printable_path(source)} is not a report of lightning_gpu_tools: {reason}. Give it the {FILE_NAME} that "
        "GPUUtilizationMonitor has written."
    ) from None


# What to_json has made of the numbers that JSON lacks.
_AS_WRITTEN = {"ceiling": float | None, "ceiling_lower": float | None, "evidence": Mapping[str, Any]}
_SHORTEST_S = 1e-9  # the resolution of time.perf_counter_ns; no quotient of two such times overflows


def _unbounded(finding: Finding) -> Finding:
    """Return the finding with the infinity that was written as ``null``."""
    bounds = (math.inf if bound is None else bound for bound in (finding.ceiling, finding.ceiling_lower))
    return dataclasses.replace(finding, ceiling=next(bounds), ceiling_lower=next(bounds))


def load_report(path: str | os.PathLike[str]) -> Report:
    """Return the report in a file, or in the folder that holds a ``gpu_report.json``.

    Whatever the path leads to, this neither waits nor reads more than 16 MiB.

    Raises:
        ReportError: There is none, or it cannot be read; see :func:`from_json`.
    """
    file = Path(path)
    try:
        if file.is_dir():
            file = file / FILE_NAME
        with open(file, "rb", opener=_open_without_waiting) as stream:
            if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                raise ValueError("it is a pipe or a device; save what it gives to a file first")
            content = stream.read(_MAX_BYTES + 1)
        if len(content) > _MAX_BYTES:
            raise ValueError(f"it is larger than {format_bytes(_MAX_BYTES)}, which no report is")
        text = content.decode("utf-8")
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or printable(error)
        raise ReportError(f"No report can be read from {printable(repr(str(file)), 300)}: {reason}.") from None
    return from_json(text, str(file))


def _open_without_waiting(path: str, flags: int) -> int:
    """Open a file; a pipe at once, too, and not only when somebody writes into it."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0))


def save_report(report: Report, folder: str | os.PathLike[str]) -> Path:
    """Write ``gpu_report.json`` into ``folder``, whole or not at all, and return its path.

    Raises:
        OSError: The folder cannot be written.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    target = Path(folder) / FILE_NAME
    temporary = target.with_name(f".{FILE_NAME}.{os.getpid()}")
    try:
        temporary.write_text(to_json(report), encoding="utf-8")
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
    return target
