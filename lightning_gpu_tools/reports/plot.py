"""The report of a training run as a picture (needs the ``plot`` extra)."""

from __future__ import annotations

import io
import re
import textwrap
from typing import TYPE_CHECKING, Any

from matplotlib import style
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from lightning_gpu_tools.advice.findings import label_of
from lightning_gpu_tools.reports.report import Report
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


# The panels below the time: label, divisor of the values, height in inches.
_PANELS = {
    "utilization_percent": ("GPU busy (%)", 1.0, 2.6),
    "memory_used_bytes": ("GPU memory in use (GiB)", 2.0**30, 2.2),
    "power_watts": ("Power (W)", 1.0, 1.8),
}
# The time axis has the largest of these of which the run lasts at least three.
_UNITS_S = {"days": 86_400.0, "hours": 3600.0, "minutes": 60.0, "seconds": 0.0}


def png_of(report: Report) -> bytes:
    """Return the report as a picture.

    Its panels show, from top to bottom, the wall time by phase, GPU utilization, memory, and power. They have a line
    for each of up to four GPUs, the least busy ones.
    """
    file = io.BytesIO()
    with style.context(_STYLE):
        _draw(report, with_title=True).savefig(file, format="png", dpi=120)
    return file.getvalue()


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
    gpus = [gpu for gpu in report.gpus if gpu.timelines]
    if len(gpus) > len(_LINE_STYLES):
        gpus = sorted(gpus, key=lambda gpu: gpu.utilization_percent_mean or 0.0)[: len(_LINE_STYLES)]
    unit = next(name for name, seconds in _UNITS_S.items() if report.wall_s >= 3 * seconds)
    unit_s = _UNITS_S[unit] or 1.0
    legend = _legend(report)
    metrics = [metric for metric in _PANELS if any(metric in gpu.timelines for gpu in gpus)]
    heights = [max(1.4, _LINE_OF_TEXT * len(legend)), *(_PANELS[metric][2] for metric in metrics)]
    figure = Figure(figsize=(12, 1.1 + sum(heights) + 0.25 * len(heights)), layout="constrained")
    axes: list[Axes] = list(figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False, sharex=True)[:, 0])
    if with_title:
        title = textwrap.fill(f"{verdict_label(report.diagnosis)}: {printable(report.diagnosis.why, 1000)}", 120)
        figure.suptitle(title, x=0.01, ha="left", weight="bold", fontsize="medium")
    _draw_phases(axes[0], report, unit_s)
    axes[0].legend(handles=legend[::-1], **_LEGEND)  # in the order of the stack
    axes[0].set_ylabel("time (%)")
    axes[0].set_title(f"Where the {format_duration(report.wall_s)} went", loc="left", fontsize="medium")
    for axis, metric in zip(axes[1:], metrics, strict=True):
        label, divisor, _ = _PANELS[metric]
        if metric == "utilization_percent":
            _draw_phases(axis, report, unit_s, alpha=0.2)
        with_metric = [gpu for gpu in gpus if metric in gpu.timelines]
        for (color, dashes), gpu in zip(_LINE_STYLES, with_metric, strict=False):
            points = gpu.timelines[metric].at_most(_MAX_POINTS).points()
            x = [time_s / unit_s for time_s, _ in points]
            y = [value / divisor for _, value in points]
            axis.plot(x, y, label=gpu_label(gpu), color=color, linestyle=dashes, linewidth=1.2)
        if metric == "memory_used_bytes":
            highest = axis.dataLim.ymax
            for total in {gpu.memory_total_bytes for gpu in report.gpus if gpu.timelines}:
                if total and total / divisor <= _FAR * highest:
                    whole = f"total, {format_bytes(total)}"
                    axis.axhline(total / divisor, color="#D55E00", linewidth=1, linestyle="--", label=whole)
        axis.set_ylim(0, 103 if metric == "utilization_percent" else None)
        axis.set_ylabel(label)
        axis.grid(alpha=0.25)
        axis.legend(**_LEGEND)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel(f"time since training started ({unit})")
    axes[-1].set_xlim(0, max(report.wall_s, 1e-9) / unit_s)
    return figure


def _shares(report: Report, group: str) -> list[float]:
    """Return the share of a group of phases in each of the report's spans."""
    return [span.phase_s.get(group, 0.0) / max(span.end_s - span.begin_s, 1e-9) for span in report.spans]


def _color(group: str) -> str:
    return PHASES[group].color if group in PHASES else _UNKNOWN_COLOR


def _legend(report: Report) -> list[Patch]:
    """Return the groups of phases that are visible, from bottom to top, in the order of the report's tree."""
    handles = []
    for group, parts in phase_groups(report.phase_s).items():
        whole = sum(parts.values()) / max(report.wall_s, 1e-9)
        if max([whole, *_shares(report, group)]) >= _MIN_VISIBLE:
            amount = f"{100 * whole:.0f}%" if whole >= 0.005 else "< 1%"
            handles.append(Patch(color=_color(group), label=f"{label_of(group, report.activity)} {amount}"))
    return handles


def _draw_phases(axis: Axes, report: Report, unit_s: float, alpha: float = 1.0) -> None:
    edges = [span.begin_s / unit_s for span in report.spans]
    edges += [span.end_s / unit_s for span in report.spans[-1:]]
    bottom = [0.0] * len(edges)
    for group in phase_groups(report.phase_s):
        shares = _shares(report, group)
        top = [min(low + 100 * share, 100.0) for low, share in zip(bottom, [*shares, *shares[-1:]], strict=True)]
        # As an image in the SVG: hundreds of spans would be a megabyte of paths.
        drawn: dict[str, Any] = {"color": _color(group), "alpha": alpha, "linewidth": 0, "rasterized": True}
        axis.fill_between(edges, bottom, top, step="post", **drawn)
        bottom = top
    axis.set_ylim(0, 100)
