"""The report of a training run: as data, as JSON on disk, as text for the terminal."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_gpu_tools.diagnosis import Diagnosis, Finding
from lightning_gpu_tools.errors import ReportError
from lightning_gpu_tools.quantities import format_bytes, format_duration

SCHEMA_VERSION = 1
FILE_NAME = "gpu_report.json"
PLOT_NAME = "gpu_report.png"
_WIDTH = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuSummary:
    """One GPU over a whole run. What the hardware does not report is ``None``.

    Attributes:
        index: Torch device index on the node; with ``devices="all"`` the index that ``nvidia-smi`` shows.
        uuid: The GPU.
        name: Product name.
        utilization_percent_mean: Time-weighted over every sample of the driver; the next two are percentiles of it.
        utilization_percent_p5: 5th percentile.
        utilization_percent_p95: 95th percentile.
        memory_used_bytes_max: Peak, everybody's use included.
        memory_total_bytes: Size of the memory.
        power_watts_mean: Mean power draw.
        energy_joules: Energy used during the run.
        temperature_celsius_max: Hottest moment.
        throttled_percent: Share of the time in which power or heat held the clocks down.
        timelines: Points (seconds since the start of training, value) of ``utilization_percent``,
            ``memory_used_bytes`` and ``power_watts``, at most 2000 of each.
    """

    index: int
    uuid: str
    name: str | None = None
    utilization_percent_mean: float | None = None
    utilization_percent_p5: float | None = None
    utilization_percent_p95: float | None = None
    memory_used_bytes_max: int | None = None
    memory_total_bytes: int | None = None
    power_watts_mean: float | None = None
    energy_joules: float | None = None
    temperature_celsius_max: float | None = None
    throttled_percent: float | None = None
    timelines: Mapping[str, Sequence[Sequence[float]]] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Everything worth knowing of one fit.

    Attributes:
        outcome: ``"completed"``, or for example ``"stopped by KeyError at step 812"``.
        started_at: ISO 8601, UTC.
        steps: Training steps.
        wall_s: Wall time of training; ``phase_s`` adds up to it.
        phase_s: Wall time by phase, see :mod:`lightning_gpu_tools.step_clock`.
        step_s_median: Median time from step to step, steady steps only; ``None`` if there were none.
        diagnosis: Verdict and findings.
        gpus: The GPUs watched.
        gpu_note: Why there are none, or what could not be read; ``None`` if all is well.
        settings: What two runs must have in common to be compared: accelerator, precision, batch size, loader, ...
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
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def to_json(report: Report) -> str:
    """Return the report as JSON text, one object with ``schema_version``. Numbers that JSON lacks become ``null``."""
    data = {"schema_version": SCHEMA_VERSION, **dataclasses.asdict(report)}
    return json.dumps(_finite(data), indent=1, ensure_ascii=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def from_json(text: str, source: str = "the text") -> Report:
    """Return the report that :func:`to_json` wrote.

    Args:
        text: The JSON text.
        source: Where it comes from; used in the error.

    Raises:
        ReportError: It is no report, or one of a newer version of this package.
    """
    try:
        data = json.loads(text)
        version = data.pop("schema_version")
        if version > SCHEMA_VERSION:
            raise ReportError(
                f"{source} was written by a newer version of lightning_gpu_tools (schema {version}, this one reads up "
                f"to {SCHEMA_VERSION}): upgrade the package to read it."
            )
        diagnosis = data.pop("diagnosis")
        findings = tuple(
            Finding(**{**finding, "ceiling": math.inf if finding["ceiling"] is None else finding["ceiling"]})
            for finding in diagnosis.pop("findings")
        )
        gpus = tuple(GpuSummary(**gpu) for gpu in data.pop("gpus"))
        return Report(diagnosis=Diagnosis(findings=findings, **diagnosis), gpus=gpus, **data)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ReportError(f"{source} is not a report of lightning_gpu_tools ({FILE_NAME}): {error}") from error


def load_report(path: str | os.PathLike[str]) -> Report:
    """Return the report in a file, or in the folder that holds a ``gpu_report.json``.

    Raises:
        ReportError: There is none, or it cannot be read.
    """
    file = Path(path)
    if file.is_dir():
        file = file / FILE_NAME
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ReportError(f"No report can be read from {str(file)!r}: {error}") from error
    return from_json(text, str(file))


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


def render_text(report: Report) -> str:
    """Return the report as lines of at most 100 columns: verdict, why, next; the GPUs; where the wall time went."""
    diagnosis = report.diagnosis
    lines = [
        _paragraph("Verdict", f"{_VERDICT[diagnosis.verdict]} ({_run_line(report)})"),
        _paragraph("Why", diagnosis.why),
        _paragraph("Next", diagnosis.next_step),
        "",
        *(_gpu_line(gpu) for gpu in report.gpus),
    ]
    if report.gpu_note:
        lines.append(textwrap.fill(report.gpu_note, _WIDTH))
    if report.wall_s > 0:
        lines += _time_tree(report)
    return "\n".join(lines)


_VERDICT = {
    "healthy": "HEALTHY",
    "low": "LOW",
    "too_short": "TOO SHORT TO JUDGE",
    "shared_gpu": "SHARED GPU",
    "unknown": "UNKNOWN",
}


def _paragraph(title: str, text: str) -> str:
    head = f"{title + ':':<9}"
    return textwrap.fill(text, _WIDTH, initial_indent=head, subsequent_indent=" " * len(head), break_on_hyphens=False)


def _run_line(report: Report) -> str:
    parts = [report.outcome, f"{report.steps} steps in {format_duration(report.wall_s)}"]
    if report.step_s_median:
        speed = f"{format_duration(report.step_s_median)} a step"
        batch_size = report.settings.get("batch_size")
        if batch_size:
            speed += f", {batch_size * report.settings.get('world_size', 1) / report.step_s_median:.4g} samples/s"
        parts.append(speed)
    return "; ".join(parts)


def _gpu_line(gpu: GpuSummary) -> str:
    parts = [f"GPU {gpu.index} {gpu.name or gpu.uuid}:"]
    if gpu.utilization_percent_mean is not None:
        parts.append(f"{gpu.utilization_percent_mean:.0f} % busy")
        if gpu.utilization_percent_p5 is not None and gpu.utilization_percent_p95 is not None:
            parts.append(f"(p5 {gpu.utilization_percent_p5:.0f}, p95 {gpu.utilization_percent_p95:.0f}),")
    else:
        parts.append("utilization not reported,")
    if gpu.memory_used_bytes_max is not None and gpu.memory_total_bytes is not None:
        parts.append(f"{format_bytes(gpu.memory_used_bytes_max)} of {format_bytes(gpu.memory_total_bytes)},")
    if gpu.power_watts_mean is not None:
        parts.append(f"{gpu.power_watts_mean:.0f} W,")
    if gpu.temperature_celsius_max is not None:
        parts.append(f"{gpu.temperature_celsius_max:.0f} C,")
    if gpu.throttled_percent:
        parts.append(f"throttled {gpu.throttled_percent:.0f} % of the time,")
    return textwrap.fill(" ".join(parts).rstrip(","), _WIDTH, subsequent_indent="  ", break_on_hyphens=False)


PHASE_LABELS = {
    "data_loading": "waiting for data",
    "host_to_device_copy": "handing the batch to the device",
    "training_step": "training step",
    "validation": "validation",
    "checkpoint": "writing checkpoints",
    "epoch_start": "starting epochs",
    "logging": "loggers",
    "callback": "callbacks",
    "monitoring": "this package",
    "trainer": "the Trainer's own work",
    "unexplained": "unexplained",
}


def phase_groups(phase_s: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Return the phases grouped by what stands before the slash, each group with its parts, biggest first.

    ``unexplained`` is always last.
    """
    groups: dict[str, dict[str, float]] = {}
    for phase, seconds in sorted(phase_s.items(), key=lambda item: -item[1]):
        group, _, name = phase.partition("/")
        groups.setdefault(group, {})[name] = seconds
    return dict(sorted(groups.items(), key=lambda item: (item[0] == "unexplained", -sum(item[1].values()))))


