"""The report of a training run as a picture (needs the ``plot`` extra), and as an HTML page without scripts."""

from __future__ import annotations

import html
import io
import re
import textwrap
from typing import TYPE_CHECKING, Any

from lightning_gpu_tools.advice.findings import label_of
from lightning_gpu_tools.reports.report import Report
from lightning_gpu_tools.reports.text import MAX_ROWS, details, gpu_label, paragraphs, phase_groups, verdict_line
from lightning_gpu_tools.training.phases import PHASES
from lightning_gpu_tools.units import format_duration, printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Lines differ in dashes as well as in shade, so that they are distinguishable in print. More lines hide each other.
_LINE_STYLES = (("#000000", "-"), ("#000000", ":"), ("#777777", "-"), ("#777777", "--"))
_MAX_POINTS = 300  # our default: of a line 1,000 pixels long
_OTHER_COLOR = "#BBBBBB"  # of short phases, and of unknown ones in a file
_MIN_SHARE = 0.01  # our default: of the wall time, for a phase with a color of its own
# The panels below the time: metric, label, divisor of the values.
_PANELS = (("utilization_percent", "GPU busy (%)", 1.0), ("memory_used_bytes", "GPU memory in use (GiB)", 2.0**30))
# The time axis has the largest of these of which the run lasts at least three.
_UNITS_S = {"days": 86_400.0, "hours": 3600.0, "minutes": 60.0, "seconds": 1.0}
# Without the user's own style. Dollar signs in texts are not mathematics. Browsers have their own fonts.
_STYLE: list[Any] = ["default", {"text.parse_math": False, "svg.fonttype": "none", "svg.hashsalt": "gpu_report"}]
_MAX_LINES = 600  # our default: 60 kB
# The page may load nothing, and runs no scripts.
_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<title>{title}</title>
<style>
body {{ margin: 1rem auto; padding: 0 1rem; max-width: 75rem; font-family: sans-serif; }}
p {{ max-width: 55rem; overflow-wrap: anywhere; }}
div, pre {{ overflow-x: auto; }}
svg {{ width: 100%; min-width: 50rem; height: auto; }}
</style>
</head>
<body>
<h1>{verdict}</h1>
{paragraphs}
<div tabindex="0">{picture}</div>
<pre tabindex="0">{details}</pre>
</body>
</html>
"""


def render_page(report: Report, picture: str = "") -> str:
    """Return the report as a page of at most 150 kB: verdict, reason and advice, the picture as SVG, and the rest.

    The rest is that of a full report, or of a short one for many GPUs.
    """
    texts = {"Outcome": report.outcome, **paragraphs(report)}.items()
    lines = "\n".join(details(report, full=len(report.gpus) <= MAX_ROWS)).split("\n")
    return _PAGE.format(
        title=html.escape(printable(f"GPU report of {report.settings.get('model') or 'a run'}")),
        verdict=html.escape(verdict_line(report)),
        paragraphs="\n".join(f"<p><b>{title}:</b> {html.escape(printable(text, 1000))}</p>" for title, text in texts),
        picture=picture.replace("<svg", '<svg role="img" aria-label="Picture of the run; the text has its numbers"', 1),
        details=html.escape("\n".join(lines[:_MAX_LINES])),
    )


def png_of(report: Report) -> bytes:
    """Return the report as a picture.

    Its panels show, from top to bottom, the wall time by phase, GPU utilization, and memory. They have a line for each
    of up to four GPUs, the least busy ones.
    """
    return _drawn(report, "png", with_title=True)


def svg_of(report: Report) -> str:
    """Return the same picture as an SVG element, without the title."""
    metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    text = _drawn(report, "svg", with_title=False, metadata=metadata).decode()
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
    gpus = sorted(gpus, key=lambda gpu: gpu.utilization_percent_mean or 0.0)[: len(_LINE_STYLES)]
    panels = [panel for panel in _PANELS if any(panel[0] in gpu.timelines for gpu in gpus)]
    unit = next((name for name, seconds in _UNITS_S.items() if report.wall_s >= 3 * seconds), "seconds")
    figure = Figure(figsize=(12, 2.6 * (1 + len(panels))), layout="constrained")
    axes: list[Axes] = list(figure.subplots(1 + len(panels), 1, squeeze=False, sharex=True)[:, 0])
    if with_title:
        title = textwrap.fill(f"{verdict_line(report)}. {printable(report.diagnosis.why, 1000)}", 120)
        figure.suptitle(title, x=0.01, ha="left", weight="bold", fontsize="medium")
    _draw_phases(axes[0], report, _UNITS_S[unit])
    for axis, (metric, label, divisor) in zip(axes[1:], panels, strict=True):
        for (color, dashes), gpu in zip(_LINE_STYLES, gpus, strict=False):
            if metric in gpu.timelines:
                points = gpu.timelines[metric].at_most(_MAX_POINTS).points()
                x = [time_s / _UNITS_S[unit] for time_s, _ in points]
                y = [value / divisor for _, value in points]
                axis.plot(x, y, label=gpu_label(gpu), color=color, linestyle=dashes, linewidth=1.2)
        axis.set_ylim(0, 103 if metric == "utilization_percent" else None)
        axis.set_ylabel(label)
        axis.grid(alpha=0.25)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        # Next to the data, never on it.
        axis.legend(
            loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize="small", frameon=False, reverse=axis is axes[0]
        )
    axes[-1].set_xlabel(f"time since training started ({unit})")
    axes[-1].set_xlim(0, max(report.wall_s, 1e-9) / _UNITS_S[unit])
    return figure


def _draw_phases(axis: Axes, report: Report, unit_s: float) -> None:
    """Draw the share of each phase over time, in the order of the report's tree from bottom to top."""
    spans = [*report.spans, *report.spans[-1:]]  # a step ends where the next one begins
    edges = [span.begin_s / unit_s for span in report.spans] + [span.end_s / unit_s for span in report.spans[-1:]]
    rest = [100.0] * len(edges)
    rows, labels, colors = [], [], []
    for group, parts in phase_groups(report.phase_s).items():
        whole = sum(parts.values()) / max(report.wall_s, 1e-9)
        if whole >= _MIN_SHARE:
            shares = [100 * span.phase_s.get(group, 0.0) / max(span.end_s - span.begin_s, 1e-9) for span in spans]
            row = [min(share, room) for share, room in zip(shares, rest, strict=True)]
            rest = [room - share for share, room in zip(row, rest, strict=True)]
            rows.append(row)
            labels.append(f"{label_of(group, report.activity)} {100 * whole:.0f}%")
            colors.append(PHASES[group].color if group in PHASES else _OTHER_COLOR)
    labels, colors = [*labels, "others, each below 1%"], [*colors, _OTHER_COLOR]
    axis.stackplot(edges, *rows, rest, labels=labels, colors=colors, step="post", linewidth=0, zorder=-1)
    axis.set_rasterization_zorder(0)  # one image in the SVG, because hundreds of spans would be large paths
    axis.set_ylim(0, 100)
    axis.set_ylabel("time (%)")
    axis.set_title(f"Where the {format_duration(report.wall_s)} went", loc="left", fontsize="medium")
