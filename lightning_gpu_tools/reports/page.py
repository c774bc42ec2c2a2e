"""The report of a training run as an HTML page (needs the ``plot`` extra)."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from pathlib import Path

import bokeh
from bokeh.embed import components

from lightning_gpu_tools.advice.findings import gain
from lightning_gpu_tools.advice.memory_account import PARTS, MemoryAccount
from lightning_gpu_tools.files import replacing
from lightning_gpu_tools.reports.charts import (
    LINES,
    MAX_LINES,
    ROW_METRICS,
    phase_color,
    rows,
    torch_account,
)
from lightning_gpu_tools.reports.comparison import compare, confirm, details, headline, steady_phase_s
from lightning_gpu_tools.reports.gpu_table import COLUMNS
from lightning_gpu_tools.reports.markup import Bar, element, escaped, folded, table
from lightning_gpu_tools.reports.page_charts import Charts
from lightning_gpu_tools.reports.report import PAGE_NAME, Report
from lightning_gpu_tools.reports.text import (
    LINE_COLUMNS,
    cause_phase,
    gpu_label,
    line_label,
    line_rows,
    loader_line,
    measuring_lines,
    phase_groups,
    phase_label,
    run_line,
    stall_line,
    verdict_line,
)
from lightning_gpu_tools.units import format_bytes, format_duration

_MAX_ACCOUNTS = 8  # of memory, for the fullest GPUs


def save_page(report: Report, folder: str | os.PathLike[str]) -> Path:
    """Write ``gpu_report.html`` completely or not at all, and return its path; an OSError propagates."""
    target = Path(folder) / PAGE_NAME
    with replacing(str(target)) as file:
        file.write(render_page(report).encode())
    return target


def render_page(report: Report, against: Report | None = None, max_slowdown: float = 0.0) -> str:
    """Return the report, or two runs side by side, as self-contained HTML of one to two megabytes."""
    charts = [Charts(report, "now", against)]
    articles = [_article(report, charts[0], "Now: " if against else "")]
    introduction = ""
    if against is not None:
        charts.insert(0, Charts(against, "before", report))
        articles.insert(0, _article(against, charts[0], "Before: "))
        comparison = compare(report, against, max_slowdown)
        lines = details(comparison, confirm(report, against))
        introduction = element("h1", headline(comparison)) + "".join(element("p", line) for line in lines)
        introduction += _steps(report, against, comparison.of)
    content = f'{introduction}<main class="runs">{"".join(articles)}</main>'
    plots = {mark: plot for one in charts for mark, plot in one.plots.items()}
    script, places = components(plots) if plots else ("", {})
    for mark, place in places.items():
        content = content.replace(mark, place)
    library = Path(bokeh.__file__).parent / "server" / "static" / "js" / "bokeh.min.js"
    return _PAGE.format(
        title=escaped(f"GPU report of {report.settings.get('model') or 'a run'}"),
        style=_STYLE,
        library=library.read_text("utf-8") if plots else "",
        content=content,
        script=script,
        choice=_CHOICE,
    )


# The page may use only its own scripts and styles, so it loads nothing from the network.
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
# Shows the lines of the chosen GPU.
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
        f"Where the {format_duration(report.wall_s)} went": _time(report, charts),
        "Findings": _findings(report),
        "Source lines": _lines(report),
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
            element("h2" if title else "h1", f"{title}{verdict_line(report)}"),
            element("p", f"{report.outcome}; {run_line(report)}"),
            element("p", f"Why: {diagnosis.why}"),
            element("p", f"Next: {diagnosis.next_step}", "next"),
            *([element("p", f"Result: {report.confirmation}")] if report.confirmation else []),
            *(f"<section>{element('h3', name)}{content}</section>" for name, content in contents.items() if content),
            "</article>",
        ]
    )


def _steps(report: Report, against: Report, of: str) -> str:
    """Return a table of the time per step by phase, in two runs."""
    before, now = steady_phase_s(against, of), steady_phase_s(report, of)
    lines = []
    for group in sorted({*before, *now}, key=lambda one: -max(before.get(one, 0.0), now.get(one, 0.0))):
        old_s, new_s = before.get(group, 0.0), now.get(group, 0.0)
        change = f"{100 * (new_s / old_s - 1):+.0f} %" if old_s else ""
        lines.append((phase_label(group), format_duration(old_s), format_duration(new_s), change))
    return table(f"{of.capitalize()} time per step, after the first steps", ("phase", "before", "now", "change"), lines)


def _findings(report: Report) -> Iterable[str]:
    for finding in report.diagnosis.findings:
        share = f"{100 * finding.share:.0f} % of the time; " if finding.share else ""
        speedup = f" {gain(finding)}" if finding.share and not math.isinf(finding.ceiling) else ""
        yield element("h4", finding.cause.replace("_", " "))
        yield element("p", f"{share}{finding.basis}.{speedup}")
        yield element("p", finding.advice)
        values = finding.evidence.items()
        evidence = [(name, f"{value:.6g}" if isinstance(value, float) else value) for name, value in values]
        yield folded("Evidence", table("Measurements", ("name", "value"), evidence))


def _time(report: Report, charts: Charts) -> Iterable[str]:
    if report.spans:
        yield charts.phases()
    cause, wall_s = cause_phase(report), max(report.wall_s, 1e-9)
    lines, css = [], []
    for group, parts in phase_groups(report.phase_s).items():
        named = [(f"{group}/{name}", name, seconds) for name, seconds in parts.items() if name]
        for phase, label, seconds in [(group, phase_label(group, report.activity), sum(parts.values())), *named]:
            share, per_step = seconds / wall_s, format_duration(seconds / max(1, report.steps))
            marked = f"{label} ◀ cause" if phase == cause else label
            bar = Bar(share, phase_color(group))
            lines.append((marked, format_duration(seconds), f"{100 * share:.1f} %", per_step, bar))
            css.append("cause" if phase == cause else "part" if phase != group else "")
    yield table("Where the time went", ("phase", "time", "share", "mean per step", ""), lines, css)


def _lines(report: Report) -> Iterable[str]:
    yield table("Samples of the training thread and the DataLoader's workers", LINE_COLUMNS, line_rows(report))


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
    columns = {
        "GPU": [gpu_label(gpu) for gpu in report.gpus],
        "name": [gpu.name or gpu.uuid for gpu in report.gpus],
        **{one.page_title: [one.page_cell(gpu) for gpu in report.gpus] for one in COLUMNS if one.page_title},
        "errors": [", ".join(gpu.errors) for gpu in report.gpus],
    }
    columns = {name: cells for name, cells in columns.items() if any(cells)}
    yield table("GPUs over the whole run", [*columns], list(zip(*columns.values(), strict=True)))


def _size(size_bytes: int | None) -> str:
    return "" if size_bytes is None else format_bytes(size_bytes)


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
    lines.append(("total", *map(format_bytes, map(_used, shown))))
    lines.append(("free", *(_size(account.free_bytes) for account in shown)))
    of = f", of the {len(shown)} fullest of {len(report.memory)} GPUs" if len(shown) < len(report.memory) else ""
    head = map(gpu_label, shown)
    yield table(f"GPU memory by part{of}", ("part", *head), lines) if shown else ""
    for account in shown:
        gpu = f" of {gpu_label(account)}" if len(shown) > 1 else ""
        heads = {"added by a step at its peak": account.peak_lines, "kept after steps": account.kept_lines}
        for which, found in heads.items():
            rows = [(line_label(one), format_bytes(one.bytes), one.blocks) for one in found]
            yield table(f"Memory{gpu} {which}, by line", ("line", "size", "blocks"), rows)


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
    yield table("Time per step, by rank", ("rank", "node", "own work", *phases, "waits for others"), lines)


def _notes(report: Report) -> Iterable[str]:
    notes = [*map(stall_line, report.stalls), report.gpu_note, *measuring_lines(report)]
    if report.loader is not None:
        notes.append(loader_line(report.loader))
    return [element("p", note) for note in notes if note]


def _settings(report: Report) -> Iterable[str]:
    known = {name: value for name, value in report.settings.items() if value is not None}
    lines = [(name, ", ".join(map(str, value)) if isinstance(value, list) else value) for name, value in known.items()]
    yield table("Settings of the run", ("setting", "value"), lines)
