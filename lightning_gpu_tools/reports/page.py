"""The report of a training run as an HTML page without scripts, and as a picture (needs the ``plot`` extra)."""

from __future__ import annotations

import html
import io
import math
import os
import re
import signal
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from lightning_gpu_tools import files
from lightning_gpu_tools.advice.findings import gain, label_of
from lightning_gpu_tools.advice.memory_account import PARTS, MemoryAccount
from lightning_gpu_tools.reports.gpu_table import gpu_label, gpu_rows
from lightning_gpu_tools.reports.report import DRAWN, FILE_NAME, Report, load_report
from lightning_gpu_tools.reports.text import (
    LINE_COLUMNS,
    cause_phase,
    fullest_first,
    line_label,
    line_rows,
    measuring_lines,
    paragraphs,
    phase_groups,
    sentences,
    verdict_label,
    verdict_line,
)
from lightning_gpu_tools.training.phases import PHASES
from lightning_gpu_tools.units import format_bytes, format_duration, printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

_TIMEOUT_S = 120  # our default: at its first import on a machine, matplotlib reads all fonts
_NICENESS = 10  # our default: the next run has priority
_MAX_TEXT = 1000  # characters
_LONG = 24  # characters; a longer cell wraps
# Of columns of the GPUs' table.
_MEANINGS = {
    "p95": "p5 and p95: in 5% and 95% of the driver's samples, the GPU was at most this busy.",
    "waits": "waits: time in which the GPU looked busy, but waited in a collective for a later rank.",
}
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
# The page may load nothing, and runs no scripts.
_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<title>{title}</title>
<style>
:root {{ color-scheme: light; font: 15px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; }}
body {{ margin: 0 auto; padding: 1rem; max-width: 75rem; }}
h1 {{ font-size: 1.4rem; }}
p, dd {{ max-width: 55rem; overflow-wrap: anywhere; }}
dt {{ font-weight: 600; }}
.wide {{ overflow-x: auto; margin: 1.2rem 0; }}
svg {{ width: 100%; min-width: 50rem; height: auto; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
caption, th, td {{ padding: .15rem .8rem .15rem 0; text-align: left; vertical-align: top; white-space: nowrap; }}
caption, thead th {{ font-weight: 600; }}
tbody .text {{ white-space: normal; min-width: 10rem; overflow-wrap: anywhere; }}
thead th {{ border-bottom: 1px solid #767676; }}
tbody th {{ font-weight: 400; }}
</style>
</head>
<body>
{content}
</body>
</html>
"""


def render_page(report: Report, picture: str = "") -> str:
    """Return the report as a page of at most 150 kB: verdict, reason and advice, the picture as SVG, and the tables."""
    title = f"GPU report of {report.settings.get('model') or 'a run'}"
    return _PAGE.format(title=_escaped(title), content="\n".join(_content(report, picture)))


def _content(report: Report, picture: str) -> Iterator[str]:
    yield f"<h1>{_escaped(verdict_line(report))}</h1>"
    yield _paragraph(report.outcome)
    yield _list(paragraphs(report).items())
    if picture:
        svg = picture.replace("<svg", '<svg role="img" aria-label="Picture of the run; the tables follow"', 1)
        yield f'<div class="wide" tabindex="0">{svg}</div>'
    yield from map(_paragraph, sentences(report))
    yield _table(
        f"Where the {format_duration(report.wall_s)} went", ("phase", "time", "share", "per step"), _time(report)
    )
    findings = []
    for finding in report.diagnosis.findings:
        speedup = f"{gain(finding)} " if finding.share and not math.isinf(finding.ceiling) else ""
        share = f"{100 * finding.share:.0f}% of the time. {speedup}" if finding.share else ""
        findings.append((finding.cause.replace("_", " "), f"{share}{finding.advice}"))
    yield _list(findings)
    yield _table("Source lines", LINE_COLUMNS, line_rows(report))
    titles, units, *rows = gpu_rows(report.gpus)
    yield _table("GPUs", [f"{title} {unit}" for title, unit in zip(titles, units, strict=True)], rows)
    yield from (_paragraph(text) for title, text in _MEANINGS.items() if title in titles)
    for account in fullest_first(report.memory)[:1]:
        yield _table(f"Memory of {gpu_label(account)} at the peak", ("part", "size"), _memory(account))
    yield from map(_paragraph, measuring_lines(report))
    yield _table("Settings", ("setting", "value"), [item for item in report.settings.items() if item[1] is not None])


def _time(report: Report) -> Iterator[Sequence[object]]:
    cause = cause_phase(report)
    for group, parts in phase_groups(report.phase_s).items():
        named = [(f"{group}/{name}", f"– {name}", seconds) for name, seconds in parts.items() if name]
        for phase, label, seconds in [(group, label_of(group, report.activity), sum(parts.values())), *named]:
            share = f"{100 * seconds / max(report.wall_s, 1e-9):.1f}%"
            per_step = format_duration(seconds / max(1, report.steps))
            yield f"{label} ◀ cause" if phase == cause else label, format_duration(seconds), share, per_step


def _memory(account: MemoryAccount) -> Iterator[Sequence[object]]:
    for name, size in account.parts_bytes.items():
        yield PARTS.get(name, name), format_bytes(size)
    for what, lines in {"added at the peak": account.peak_lines, "kept after steps": account.kept_lines}.items():
        for line in lines:
            yield f"– {what}: {line_label(line)}", format_bytes(line.bytes)


def _escaped(text: object) -> str:
    """Return HTML that shows a text literally, in one line."""
    return html.escape(printable(text, _MAX_TEXT))


def _paragraph(text: str) -> str:
    return f"<p>{_escaped(text)}</p>"


def _list(texts: Iterable[tuple[str, str]]) -> str:
    """Return a list of texts with titles."""
    return f"<dl>{''.join(f'<dt>{_escaped(title)}</dt><dd>{_escaped(text)}</dd>' for title, text in texts)}</dl>"


def _table(caption: str, head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table whose first column has row headers; empty without rows."""
    columns = "".join(f'<th scope="col">{_escaped(name)}</th>' for name in head)
    lines = "".join(
        f"<tr>{_cell('th', first)}{''.join(_cell('td', cell) for cell in rest)}</tr>" for first, *rest in rows
    )
    if not lines:
        return ""
    return (
        f'<div class="wide" tabindex="0"><table><caption>{_escaped(caption)}</caption><thead><tr>{columns}</tr></thead>'
        f"<tbody>{lines}</tbody></table></div>"
    )


def _cell(tag: str, content: object) -> str:
    scope = ' scope="row"' if tag == "th" else ""
    css = ' class="text"' if len(str(content)) > _LONG else ""
    return f"<{tag}{scope}{css}>{_escaped(content)}</{tag}>"


def draw(folder: str) -> None:
    """Draw the report in a folder into that folder, in a separate process; if it fails, print why."""

    def give_up(*_: object) -> None:
        raise TimeoutError("it took too long")

    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(_TIMEOUT_S)
    os.nice(_NICENESS)
    source = os.path.join(folder, FILE_NAME)
    if not files.exists(source):  # the folder was removed, such as a temporary one
        return
    try:
        report = load_report(source)
        for name, content in zip(DRAWN, (png_of(report), render_page(report, svg_of(report)).encode()), strict=True):
            if files.exists(source):
                with files.writing(os.path.join(folder, name)) as target:
                    target.write(content)
    except Exception as error:  # noqa: BLE001 - a broken matplotlib, a full disk
        reason = f"{type(error).__name__}: {printable(error, 300)}"
        sys.stdout.write(f"The picture of the report could not be drawn: {reason}\n")


def png_of(report: Report) -> bytes:
    """Return the report as a picture.

    Its panels show, from top to bottom, the wall time by phase, GPU utilization, memory, and power. They have a line
    for each of up to four GPUs, the least busy ones.
    """
    return _drawn(report, "png", with_title=True)


def svg_of(report: Report) -> str:
    """Return the same picture as an SVG element, without the title."""
    text = _drawn(
        report, "svg", with_title=False, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type"))
    ).decode()
    # Paths with at most two decimals, which halves the size.
    return re.sub(r' d="[^"]+"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), text[text.index("<svg") :])


def _drawn(report: Report, form: str, *, with_title: bool, **options: Any) -> bytes:
    from matplotlib import style

    file = io.BytesIO()
    with style.context(_STYLE):
        _figure(report, with_title).savefig(file, format=form, dpi=120, **options)
    return file.getvalue()


def _figure(report: Report, with_title: bool) -> Figure:
    from matplotlib.figure import Figure

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
    from matplotlib.patches import Patch

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
