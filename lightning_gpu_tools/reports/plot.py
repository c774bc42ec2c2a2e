"""The report of a training run as a picture (needs the ``plot`` extra)."""

from __future__ import annotations

import math
import os
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib import style
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from lightning_gpu_tools.files import replacing
from lightning_gpu_tools.gpus.metrics import GpuSummary
from lightning_gpu_tools.reports import charts
from lightning_gpu_tools.reports.report import PLOT_NAME, Report
from lightning_gpu_tools.reports.text import gpu_label, verdict_label
from lightning_gpu_tools.units import format_bytes, format_duration, printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Lines differ in dashes as well as in shade, so that they are distinguishable in print.
_LINE_STYLES = (("#000000", "-"), ("#000000", ":"), ("#777777", "-"), ("#777777", "--"))
_MAX_POINTS = 600  # of a line; with more, four lines hide each other
_FAR = 3.0  # times the memory in use: a total beyond that is only in the legend, because it would flatten the lines
# In inches: one row, at most all rows, a line of text.
_ROW, _ROWS, _TEXT = 0.28, 7.0, 0.17
# Distinguishable with every common color blindness, and equal steps look equal (Nunez, Anderton and Renslow, 2018).
_COLORS = "cividis"
# Without the user's own style. Dollar signs in texts are not mathematics.
_STYLE: list[Any] = ["default", {"text.parse_math": False}]
# Next to the data, never on it.
_LEGEND: dict[str, Any] = {
    "loc": "upper left",
    "bbox_to_anchor": (1.0, 1.0),
    "borderaxespad": 0.0,
    "fontsize": "small",
    "frameon": False,
}


def save_plot(report: Report, folder: str | os.PathLike[str]) -> Path:
    """Draw the report into ``gpu_report.png`` completely or not at all, and return its path; an OSError propagates.

    Its panels show, from top to bottom, the wall time by phase, GPU utilization, memory, and power. Up to four GPUs are
    drawn as lines, more as rows of colors.
    """
    target = Path(folder) / PLOT_NAME
    with style.context(_STYLE), replacing(str(target)) as file:
        _draw(report).savefig(file, format="png", dpi=120)
    return target


def _draw(report: Report) -> Figure:
    panels = list(_panels(report))
    heights = [height for height, *_ in panels]
    figure = Figure(figsize=(12, 1.1 + sum(heights) + 0.25 * len(heights)), layout="constrained")
    axes: list[Axes] = list(figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False, sharex=True)[:, 0])
    title = textwrap.fill(f"{verdict_label(report.diagnosis)}: {printable(report.diagnosis.why, 1000)}", 120)
    figure.suptitle(title, x=0.01, ha="left", weight="bold", fontsize="medium")
    for axis, (_, draw, *arguments) in zip(axes, panels, strict=True):
        draw(axis, report, *arguments)
        axis.spines[["top", "right"]].set_visible(False)
    unit = charts.time_unit(report.wall_s)
    axes[-1].set_xlabel(f"time since training started ({unit.name})")
    axes[-1].set_xlim(0, max(report.wall_s, 1e-9) / unit.seconds)
    return figure


def _panels(report: Report) -> Iterator[tuple[Any, ...]]:
    """Yield the panels from top to bottom: height in inches, drawing function, and its arguments."""
    labels = sum(band.is_visible for band in charts.phase_bands(report))
    yield max(1.4, _TEXT * labels), _draw_where_time_went
    gpus = [gpu for gpu in report.gpus if gpu.timelines]
    metrics = list(charts.LINES)
    if len(gpus) > charts.MAX_LINES:
        for metric in charts.ROW_METRICS:
            if shown := charts.rows(report, metric):
                yield min(_ROW * len(shown), _ROWS) + _TEXT, _draw_rows, metric, shown
        account = charts.torch_account(report)
        gpus = [gpu for gpu in gpus if account is not None and gpu.uuid == account.uuid]
        metrics = ["memory_used_bytes"]
    for metric in metrics:
        if drawn := [gpu for gpu in gpus if metric in gpu.timelines]:
            yield charts.LINES[metric].height / 100, _draw_lines, metric, drawn


