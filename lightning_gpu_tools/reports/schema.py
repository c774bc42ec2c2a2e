"""A report as JSON, in the format of docs/report_schema.md."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lightning_gpu_tools.advice.findings import Finding
from lightning_gpu_tools.errors import ReportError
from lightning_gpu_tools.gpus.metrics import GpuSummary
from lightning_gpu_tools.reports.report import FILE_NAME, Report
from lightning_gpu_tools.reports.typed_json import read
from lightning_gpu_tools.training.timeline import series_of
from lightning_gpu_tools.units import printable, printable_path

SCHEMA_VERSION = 3


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
        ReportError: It is not a report, was written by a newer version of this package, or has a wrong type, a number
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


# The fields where to_json writes null for infinity and NaN.
_AS_WRITTEN = {"ceiling": float | None, "ceiling_lower": float | None, "evidence": Mapping[str, Any]}


class _Point(NamedTuple):
    time: float
    value: float


# In schema version 1, timelines were lists of points.
_AS_ONCE_WRITTEN = {"timelines": Mapping[str, Sequence[_Point]]}
_SHORTEST_S = 1e-9  # the resolution of time.perf_counter_ns; no quotient of two such times overflows


def _with_series(gpu: GpuSummary) -> GpuSummary:
    timelines: Mapping[str, Any] = gpu.timelines
    return dataclasses.replace(gpu, timelines={name: series_of(points) for name, points in timelines.items()})


def _unbounded(finding: Finding) -> Finding:
    ceiling, lower = (math.inf if bound is None else bound for bound in (finding.ceiling, finding.ceiling_lower))
    return dataclasses.replace(finding, ceiling=ceiling, ceiling_lower=lower)
