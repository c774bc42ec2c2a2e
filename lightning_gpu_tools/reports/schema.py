"""A report as JSON, in the format of docs/report_schema.md."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Mapping
from typing import Any

import msgspec

from lightning_gpu_tools.errors import ReportError
from lightning_gpu_tools.reports.report import FILE_NAME, Report
from lightning_gpu_tools.units import printable, printable_path

SCHEMA_VERSION = 3
# NVML counts bytes in 64 bits. Sums and products of smaller numbers cannot overflow.
_MAX_NUMBER = 2**64


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
