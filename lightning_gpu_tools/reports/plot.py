"""The report of a training run as a picture (needs the ``plot`` extra)."""

from __future__ import annotations

import io
import os
import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from matplotlib import style
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from lightning_gpu_tools.advice.findings import label_of
from lightning_gpu_tools.files import replacing
from lightning_gpu_tools.gpus.metrics import GpuSummary
from lightning_gpu_tools.gpus.timeline import Series
from lightning_gpu_tools.reports.report import PLOT_NAME, Report
from lightning_gpu_tools.reports.text import gpu_label, phase_groups, verdict_label
from lightning_gpu_tools.training.phases import PHASES
from lightning_gpu_tools.units import format_bytes, format_duration, printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Lines differ in dashes as well as in shade, so that they are distinguishable in print. More lines hide each other.
_LINE_STYLES = (("#000000", "-"), ("#000000", ":"), ("#777777", "-"), ("#777777", "--"))
_MAX_POINTS = 300  # our default: of a line 1,000 pixels long
_MIN_VISIBLE = 0.01  # of the time between two points: a pixel of the panel's height
_UNKNOWN_COLOR = "#BBBBBB"  # of a phase; a file may have unknown ones
_FAR = 3.0  # times the memory in use: a total beyond that is not drawn, because it would flatten the lines
_LINE_OF_TEXT = 0.17  # height in inches
# Without the user's own style. Dollar signs in texts are not mathematics. Browsers have their own fonts.
_STYLE: list[Any] = ["default", {"text.parse_math": False, "svg.fonttype": "none", "svg.hashsalt": "gpu_report"}]
# Next to the data, never on it.
_LEGEND: dict[str, Any] = {
    "loc": "upper left",
    "bbox_to_anchor": (1.0, 1.0),
    "borderaxespad": 0.0,
    "fontsize": "small",
    "frameon": False,
}


class _Panel(NamedTuple):
    label: str
    divisor: float
    height: float  # in inches


_PANELS: Mapping[str, _Panel] = {
    "utilization_percent": _Panel("GPU busy (%)", 1.0, 2.6),
    "memory_used_bytes": _Panel("GPU memory in use (GiB)", 2.0**30, 2.2),
    "power_watts": _Panel("Power (W)", 1.0, 1.8),
}


class _TimeUnit(NamedTuple):
    name: str
    seconds: float


class _Line(NamedTuple):
    label: str
    timelines: Mapping[str, Series]


def save_plot(report: Report, folder: str | os.PathLike[str]) -> Path:
    """Draw the report into ``gpu_report.png`` completely or not at all, and return its path; an OSError propagates.

    Its panels show, from top to bottom, the wall time by phase, GPU utilization, memory, and power. They have a line
    for each of up to four GPUs, the least busy ones.
    """
    target = Path(folder) / PLOT_NAME
    with style.context(_STYLE), replacing(str(target)) as file:
        _draw(report, with_title=True).savefig(file, format="png", dpi=120)
    return target


def svg_of(report: Report) -> str:
    """Return the same picture as an SVG element, without the title."""
    file = io.StringIO()
    with style.context(_STYLE):
        metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        _draw(report, with_title=False).savefig(file, format="svg", dpi=120, metadata=metadata)
    text = file.getvalue()
    # Paths with at most two decimals, which halves the size.
    return re.sub(r' d="[^"]+"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), text[text.index("<svg") :])


def _draw(report: Report, *, with_title: bool) -> Figure:
    lines = _lines(report)
    bands = [band for band in _phase_bands(report) if band.is_visible]
    metrics = [metric for metric in _PANELS if any(metric in line.timelines for line in lines)]
    heights = [max(1.4, _LINE_OF_TEXT * len(bands)), *(_PANELS[metric].height for metric in metrics)]
    figure = Figure(figsize=(12, 1.1 + sum(heights) + 0.25 * len(heights)), layout="constrained")
    axes: list[Axes] = list(figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False, sharex=True)[:, 0])
    if with_title:
        title = textwrap.fill(f"{verdict_label(report.diagnosis)}: {printable(report.diagnosis.why, 1000)}", 120)
        figure.suptitle(title, x=0.01, ha="left", weight="bold", fontsize="medium")
    _draw_where_time_went(axes[0], report)
    for axis, metric in zip(axes[1:], metrics, strict=True):
        _draw_lines(axis, report, metric, [line for line in lines if metric in line.timelines])
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    unit = _time_unit(report.wall_s)
    axes[-1].set_xlabel(f"time since training started ({unit.name})")
    axes[-1].set_xlim(0, max(report.wall_s, 1e-9) / unit.seconds)
    return figure


