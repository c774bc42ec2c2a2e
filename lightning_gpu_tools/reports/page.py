"""The report of a training run as a page for a browser (needs the extra ``plot``)."""

from __future__ import annotations

import html
import json
import math
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import bokeh
import numpy as np
from bokeh.embed import components
from bokeh.models import ColumnDataSource, FixedTicker, HoverTool, LinearColorMapper, Range1d
from bokeh.palettes import Cividis256
from bokeh.plotting import figure

from lightning_gpu_tools.advice.memory_account import PARTS, MemoryAccount
from lightning_gpu_tools.checkpoints.atomic_file import replacing
from lightning_gpu_tools.gpus.metrics import GpuSummary
from lightning_gpu_tools.reports.charts import (
    LINES,
    MAX_LINES,
    ROW_METRICS,
    Row,
    label_every,
    mean,
    phase_bands,
    phase_color,
    rows,
    rows_title,
    span_edges_s,
    time_unit,
    torch_account,
    torch_bands,
)
from lightning_gpu_tools.reports.comparison import compare, confirm, render_comparison
from lightning_gpu_tools.reports.report import PAGE_NAME, Report
from lightning_gpu_tools.reports.text import (
    cause_phase,
    gpu_label,
    loader_line,
    measuring_lines,
    phase_groups,
    phase_label,
    run_header,
    run_line,
    stall_line,
    verdict_label,
)
from lightning_gpu_tools.units import format_bytes, format_duration, printable

_MAX_TEXT = 1000
_MAX_LINES = 40  # our default: a longer table is folded
_LONG = 24  # a text, which wraps, and not a number


class Bar(NamedTuple):
    """A cell with a bar."""

    share: float  # of the full length
    color: str


def escaped(text: object) -> str:
    """Return HTML that shows a text literally, in one line and at most 1,000 characters."""
    return html.escape(printable(text, _MAX_TEXT))


def element(name: str, text: object, css: str = "") -> str:
    """Return an element with this text and CSS class."""
    return f"<{name}{_class(css)}>{escaped(text)}</{name}>"


def folded(summary: str, content: str) -> str:
    """Return content that is shown when its summary is clicked."""
    return f"<details><summary>{escaped(summary)}</summary>{content}</details>"


