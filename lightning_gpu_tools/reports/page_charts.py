"""The Bokeh charts of a report's page, each with a label and values for screen readers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from bokeh.models import ColumnDataSource, FixedTicker, HoverTool, LinearColorMapper, Range1d
from bokeh.palettes import Cividis256
from bokeh.plotting import figure

from lightning_gpu_tools.advice.memory_account import MemoryAccount
from lightning_gpu_tools.gpus.metrics import GpuSummary
from lightning_gpu_tools.reports import charts
from lightning_gpu_tools.reports.markup import escaped, folded, table
from lightning_gpu_tools.reports.report import Report
from lightning_gpu_tools.reports.text import gpu_label, phase_groups

# Okabe and Ito's colors, distinguishable with every common color blindness; the lines also differ in dashes.
_LINE_STYLES = (("#000000", "solid"), ("#D55E00", "dashed"), ("#0072B2", "dotdash"), ("#CC79A7", "dotted"))
# A table shows a chart's values as means over this many parts of the run.
_PARTS = 10
# Our default for the points of one metric, over all selectable GPUs: 300 kB.
_MAX_POINTS = 16_000
_ROW_PIXELS, _ROWS_PIXELS = 26, 900  # height of one row, and at most of all rows


class Charts:
    """The charts of one run as HTML, with marks in place of the plots; names in it begin with ``prefix``.

    The charts of ``other``, shown next to it, have the same time axis and the same order of phases.
    """

    def __init__(self, report: Report, prefix: str, other: Report | None = None) -> None:
        self.plots: dict[str, Any] = {}  # by mark
        self._report = report
        self._prefix = prefix
        runs = [report] if other is None else [report, other]
        longest_s = max(1e-9, *(run.wall_s for run in runs))
        self._unit = charts.time_unit(longest_s)
        self._length = max(report.wall_s, 1e-9) / self._unit.seconds
        self._time = f", at $x{{0.00}} {self._unit.name}"  # of a tooltip
        # Shared, so that all charts show the same part of the run.
        self._range = Range1d(start=0, end=longest_s / self._unit.seconds)
        phases = dict.fromkeys(phase for run in runs for phase in run.phase_s)
        together = {phase: sum(run.phase_s.get(phase, 0.0) for run in runs) for phase in phases}
        self._bands = charts.phase_bands(report, phase_groups(together))
        self._edges = np.array(charts.span_edges_s(report), np.float32) / self._unit.seconds
        steps = {"x": self._edges, "zero": np.zeros_like(self._edges)}
        for number, band in enumerate(self._bands):
            steps[f"top{number}"] = np.array([*band.top, *band.top[-1:]], np.float32)  # from each edge on
        self._phases = ColumnDataSource(steps)

    def phases(self) -> str:
        """Return a chart of the time by phase."""
        plot = self._plot("time (%)", 260, y_range=(0, 100))
        self._draw_phases(plot)
        shares = {
            f"share{number}": np.subtract(band.top, band.bottom, dtype=np.float32)
            for number, band in enumerate(self._bands)
        }
        spans = ColumnDataSource({"left": self._edges[:-1], "right": self._edges[1:], **shares})
        drawn = plot.quad("left", "right", 100, 0, source=spans, alpha=0)
        shown = [(number, band) for number, band in enumerate(self._bands) if band.is_visible]
        tooltips = [(band.label, f"@share{number}{{0.0}} %") for number, band in reversed(shown)]
        tooltips.append((self._unit.name, "@left{0.00} to @right{0.00}"))
        plot.add_tools(HoverTool(renderers=[drawn], tooltips=tooltips, visible=False))
        legend = _legend([(band.color, f"{band.label} {band.amount}") for _, band in shown])
        return self._figure("phases", plot, "Time by phase, over the run", legend)

    def rows(self, metric: str, shown: Sequence[charts.Row]) -> str:
        """Return a chart with rows of colors."""
        parts = [strip for row in shown for strip in row.strips]
        pixels = min(_ROW_PIXELS * len(shown), _ROWS_PIXELS)
        plot = self._plot("", pixels + 70, y_range=(len(shown), 0))
        every = charts.label_every(len(shown), _ROWS_PIXELS / _ROW_PIXELS)
        plot.yaxis.ticker = FixedTicker(ticks=[place + 0.5 for place in range(0, len(shown), every)])
        plot.yaxis.major_label_overrides = {place + 0.5: row.label for place, row in enumerate(shown)}
        plot.grid.visible = False
        source = ColumnDataSource(
            {
                "image": [np.array([strip.percent], np.float32) for strip in parts],  # None becomes NaN
                "label": [strip.label for strip in parts],
                "y": [strip.place for strip in parts],
                "dh": [strip.height for strip in parts],
            }
        )
        colors = LinearColorMapper(palette=Cividis256, low=0, high=100, nan_color="#ffffff")
        drawn = plot.image("image", 0, "y", self._length, "dh", source=source, color_mapper=colors)
        plot.add_tools(HoverTool(renderers=[drawn], tooltips="@label: @image{0} %" + self._time, visible=False))
        values = self._table_of_parts("In percent", [(strip.label, _in_parts(strip.percent)) for strip in parts])
        return self._figure(f"rows of {metric}", plot, charts.rows_title(shown, metric), _SCALE, values)

    def lines(self, metric: str, gpus: Sequence[GpuSummary], *, chosen: bool = False) -> str:
        """Return a chart with a line for each of at most four GPUs, or for the chosen one."""
        label, divisor, height = charts.LINES[metric]
        is_percent = metric == "utilization_percent"
        plot = self._plot(label, height, **({"y_range": (0, 103)} if is_percent else {}))
        if is_percent:
            self._draw_phases(plot, alpha=0.2)
        plot.y_range.start = 0
        for (color, dashes), gpu in zip(_LINE_STYLES, gpus, strict=False):
            begin, step, values = self._values(gpu, metric)
            x = begin + (np.arange(len(values)) + 0.5) * step
            source = ColumnDataSource({"x": x.astype(np.float32), "y": np.array(values, np.float32)})
            source.name = f"{self._prefix}-{metric}"
            line: Any = {"color": color, "line_dash": dashes, "line_width": 1.5, "name": gpu_label(gpu)}
            drawn = plot.line("x", "y", source=source, **line)
            self._add_tooltips(plot, drawn, ("" if chosen else "$name: ") + "@y{0.0}")
        title = f"{label}, over the run"
        if chosen:
            return self._figure(metric, plot, title)
        edges_s = [self._report.wall_s * part / _PARTS for part in range(_PARTS + 1)]
        means = [
            (gpu_label(gpu), [None if one is None else one / divisor for one in gpu.timelines[metric].means(edges_s)])
            for gpu in gpus
        ]
        styles = zip(_LINE_STYLES, gpus, strict=False)
        legend = [(color, f"{gpu_label(gpu)}, {dashes}") for (color, dashes), gpu in styles] if len(gpus) > 1 else []
        return self._figure(metric, plot, title, _legend(legend), self._table_of_parts(label, means))

    def choice(self, gpus: Sequence[GpuSummary]) -> str:
        """Return a selector of the GPU to show as lines, with the values of each GPU."""
        max_points = max(100, _MAX_POINTS // len(gpus))
        series = []
        for gpu in gpus:
            lines = {f"{self._prefix}-{metric}": self._values(gpu, metric, max_points) for metric in charts.LINES}
            series.append(lines)
        name = f"{self._prefix}-gpu"
        options = "".join(f'<option value="{place}">{gpu_label(gpu)}</option>' for place, gpu in enumerate(gpus))
        data = json.dumps(series, separators=(",", ":")).replace("<", "\\u003c")
        return (
            f'<p><label for="{name}">Lines of </label><select id="{name}" autocomplete="off">{options}</select></p>'
            f'<script type="application/json" data-of="{name}">{data}</script>'
        )

    def torch_memory(self, account: MemoryAccount) -> str:
        """Return a chart of torch's use of a GPU's memory."""
        plot = self._plot(charts.LINES["memory_used_bytes"].label, 240)
        x = np.array([point.time_s / self._unit.seconds for point in account.timeline], np.float32)
        bands = charts.torch_bands(account)
        for band in bands:
            bottom, top = (np.array(side, np.float32) for side in (band.bottom, band.top))
            plot.varea(x, bottom, top, color=band.color, alpha=0.8)
            drawn = plot.line(x, top, color=band.color, name=band.label)
            self._add_tooltips(plot, drawn, "$name up to @y{0.0} GiB")
        title = f"Memory of torch on GPU {account.index}, over the run"
        return self._figure("torch", plot, title, _legend([(band.color, band.label) for band in bands]))

    def _plot(self, label: str, height: int, **options: Any) -> Any:
        plot: Any = figure(
            x_range=self._range,
            **options,
            height=height,
            sizing_mode="stretch_width",
            x_axis_label=f"time since training started ({self._unit.name})",
            y_axis_label=label,
            tools="xbox_zoom,xpan,xwheel_zoom,reset,save",
            active_drag="xbox_zoom",
            min_border_left=90,  # aligns charts with long and short labels
            min_border_right=10,
        )
        plot.toolbar.logo = None
        return plot

    def _draw_phases(self, plot: Any, alpha: float = 1.0) -> None:
        bottom = "zero"
        for number, band in enumerate(self._bands):
            top = f"top{number}"
            plot.varea_step("x", bottom, top, source=self._phases, step_mode="after", color=band.color, alpha=alpha)
            bottom = top

    def _add_tooltips(self, plot: Any, line: Any, text: str) -> None:
        plot.add_tools(HoverTool(renderers=[line], tooltips=text + self._time, mode="vline", visible=False))

    def _figure(self, name: str, plot: Any, title: str, legend: str = "", values: str = "") -> str:
        mark = f"<!-- {self._prefix} {name} -->"
        self.plots[mark] = plot
        label = f"Chart: {title}. Its values are in tables."
        return (
            f"<figure><figcaption>{escaped(title)}</figcaption>{legend}"
            f'<div role="img" aria-label="{escaped(label)}">{mark}</div>{values}</figure>'
        )

    def _values(
        self, gpu: GpuSummary, metric: str, max_points: int | None = None
    ) -> tuple[float, float, list[float | None]]:
        """Return the start of a line on the axis, the distance between its points, and their values."""
        series = gpu.timelines.get(metric)
        if series is None:
            return 0.0, 1.0, []
        series = series if max_points is None else series.at_most(max_points)
        values = [None if value is None else round(value / charts.LINES[metric].divisor, 2) for value in series.values]
        return series.begin_s / self._unit.seconds, series.interval_s / self._unit.seconds, values

    def _table_of_parts(self, what: str, lines: Sequence[tuple[str, Sequence[float | None]]]) -> str:
        head = [f"from {self._length * part / _PARTS:.3g}" for part in range(_PARTS)]
        cells = [(name, *("" if value is None else f"{value:.1f}" for value in means)) for name, means in lines]
        return folded(
            "Values as a table", table(f"{what}: means over parts of the run ({self._unit.name})", ("", *head), cells)
        )


def _in_parts(percent: Sequence[float | None]) -> list[float | None]:
    columns = len(percent) // _PARTS
    return [charts.mean(percent[part * columns : (part + 1) * columns]) for part in range(_PARTS)]


def _legend(colors: Sequence[tuple[str, str]]) -> str:
    entries = (
        f'<li><span class="chip" style="background:{color}"></span> {escaped(label)}</li>' for color, label in colors
    )
    return f'<ul class="legend">{"".join(entries)}</ul>' if colors else ""


_SCALE = (
    '<p>0 % <span class="scale" style="background:linear-gradient(90deg,'
    f'{",".join(Cividis256[::32])},{Cividis256[-1]})"></span> 100 %; white: not reported</p>'
)
