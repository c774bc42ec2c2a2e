"""The report of a training run as a picture (needs the extra ``plot``)."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.figure import Figure

from lightning_gpu_tools.gpus.metrics import GpuSummary
from lightning_gpu_tools.reports.report import PLOT_NAME, Report
from lightning_gpu_tools.reports.text import phase_groups, phase_label
from lightning_gpu_tools.units import format_duration, printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's palette, distinguishable with every common colour blindness, and three greys and a wine.
_COLOURS = {
    "training_step": "#009E73",
    "data_loading": "#D55E00",
    "host_to_device_copy": "#E69F00",
    "validation": "#56B4E9",
    "checkpoint": "#0072B2",
    "callback": "#CC79A7",
    "logging": "#F0E442",
    "epoch_start": "#882255",
    "monitoring": "#000000",
    "trainer": "#999999",
    "unexplained": "#DDDDDD",
}
# Lines of GPUs differ in dashes as well as in the shade, so that they can be told apart in print.
_LINES = (("#000000", "-"), ("#000000", ":"), ("#666666", "-"), ("#666666", "--"), ("#999999", "-"), ("#999999", ":"))
_SMALLEST_SHARE_IN_LEGEND = 0.005


def save_plot(report: Report, folder: str | os.PathLike[str]) -> Path:
    """Draw the report into ``gpu_report.png`` in ``folder``, whole or not at all, and return its path.

    From top to bottom: what the wall time went into, moment by moment; how busy each GPU was, on the colours of what
    the training thread did; memory; power. What was not reported is left out.

    Raises:
        OSError: The folder cannot be written.
    """
    figure = _draw(report)
    target = Path(folder) / PLOT_NAME
    temporary = target.with_name(f".{PLOT_NAME}.{os.getpid()}")
    try:
        figure.savefig(temporary, format="png", dpi=120)
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
    return target


def _draw(report: Report) -> Figure:
    rows = _timelines(report)
    heights = [1.1] + [2.2 if label == "GPU busy [%]" else 1.1 for _, label, _ in rows]
    figure = Figure(figsize=(11, 2.0 + 1.25 * sum(heights)), layout="constrained")
    axes: list[Axes] = list(figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False, sharex=True)[:, 0])
    verdict = report.diagnosis.verdict.replace("_", " ").upper()
    title = textwrap.fill(f"{verdict}: {printable(report.diagnosis.why, 1000)}", 110)
    figure.suptitle(_literal(title), x=0.01, ha="left", weight="bold", fontsize="medium")
    _draw_phases(axes[0], report)
    axes[0].set_ylabel("time [%]")
    for axis, (column, label, scale) in zip(axes[1:], rows, strict=True):
        if column == "utilization_percent":
            _draw_phases(axis, report, alpha=0.2)
        _draw_gpus(axis, report.gpus, column, scale)
        axis.set_ylabel(label)
    axes[-1].set_xlabel("time since the start of training [s]")
    axes[-1].set_xlim(0, max(report.wall_s, 1e-9))
    _draw_legend(figure, report, axes)
    return figure


def _literal(text: str) -> str:
    """Return text so that matplotlib shows it as it is, without a formula between two dollar signs."""
    return text.replace("$", r"\$")


def _timelines(report: Report) -> list[tuple[str, str, float]]:
    columns = [
        ("utilization_percent", "GPU busy [%]", 1.0),
        ("memory_used_bytes", "memory [GiB]", 2.0**30),
        ("power_watts", "power [W]", 1.0),
    ]
    return [column for column in columns if any(gpu.timelines.get(column[0]) for gpu in report.gpus)]


def _draw_phases(axis: Axes, report: Report, alpha: float = 1.0) -> None:
    """Stack, span by span, the share of the time that each phase took."""
    edges = [span.begin_s for span in report.spans] + [span.end_s for span in report.spans[-1:]]
    lengths = [max(span.end_s - span.begin_s, 1e-9) for span in report.spans]
    bottom = [0.0] * len(report.spans)
    for group in phase_groups(report.phase_s):
        shares = [100 * span.phase_s.get(group, 0.0) / s for span, s in zip(report.spans, lengths, strict=True)]
        top = [min(low + share, 100.0) for low, share in zip(bottom, shares, strict=True)]
        if any(shares):
            colour = _COLOURS.get(group, "#BBBBBB")
            axis.fill_between(
                edges, [*bottom, *bottom[-1:]], [*top, *top[-1:]], step="post", color=colour, alpha=alpha, linewidth=0
            )
        bottom = top
    axis.set_ylim(0, 100)


def _draw_gpus(axis: Axes, gpus: Sequence[GpuSummary], column: str, scale: float) -> None:
    shown = [gpu for gpu in gpus if gpu.timelines.get(column)]
    for place, gpu in enumerate(shown):
        points = gpu.timelines[column]
        colour, style = _LINES[place % len(_LINES)]
        axis.plot(
            [time_s for time_s, _ in points],
            [value / scale for _, value in points],
            label=f"GPU {gpu.index}",
            color=colour,
            linestyle=style,
            linewidth=1.2,
        )
    if column == "memory_used_bytes":
        totals = {gpu.memory_total_bytes for gpu in shown if gpu.memory_total_bytes}
        for total in totals:
            axis.axhline(total / scale, color="#D55E00", linewidth=1, linestyle="--")
            axis.text(0, total / scale, " all there is", va="top", fontsize="small", color="#D55E00")
    axis.set_ylim(0, 103 if column == "utilization_percent" else None)
    axis.grid(alpha=0.25)
    if len(shown) > 1 and column == "utilization_percent":
        axis.legend(loc="upper right", ncols=8, fontsize="small")


def _draw_legend(figure: Figure, report: Report, axes: Sequence[Axes]) -> None:
    from matplotlib.patches import Patch

    patches = []
    for group, parts in phase_groups(report.phase_s).items():
        share = sum(parts.values()) / max(report.wall_s, 1e-9)
        if share >= _SMALLEST_SHARE_IN_LEGEND:
            label = _literal(f"{phase_label(group)} {100 * share:.0f} %")
            patches.append(Patch(color=_COLOURS.get(group, "#BBBBBB"), label=label))
    axes[0].set_title(f"Where the {format_duration(report.wall_s)} went", loc="left", fontsize="medium")
    figure.legend(handles=patches, loc="outside lower center", ncols=4, fontsize="small", frameon=False)