def table(caption: str, head: Sequence[object], lines: Sequence[Sequence[object]], css: Sequence[str] = ()) -> str:
    """Return a table whose first column names its lines, each with its CSS class; nothing without lines."""
    if not lines:
        return ""
    columns = "".join(f'<th scope="col">{escaped(name)}</th>' for name in head)
    rows = "".join(
        f'<tr{_class(kind)}><th scope="row">{escaped(first)}</th>{"".join(map(_cell, rest))}</tr>'
        for (first, *rest), kind in zip(lines, css or [""] * len(lines), strict=True)
    )
    content = (
        f'<div class="wide" tabindex="0"><table><caption>{escaped(caption)}</caption><thead><tr>{columns}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )
    return folded(f"{caption} ({len(lines)} lines)", content) if len(lines) > _MAX_LINES else content


def _cell(value: object) -> str:
    if isinstance(value, Bar):
        style = f"width:{10 * min(max(value.share, 0.0), 1.0):.2f}rem;background:{value.color}"
        return f'<td class="text"><span class="bar" style="{style}"></span></td>'
    return element("td", value, "text" if isinstance(value, str) and len(value) > _LONG else "")


def _class(css: str) -> str:
    return f' class="{css}"' if css else ""


# Okabe and Ito's, distinguishable with every common color blindness; the lines differ in dashes, too.
_LINE_STYLES = (("#000000", "solid"), ("#D55E00", "dashed"), ("#0072B2", "dotdash"), ("#CC79A7", "dotted"))
# A chart's values are in a table, too, as means over this many parts of the run.
_PARTS = 10
# Our default for the points of a metric of all GPUs that can be chosen: 300 kB.
_MAX_POINTS = 16_000
_ROW_PIXELS, _ROWS_PIXELS = 26, 900  # of one row, and at most of all


class Charts:
    """The charts of one run as HTML, with marks in the places of the plots; the prefix is that of the run's names."""

    def __init__(self, report: Report, prefix: str) -> None:
        self.plots: dict[str, Any] = {}  # by mark
        self._report = report
        self._prefix = prefix
        self._unit = time_unit(report.wall_s)
        self._length = max(report.wall_s, 1e-9) / self._unit.seconds
        self._time = f", at $x{{0.00}} {self._unit.name}"  # of a tooltip
        # Shared, so that all charts show the same part of the run.
        self._range = Range1d(start=0, end=self._length)
        self._bands = phase_bands(report)
        self._edges = np.array(span_edges_s(report), np.float32) / self._unit.seconds
        steps = {"x": self._edges, "zero": np.zeros_like(self._edges)}
        for number, band in enumerate(self._bands):
            steps[f"top{number}"] = np.array([*band.top, *band.top[-1:]], np.float32)  # from each edge on
        self._phases = ColumnDataSource(steps)

    def phases(self) -> str:
        """Return what the time was spent on."""
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
        return self._figure("phases", plot, "What the time was spent on, over the run", legend)

    def rows(self, metric: str, shown: Sequence[Row]) -> str:
        """Return rows of colors."""
        parts = [strip for row in shown for strip in row.strips]
        pixels = min(_ROW_PIXELS * len(shown), _ROWS_PIXELS)
        plot = self._plot("", pixels + 70, y_range=(len(shown), 0))
        every = label_every(len(shown), _ROWS_PIXELS / _ROW_PIXELS)
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
        return self._figure(f"rows of {metric}", plot, rows_title(shown, metric), _SCALE, values)

    def lines(self, metric: str, gpus: Sequence[GpuSummary], *, chosen: bool = False) -> str:
        """Return a line for each of at most four GPUs, or of the one that was chosen."""
        label, divisor, height = LINES[metric]
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
        """Return what chooses the GPU whose lines are shown, with the values of each."""
        max_points = max(100, _MAX_POINTS // len(gpus))
        series = [
            {f"{self._prefix}-{metric}": self._values(gpu, metric, max_points) for metric in LINES} for gpu in gpus
        ]
        name = f"{self._prefix}-gpu"
        options = "".join(f'<option value="{place}">{gpu_label(gpu)}</option>' for place, gpu in enumerate(gpus))
        data = json.dumps(series, separators=(",", ":")).replace("<", "\\u003c")
        return (
            f'<p><label for="{name}">Lines of </label><select id="{name}" autocomplete="off">{options}</select></p>'
            f'<script type="application/json" data-of="{name}">{data}</script>'
        )

    def torch_memory(self, account: MemoryAccount) -> str:
        """Return what torch used the memory of a GPU for."""
        plot = self._plot(LINES["memory_used_bytes"].label, 240)
        x = np.array([point.time_s / self._unit.seconds for point in account.timeline], np.float32)
        bands = torch_bands(account)
        for band in bands:
            bottom, top = (np.array(side, np.float32) for side in (band.bottom, band.top))
            plot.varea(x, bottom, top, color=band.color, alpha=0.8)
            drawn = plot.line(x, top, color=band.color, name=band.label)
            self._add_tooltips(plot, drawn, "$name up to @y{0.0} GiB")
        title = f"What torch used the memory of GPU {account.index} for, over the run"
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
            min_border_left=90,  # so that charts with long and short labels begin below each other
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
        """Return where a line begins on the axis, the distance of its points, and their values."""
        series = gpu.timelines.get(metric)
        if series is None:
            return 0.0, 1.0, []
        series = series if max_points is None else series.at_most(max_points)
        values = [None if value is None else round(value / LINES[metric].divisor, 2) for value in series.values]
        return series.begin_s / self._unit.seconds, series.interval_s / self._unit.seconds, values

    def _table_of_parts(self, what: str, lines: Sequence[tuple[str, Sequence[float | None]]]) -> str:
        head = [f"from {self._length * part / _PARTS:.3g}" for part in range(_PARTS)]
        cells = [(name, *("" if value is None else f"{value:.1f}" for value in means)) for name, means in lines]
        return folded(
            "Values as a table", table(f"{what}: means over parts of the run ({self._unit.name})", ("", *head), cells)
        )


def _in_parts(percent: Sequence[float | None]) -> list[float | None]:
    columns = len(percent) // _PARTS
    return [mean(percent[part * columns : (part + 1) * columns]) for part in range(_PARTS)]


def _legend(colors: Sequence[tuple[str, str]]) -> str:
    entries = (
        f'<li><span class="chip" style="background:{color}"></span> {escaped(label)}</li>' for color, label in colors
    )
    return f'<ul class="legend">{"".join(entries)}</ul>' if colors else ""


_SCALE = (
    '<p>0 % <span class="scale" style="background:linear-gradient(90deg,'
    f'{",".join(Cividis256[::32])},{Cividis256[-1]})"></span> 100 %; white: not reported</p>'
)


_MAX_ACCOUNTS = 8  # of memory: those of the fullest GPUs


def save_page(report: Report, folder: str | os.PathLike[str]) -> Path:
    """Write ``gpu_report.html``, completely or not at all, and return its path; an OSError goes through."""
    target = Path(folder) / PAGE_NAME
    with replacing(str(target)) as file:
        file.write(render_page(report).encode())
    return target


def render_page(report: Report, against: Report | None = None, max_slowdown: float = 0.0) -> str:
    """Return the report, or two runs side by side, as one to two megabytes of HTML that needs no network."""
    charts = [Charts(report, "now")]
    articles = [_article(report, charts[0], "Now: " if against else "")]
    introduction = ""
    if against is not None:
        charts.insert(0, Charts(against, "before"))
        articles.insert(0, _article(against, charts[0], "Before: "))
        verdict, *details = render_comparison(compare(report, against, max_slowdown)).split("\n")
        confirmation = confirm(report, against)
        if confirmation is not None:
            details.append(f"Result of the change: {confirmation}")
        introduction = element("h1", verdict) + "".join(element("p", line) for line in details)
    content = f'{introduction}<main class="runs">{"".join(articles)}</main>'
    plots = {mark: plot for one in charts for mark, plot in one.plots.items()}
    script, places = components(plots) if plots else ("", {})
    for mark, place in places.items():
        content = content.replace(mark, place)
    library = Path(bokeh.__file__).parent / "server" / "static" / "js" / "bokeh.min.js"
    return _PAGE.format(
        title=escaped(f"GPU report of {report.settings.get('model') or 'a training'}"),
        style=_STYLE,
        library=library.read_text("utf-8") if plots else "",
        content=content,
        script=script,
        choice=_CHOICE,
    )


# Its own scripts and styles are all that it may use, so that nothing is loaded from anywhere.
_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'unsafe-inline'; \
style-src 'unsafe-inline'; img-src data: blob:">
<title>{title}</title>
<style>{style}</style>
<script>{library}</script>
</head>
<body>
{content}
{script}
<script>{choice}</script>
</body>
</html>
"""
_STYLE = """
:root { color-scheme: light; font: 15px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; }
body { margin: 0 auto; padding: 1rem 1.5rem; max-width: 90rem; }
.runs { display: grid; gap: 2.5rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 34rem), 1fr)); }
article { min-width: 0; }
h1, h2 { font-size: 1.5rem; }
h3 { margin: 2rem 0 .3rem; border-bottom: 1px solid #767676; }
p { margin: .3rem 0; max-width: 60rem; overflow-wrap: anywhere; }
figure { margin: 1.2rem 0; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
caption, th, td { padding: .15rem .8rem .15rem 0; text-align: right; white-space: nowrap; }
caption, th:first-child, td.text { text-align: left; }
thead th { border-bottom: 1px solid #767676; vertical-align: bottom; }
tbody th { font-weight: 400; }
td.text { white-space: normal; min-width: 10rem; overflow-wrap: anywhere; }
.part th { padding-left: 1.4rem; }
.next, .cause > *, caption, figcaption { font-weight: 600; }
.bar, .chip, .scale { display: inline-block; height: .8em; border: 1px solid #555; }
.chip { width: 1em; }
.scale { width: 10rem; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: .1rem 1.2rem; padding: 0; margin: .2rem 0; }
"""
# Shows the lines of the GPU that is chosen.
_CHOICE = """
for (const data of document.querySelectorAll("script[data-of]")) {
  const series = JSON.parse(data.textContent)
  const select = document.getElementById(data.dataset.of)
  select.addEventListener("change", () => {
    for (const [name, [begin, step, values]] of Object.entries(series[select.value])) {
      const points = {x: values.map((_, i) => begin + (i + 0.5) * step), y: values.map((value) => value ?? NaN)}
      for (const charts of Bokeh.documents) {
        const source = charts.get_model_by_name(name)
        if (source != null) source.data = points
      }
    }
  })
}
"""


def _article(report: Report, charts: Charts, title: str) -> str:
    diagnosis = report.diagnosis
    sections = {
        "Findings": _findings(report),
        f"Where the {format_duration(report.wall_s)} went": _time(report, charts),
        "GPUs": _gpus(report, charts),
        "GPU memory": _memory(report, charts),
        "Ranks": _ranks(report),
        "Notes": _notes(report),
        "Settings": _settings(report),
    }
    contents = {name: "".join(parts) for name, parts in sections.items()}
    return "".join(
        [
            "<article>",
            element("h2" if title else "h1", f"{title}{verdict_label(diagnosis)}"),
            element("p", run_header(report)),
            element("p", run_line(report)),
            element("p", f"Why: {diagnosis.why}"),
            element("p", f"Next: {diagnosis.next_step}", "next"),
            *([element("p", f"Result: {report.confirmation}")] if report.confirmation else []),
            *(f"<section>{element('h3', name)}{content}</section>" for name, content in contents.items() if content),
            "</article>",
        ]
    )


def _findings(report: Report) -> Iterable[str]:
    for finding in report.diagnosis.findings:
        gain = "" if math.isinf(finding.ceiling) else f"; at most {finding.ceiling:.2f}x as fast without it"
        share = f"{100 * finding.share:.0f} % of the time{gain}; " if finding.share else ""
        yield element("h4", finding.cause.replace("_", " "))
        yield element("p", f"{share}{finding.basis}.")
        yield element("p", finding.advice)
        values = finding.evidence.items()
        evidence = [(name, f"{value:.6g}" if isinstance(value, float) else value) for name, value in values]
        yield table("Evidence", ("what", "value"), evidence)


def _time(report: Report, charts: Charts) -> Iterable[str]:
    if report.spans:
        yield charts.phases()
    cause, wall_s = cause_phase(report), max(report.wall_s, 1e-9)
    lines, css = [], []
    for group, parts in phase_groups(report.phase_s).items():
        named = [(f"{group}/{name}", name, seconds) for name, seconds in parts.items() if name]
        for phase, label, seconds in [(group, phase_label(group), sum(parts.values())), *named]:
            share, per_step = seconds / wall_s, format_duration(seconds / max(1, report.steps))
            marked = f"{label} ◀ cause" if phase == cause else label
            bar = Bar(share, phase_color(group))
            lines.append((marked, format_duration(seconds), f"{100 * share:.1f} %", per_step, bar))
            css.append("cause" if phase == cause else "part" if phase != group else "")
    yield table("Where the time went", ("phase", "time", "share", "mean per step", ""), lines, css)


def _gpus(report: Report, charts: Charts) -> Iterable[str]:
    gpus = [gpu for gpu in report.gpus if gpu.timelines]
    is_chosen = len(gpus) > MAX_LINES
    if is_chosen:
        found = {metric: shown for metric in ROW_METRICS if (shown := rows(report, metric))}
        for metric, shown in found.items():
            yield charts.rows(metric, shown)
        gpus = [row.gpu for shown in list(found.values())[:1] for row in shown] or gpus
        yield charts.choice(gpus)
    for metric in LINES:
        if having := [gpu for gpu in gpus if metric in gpu.timelines]:
            yield charts.lines(metric, gpus[:1] if is_chosen else having, chosen=is_chosen)
    columns = {name: [show(gpu) for gpu in report.gpus] for name, show in _COLUMNS.items()}
    columns = {name: cells for name, cells in columns.items() if any(cells)}
    yield table("The GPUs over the whole run", [*columns], list(zip(*columns.values(), strict=True)))


def _number(value: float | None, unit: str, digits: int = 0) -> str:
    return "" if value is None else f"{value:,.{digits}f} {unit}"


def _size(size_bytes: int | None) -> str:
    return "" if size_bytes is None else format_bytes(size_bytes)


# Of the table of GPUs; an empty column is left out.
_COLUMNS: dict[str, Callable[[GpuSummary], str]] = {
    "GPU": gpu_label,
    "name": lambda gpu: gpu.name or gpu.uuid,
    "busy": lambda gpu: _number(gpu.utilization_percent_mean, "%"),
    "p5": lambda gpu: _number(gpu.utilization_percent_p5, "%"),
    "p95": lambda gpu: _number(gpu.utilization_percent_p95, "%"),
    "in validation": lambda gpu: _number(gpu.validation_utilization_percent_mean, "%"),
    "by other jobs": lambda gpu: _number(gpu.others_utilization_percent or None, "%"),
    "SMs active": lambda gpu: _number(gpu.sm_active_percent, "%"),
    "tensor cores": lambda gpu: _number(gpu.tensor_active_percent, "%"),
    "peak memory": lambda gpu: _size(gpu.memory_used_bytes_max),
    "of": lambda gpu: _size(gpu.memory_total_bytes),
    "of other jobs": lambda gpu: _size(gpu.others_memory_bytes_max or None),
    "power": lambda gpu: _number(gpu.power_watts_mean, "W"),
    "energy": lambda gpu: _number(None if gpu.energy_joules is None else gpu.energy_joules / 3.6e6, "kWh", 2),
    "hottest": lambda gpu: _number(gpu.temperature_celsius_max, "°C"),
    "throttled": lambda gpu: _number(gpu.throttled_percent, "%"),
    "errors": lambda gpu: ", ".join(gpu.errors),
}


def _memory(report: Report, charts: Charts) -> Iterable[str]:
    drawn = torch_account(report)
    if drawn is not None:
        yield charts.torch_memory(drawn)
    fullest = sorted(report.memory, key=_used, reverse=True)[:_MAX_ACCOUNTS]
    shown = sorted(fullest, key=lambda account: (account.node, account.index))
    names = dict.fromkeys([*PARTS, *(name for account in shown for name in account.parts_bytes)])
    lines = [
        (PARTS[name].label if name in PARTS else name, *(_size(account.parts_bytes.get(name)) for account in shown))
        for name in names
        if any(name in account.parts_bytes for account in shown)
    ]
    lines.append(("all of these", *map(format_bytes, map(_used, shown))))
    lines.append(("free", *(_size(account.free_bytes) for account in shown)))
    of = f", of the {len(shown)} fullest of {len(report.memory)} GPUs" if len(shown) < len(report.memory) else ""
    head = map(gpu_label, shown)
    yield table(f"What the memory was used for{of}", ("part", *head), lines) if shown else ""


def _used(account: MemoryAccount) -> int:
    return sum(account.parts_bytes.values())


def _ranks(report: Report) -> Iterable[str]:
    phases = dict.fromkeys(phase for rank in report.ranks for phase in rank.phase_s)
    lines = [
        (
            rank.rank,
            rank.node,
            format_duration(rank.own_step_s),
            *(format_duration(rank.phase_s[phase]) if phase in rank.phase_s else "" for phase in phases),
            "" if rank.wait_s is None else format_duration(rank.wait_s),
        )
        for rank in report.ranks
    ]
    yield table("A step of each rank", ("rank", "node", "own work", *phases, "waits for others"), lines)


def _notes(report: Report) -> Iterable[str]:
    notes = [*map(stall_line, report.stalls), report.gpu_note, *measuring_lines(report)]
    if report.loader is not None:
        notes.append(loader_line(report.loader))
    return [element("p", note) for note in notes if note]


def _settings(report: Report) -> Iterable[str]:
    known = {name: value for name, value in report.settings.items() if value is not None}
    lines = [(name, ", ".join(map(str, value)) if isinstance(value, list) else value) for name, value in known.items()]
    yield table("What the run was made with", ("setting", "value"), lines)