def _time_unit(wall_s: float) -> _TimeUnit:
    """Return the largest unit of which a run lasts at least three."""
    units = (_TimeUnit("days", 86_400.0), _TimeUnit("hours", 3600.0), _TimeUnit("minutes", 60.0))
    return next((unit for unit in units if wall_s >= 3 * unit.seconds), _TimeUnit("seconds", 1.0))


def _lines(report: Report) -> list[_Line]:
    """Return a line for each GPU with timelines, or for those that are least busy."""
    gpus = [gpu for gpu in report.gpus if gpu.timelines]
    if len(gpus) > len(_LINE_STYLES):
        gpus = sorted(gpus, key=lambda gpu: gpu.utilization_percent_mean or 0.0)[: len(_LINE_STYLES)]
    return [_Line(gpu_label(gpu), gpu.timelines) for gpu in gpus]


class _Band(NamedTuple):
    label: str
    color: str
    top: list[float]  # in percent of each of the report's spans
    is_visible: bool


def _phase_bands(report: Report) -> list[_Band]:
    """Return the groups of phases from bottom to top, in the order of the report's tree."""
    bands = []
    top = [0.0] * len(report.spans)
    for group, parts in phase_groups(report.phase_s).items():
        shares = [span.phase_s.get(group, 0.0) / max(span.end_s - span.begin_s, 1e-9) for span in report.spans]
        top = [min(low + 100 * share, 100.0) for low, share in zip(top, shares, strict=True)]
        whole = sum(parts.values()) / max(report.wall_s, 1e-9)
        amount = f"{100 * whole:.0f}%" if whole >= 0.005 else "< 1%"
        color = PHASES[group].color if group in PHASES else _UNKNOWN_COLOR
        label = f"{label_of(group, report.activity)} {amount}"
        bands.append(_Band(label, color, top, max([whole, *shares]) >= _MIN_VISIBLE))
    return bands


def _draw_where_time_went(axis: Axes, report: Report) -> None:
    _draw_phases(axis, report)
    handles = [Patch(color=band.color, label=band.label) for band in _phase_bands(report) if band.is_visible]
    axis.legend(handles=handles[::-1], **_LEGEND)  # in the order of the stack
    axis.set_ylabel("time (%)")
    axis.set_title(f"Where the {format_duration(report.wall_s)} went", loc="left", fontsize="medium")


def _draw_phases(axis: Axes, report: Report, alpha: float = 1.0) -> None:
    unit = _time_unit(report.wall_s)
    edges = [span.begin_s / unit.seconds for span in report.spans]
    edges += [span.end_s / unit.seconds for span in report.spans[-1:]]
    bottom = [0.0] * len(edges)
    for band in _phase_bands(report):
        top = [*band.top, *band.top[-1:]]
        # As an image in the SVG: hundreds of spans would be a megabyte of paths.
        drawn: dict[str, Any] = {"color": band.color, "alpha": alpha, "linewidth": 0, "rasterized": True}
        axis.fill_between(edges, bottom, top, step="post", **drawn)
        bottom = top
    axis.set_ylim(0, 100)


def _draw_lines(axis: Axes, report: Report, metric: str, lines: Sequence[_Line]) -> None:
    unit = _time_unit(report.wall_s)
    label, divisor, _ = _PANELS[metric]
    if metric == "utilization_percent":
        _draw_phases(axis, report, alpha=0.2)
    for (color, dashes), line in zip(_LINE_STYLES, lines, strict=False):
        points = line.timelines[metric].at_most(_MAX_POINTS).points()
        x = [time_s / unit.seconds for time_s, _ in points]
        y = [value / divisor for _, value in points]
        axis.plot(x, y, label=line.label, color=color, linestyle=dashes, linewidth=1.2)
    if metric == "memory_used_bytes":
        _draw_totals(axis, report.gpus, divisor)
    axis.set_ylim(0, 103 if metric == "utilization_percent" else None)
    axis.set_ylabel(label)
    axis.grid(alpha=0.25)
    axis.legend(**_LEGEND)


def _draw_totals(axis: Axes, gpus: Sequence[GpuSummary], divisor: float) -> None:
    highest = axis.dataLim.ymax
    for total in {gpu.memory_total_bytes for gpu in gpus if gpu.timelines and gpu.memory_total_bytes}:
        whole = f"total, {format_bytes(total)}"
        if total / divisor <= _FAR * highest:
            axis.axhline(total / divisor, color="#D55E00", linewidth=1, linestyle="--", label=whole)
