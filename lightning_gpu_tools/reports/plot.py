"""The report of a training run as a picture (needs the extra ``plot``)."""

from __future__ import annotations

import functools
import math
import os
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from matplotlib import style
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from lightning_gpu_tools.checkpoints.atomic_file import replacing
from lightning_gpu_tools.gpus.metrics import GpuSummary
from lightning_gpu_tools.reports.charts import (
    MAX_LINES,
    MAX_ROWS,
    ROW_METRICS,
    Row,
    RowMetric,
    gpu_label,
    label_every,
    phase_bands,
    rows,
    rows_title,
    span_edges_s,
    strips,
    time_unit,
    torch_account,
    torch_bands,
)
from lightning_gpu_tools.reports.report import PLOT_NAME, Report
from lightning_gpu_tools.units import format_bytes, format_duration, printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    Panel = tuple[float, Callable[[Axes], None]]  # its height in inches, and what draws it

# Lines of GPUs differ in dashes as well as in shade, so that they can be told apart in print.
_LINES = (("#000000", "-"), ("#000000", ":"), ("#777777", "-"), ("#777777", "--"))


class _Lines(NamedTuple):
    """A panel of lines."""

    timeline: str
    label: str
    divisor: float
    height: float  # in inches


_UTILIZATION = _Lines("utilization_percent", "GPU busy (%)", 1.0, 2.8)
_MEMORY = _Lines("memory_used_bytes", "memory (GiB)", 2.0**30, 2.1)
_POWER = _Lines("power_watts", "power (W)", 1.0, 1.4)
_MAX_POINTS = 600  # of a line; with more, four of them hide each other
# Of a panel of rows, in inches: at most this much each and together, and room for a line of text.
_ROW, _ROWS, _TEXT = 0.28, 7.0, 0.17
# Distinguishable with every common color blindness, and equal steps look equal (Nunez, Anderton and Renslow, 2018).
_COLORS = "cividis"
# Whatever the user's own style is. Text may hold dollar signs, which are not meant as mathematics.
_STYLE: list[Any] = ["default", {"text.parse_math": False}]
# Beside the data, never on it.
_LEGEND: dict[str, Any] = {
    "loc": "upper left",
    "bbox_to_anchor": (1.0, 1.0),
    "borderaxespad": 0.0,
    "fontsize": "small",
    "frameon": False,
}


def save_plot(report: Report, folder: str | os.PathLike[str]) -> Path:
    """Draw the report into ``gpu_report.png`` in ``folder``, completely or not at all, and return its path.

    From top to bottom: the phases of the wall time; how busy the GPUs were; memory. Up to four GPUs are lines, with
    their power; more are a row each, whose color says how busy; of more than 32, each node is a row, with the GPU of it
    that stands out below. What was not reported is left out.

    Raises:
        OSError: The folder is not writable.
    """
    target = Path(folder) / PLOT_NAME
    with style.context(_STYLE), replacing(str(target)) as file:
        _draw(report).savefig(file, format="png", dpi=120)
    return target


def _draw(report: Report) -> Figure:
    panels = _panels(report)
    heights = [height for height, _ in panels]
    figure = Figure(figsize=(12, 1.1 + sum(heights) + 0.25 * len(heights)), layout="constrained")
    axes: list[Axes] = list(figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False, sharex=True)[:, 0])
    verdict = report.diagnosis.verdict.replace("_", " ").upper()
    title = textwrap.fill(f"{verdict}: {printable(report.diagnosis.why, 1000)}", 120)
    figure.suptitle(title, x=0.01, ha="left", weight="bold", fontsize="medium")
    for axis, (_, draw) in zip(axes, panels, strict=True):
        draw(axis)
        axis.spines[["top", "right"]].set_visible(False)
    unit = time_unit(report.wall_s)
    axes[-1].set_xlabel(f"time since training started ({unit.name})")
    axes[-1].set_xlim(0, max(report.wall_s, 1e-9) / unit.seconds)
    return figure