def _time_tree(report: Report) -> list[str]:
    causes = {finding.cause for finding in report.diagnosis.findings[:1]}
    unexplained = report.phase_s.get("unexplained", 0.0)
    explained = max(0.0, 1 - unexplained / report.wall_s)
    lines = [f"Where the {format_duration(report.wall_s)} went ({100 * explained:.0f} % explained)"]
    groups = phase_groups(report.phase_s)
    for i, (group, parts) in enumerate(groups.items()):
        last = i == len(groups) - 1
        mark = "  ◀ cause" if group in causes else ""
        label = PHASE_LABELS.get(group, group)
        lines.append(_branch("└─ " if last else "├─ ", label, sum(parts.values()), report) + mark)
        named = {name: seconds for name, seconds in parts.items() if name}
        for j, (name, seconds) in enumerate(named.items()):
            stem = ("   " if last else "│  ") + ("└─ " if j == len(named) - 1 else "├─ ")
            lines.append(_branch(stem, name, seconds, report))
    return lines


def _branch(stem: str, label: str, seconds: float, report: Report) -> str:
    width = 44 - len(stem)
    label = textwrap.shorten(label, width, placeholder="...")
    percent = 100 * seconds / report.wall_s
    per_step = format_duration(seconds / max(1, report.steps))
    return f"{stem}{label:<{width}}{format_duration(seconds):>10}{percent:>6.1f} %{per_step:>10} a step"
