"""A report as JSON, in the format of docs/report_schema.md."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from lightning_gpu_tools.errors import ReportError
from lightning_gpu_tools.reports.report import FILE_NAME, Report
from lightning_gpu_tools.training.timeline import series_of
from lightning_gpu_tools.units import printable, printable_path

SCHEMA_VERSION = 3
# Far more than any list or object in a report: a timeline has 2,000 points.
_MAX_ITEMS = 20_000
_MAX_DEPTH = 12  # twice that of a report
# NVML counts bytes in 64 bits. Sums and products of smaller numbers cannot overflow.
_MAX_NUMBER = 2**64
_SHORTEST_S = 1e-9  # the resolution of time.perf_counter_ns; no quotient of two such times overflows
# Names of times and rates, which are never negative, and of the program's own values, which may be.
_OF_TIMES = re.compile(r"_s(_|$)|^\.seconds$")
_OF_PROGRAM = frozenset({".evidence", ".settings", ".users"})
_BOUNDS = (".ceiling", ".ceiling_lower")  # may be infinite


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
        if version < 2:
            _use_series(data)
        _use_infinity(data)
        report = msgspec.convert(data, Report)
        _refuse_forged(report)
        if min(report.step_s_blocks, default=1.0) < _SHORTEST_S:
            raise ValueError("step_s_blocks holds a step of less than a nanosecond")
        if any(one.interval_s < _SHORTEST_S for gpu in report.gpus for one in gpu.timelines.values()):
            raise ValueError("gpus holds a timeline with intervals of less than a nanosecond")
        return report
    except RecursionError:
        reason = "it is nested too deeply"
    except (ValueError, msgspec.ValidationError) as error:  # only in newer msgspec is one the other
        reason = printable(error, 300)
    raise ReportError(
        f"{printable_path(source)} is not a report of lightning_gpu_tools: {reason}. Pass a {FILE_NAME} that "
        "GPUUtilizationMonitor wrote."
    )


def _refuse_forged(value: Any, place: str = "$", depth: int = _MAX_DEPTH, lowest: float | None = -_MAX_NUMBER) -> None:
    """Raise ``ValueError`` if a report or a part of it has more items, more levels or larger numbers than any report.

    Args:
        value: The part.
        place: Its path.
        depth: Number of levels it may have.
        lowest: Smallest fraction it may hold, besides integers from 0; ``None``: any number, as it is the program's.
    """
    inside = _inside(value)
    if inside is not None and (len(inside) > _MAX_ITEMS or not depth):
        raise ValueError(f"Too many items or levels - at `{place}`")
    for name, one in (inside or {}).items():
        within = None if lowest is None or name in _OF_PROGRAM else 0.0 if _OF_TIMES.search(name) else lowest
        _refuse_forged(one, f"{place}{name}", depth - 1, within)
    if isinstance(value, (int, float)) and not (value == math.inf and place.endswith(_BOUNDS)):
        least = -_MAX_NUMBER if lowest is None else 0 if isinstance(value, int) else lowest
        if not least <= value <= _MAX_NUMBER:  # true for NaN
            raise ValueError(f"`{printable(json.dumps(value), 40)}` is out of range - at `{place}`")


def _inside(value: Any) -> dict[str, Any] | None:
    """Return what a part of a report consists of, by the end of its path; ``None`` for a number or text."""
    if dataclasses.is_dataclass(value):
        return {f".{field.name}": getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {f".{name}": one for name, one in value.items()}
    if hasattr(value, "_asdict"):
        return _inside(value._asdict())
    return {f"[{i}]": one for i, one in enumerate(value)} if isinstance(value, (list, tuple)) else None


def _use_series(data: dict[str, Any]) -> None:
    """Convert the timelines of schema version 1, which are lists of points."""
    match data:
        case {"gpus": [*gpus]}:
            for gpu in gpus:
                match gpu:
                    case {"timelines": timelines}:
                        points = msgspec.convert(timelines, dict[str, list[tuple[float, float]]])
                        _refuse_forged(points)
                        gpu["timelines"] = {name: dataclasses.asdict(series_of(points[name])) for name in points}


def _use_infinity(data: dict[str, Any]) -> None:
    """Put infinity back where :func:`to_json` writes ``null`` for it, and leave out evidence that was not a number."""
    match data:
        case {"diagnosis": {"findings": [*findings]}}:
            for finding in findings:
                match finding:
                    case {"evidence": {**evidence}}:
                        finding |= {name[1:]: math.inf for name in _BOUNDS if finding.get(name[1:], 0) is None}
                        finding["evidence"] = {name: one for name, one in evidence.items() if one is not None}