def _draw_where_time_went(axis: Axes, report: Report) -> None:
    _draw_phases(axis, report)
    bands = [band for band in charts.phase_bands(report) if band.is_visible]
    handles = [Patch(color=band.color, label=f"{band.label} {band.amount}") for band in reversed(bands)]
    axis.legend(handles=handles, **_LEGEND)  # in the order of the stack
    axis.set_ylabel("time (%)")
    axis.set_title(f"Where the {format_duration(report.wall_s)} went", loc="left", fontsize="medium")


def _draw_phases(axis: Axes, report: Report, alpha: float = 1.0) -> None:
    unit = charts.time_unit(report.wall_s)
    edges = [edge_s / unit.seconds for edge_s in charts.span_edges_s(report)]
    for band in charts.phase_bands(report):
        bottom, top = ([*side, *side[-1:]] for side in (band.bottom, band.top))
        axis.fill_between(edges, bottom, top, step="post", color=band.color, alpha=alpha, linewidth=0)
    axis.set_ylim(0, 100)


def _draw_lines(axis: Axes, report: Report, metric: str, gpus: Sequence[GpuSummary]) -> None:
    unit = charts.time_unit(report.wall_s)
    label, divisor, _ = charts.LINES[metric]
    if metric == "utilization_percent":
        _draw_phases(axis, report, alpha=0.2)
    account = charts.torch_account(report)
    if metric == "memory_used_bytes" and account is not None:  # the driver's values are drawn over it
        times = [point.time_s / unit.seconds for point in account.timeline]
        for band in charts.torch_bands(account):
            axis.fill_between(times, band.bottom, band.top, color=band.color, alpha=0.6, linewidth=0, label=band.label)
        axis.set_title(f"Torch on GPU {account.index}", loc="left", fontsize="small")
    for (color, dashes), gpu in zip(_LINE_STYLES, gpus, strict=False):
        points = gpu.timelines[metric].at_most(_MAX_POINTS).points()
        x = [time_s / unit.seconds for time_s, _ in points]
        y = [value / divisor for _, value in points]
        axis.plot(x, y, label=gpu_label(gpu), color=color, linestyle=dashes, linewidth=1.2)
    if metric == "memory_used_bytes":
        highest = axis.dataLim.ymax
        for total in {gpu.memory_total_bytes for gpu in gpus if gpu.memory_total_bytes}:
            whole = f"total, {format_bytes(total)}"
            if total / divisor > _FAR * highest:
                axis.plot([], [], " ", label=whole)
            else:
                axis.axhline(total / divisor, color="#D55E00", linewidth=1, linestyle="--", label=whole)
    axis.set_ylim(0, 103 if metric == "utilization_percent" else None)
    axis.set_ylabel(label)
    axis.grid(alpha=0.25)
    axis.legend(**_LEGEND)


def _draw_rows(axis: Axes, report: Report, metric: str, shown: Sequence[charts.Row]) -> None:
    length = report.wall_s / charts.time_unit(report.wall_s).seconds
    parts = [strip for row in shown for strip in row.strips]
    columns = len(parts[0].percent)
    colors = axis.pcolormesh(
        [length * column / columns for column in range(columns + 1)],
        [*(part.place for part in parts), len(shown)],
        [[math.nan if value is None else value for value in part.percent] for part in parts],
        cmap=_COLORS,
        vmin=0,
        vmax=100,
    )
    if len(shown) <= charts.MAX_ROWS:
        axis.hlines(range(1, len(shown)), 0, length, color="white", linewidth=0.5)
    axis.set_ylim(len(shown), 0)  # the first one at the top
    every = charts.label_every(len(shown), _ROWS / _ROW)
    axis.set_yticks([place + 0.5 for place in range(0, len(shown), every)], [row.label for row in shown[::every]])
    axis.tick_params(axis="y", labelsize="small", length=0)
    axis.set_title(charts.rows_title(shown, metric), loc="left", fontsize="medium")
    axis.figure.colorbar(colors, cax=axis.inset_axes((1.01, 0.0, 0.012, 1.0)), label="%")