def _panels(report: Report) -> list[Panel]:
    """Return the panels from top to bottom."""
    named = sum(band.is_visible for band in phase_bands(report))
    panels: list[Panel] = [(max(1.4, _TEXT * named), functools.partial(_draw_where_time_went, report=report))]
    gpus = [gpu for gpu in report.gpus if gpu.timelines]
    lines: Sequence[_Lines] = (_UTILIZATION, _MEMORY, _POWER)
    if len(gpus) > MAX_LINES:
        for metric in ROW_METRICS:
            shown = rows(report, metric)
            draw = functools.partial(_draw_rows, report=report, metric=metric, shown=shown)
            panels += [(min(_ROW * len(shown), _ROWS) + _TEXT, draw)] if shown else []
        account = torch_account(report)
        gpus, lines = [gpu for gpu in gpus if account is not None and gpu.uuid == account.uuid], [_MEMORY]
    for panel in lines:
        drawn = [gpu for gpu in gpus if panel.timeline in gpu.timelines]
        draw = functools.partial(_draw_lines, report=report, gpus=drawn, panel=panel)
        panels += [(panel.height, draw)] if drawn else []
    return panels


def _draw_where_time_went(axis: Axes, report: Report) -> None:
    _draw_phases(axis, report)
    handles = [
        Patch(color=band.color, label=f"{band.label} {band.amount}") for band in phase_bands(report) if band.is_visible
    ]
    axis.legend(handles=handles[::-1], **_LEGEND)  # in the order of the stack
    axis.set_ylabel("time (%)")
    axis.set_title(f"Where the {format_duration(report.wall_s)} went", loc="left", fontsize="medium")


def _draw_phases(axis: Axes, report: Report, alpha: float = 1.0) -> None:
    """Stack, span by span, the share of the time that each phase took."""
    unit = time_unit(report.wall_s)
    edges = [edge_s / unit.seconds for edge_s in span_edges_s(report)]
    for band in phase_bands(report):
        bottom, top = ([*side, *side[-1:]] for side in (band.bottom, band.top))
        axis.fill_between(edges, bottom, top, step="post", color=band.color, alpha=alpha, linewidth=0)
    axis.set_ylim(0, 100)


def _draw_lines(axis: Axes, report: Report, gpus: Sequence[GpuSummary], panel: _Lines) -> None:
    unit = time_unit(report.wall_s)
    if panel is _UTILIZATION:
        _draw_phases(axis, report, alpha=0.2)
    account = torch_account(report)
    if panel is _MEMORY and account is not None:  # what the driver says is drawn over it
        times = [point.time_s / unit.seconds for point in account.timeline]
        for band in torch_bands(account):
            axis.fill_between(times, band.bottom, band.top, color=band.color, alpha=0.6, linewidth=0, label=band.label)
        axis.set_title(f"Torch on GPU {account.index}", loc="left", fontsize="small")
    for (color, dashes), gpu in zip(_LINES, gpus, strict=False):
        points = gpu.timelines[panel.timeline].at_most(_MAX_POINTS).points()
        axis.plot(
            [time_s / unit.seconds for time_s, _ in points],
            [value / panel.divisor for _, value in points],
            label=gpu_label(gpu),
            color=color,
            linestyle=dashes,
            linewidth=1.2,
        )
    for total in {gpu.memory_total_bytes for gpu in gpus if gpu.memory_total_bytes} if panel is _MEMORY else ():
        label = f"all of it, {format_bytes(total)}"
        axis.axhline(total / panel.divisor, color="#D55E00", linewidth=1, linestyle="--", label=label)
    axis.set_ylim(0, 103 if panel is _UTILIZATION else None)
    axis.set_ylabel(panel.label)
    axis.grid(alpha=0.25)
    axis.legend(**_LEGEND)


def _draw_rows(axis: Axes, report: Report, metric: RowMetric, shown: Sequence[Row]) -> None:
    """Draw a row of colors for each GPU, or for each node and below it the GPU that stands out."""
    columns = len(shown[0].percent)
    length = report.wall_s / time_unit(report.wall_s).seconds
    parts = strips(shown, metric)
    colors = axis.pcolormesh(
        [length * column / columns for column in range(columns + 1)],
        [*(part.place for part in parts), len(shown)],
        [[math.nan if value is None else value for value in part.percent] for part in parts],
        cmap=_COLORS,
        vmin=0,
        vmax=100,
    )
    if len(shown) <= MAX_ROWS:
        axis.hlines(range(1, len(shown)), 0, length, color="white", linewidth=0.5)
    axis.set_ylim(len(shown), 0)  # the first one at the top
    every = label_every(len(shown), _ROWS / _ROW)
    axis.set_yticks([place + 0.5 for place in range(0, len(shown), every)], [row.label for row in shown[::every]])
    axis.tick_params(axis="y", labelsize="small", length=0)
    axis.set_title(rows_title(shown, metric), loc="left", fontsize="medium")
    axis.figure.colorbar(colors, cax=axis.inset_axes((1.01, 0.0, 0.012, 1.0)), label="%")
