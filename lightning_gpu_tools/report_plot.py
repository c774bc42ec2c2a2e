"""The report of a training run as a picture (needs the extra ``plot``)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.figure import Figure

from lightning_gpu_tools.quantities import format_duration
from lightning_gpu_tools.report import PLOT_NAME, Report
from lightning_gpu_tools.report_text import PHASE_LABELS, phase_groups

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's palette, distinguishable with every common colour blindness.
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
_SMALLEST_LABELLED_SHARE = 0.06


def save_plot(report: Report, folder: str | os.PathLike[str]) -> Path:
    """Draw the report into ``gpu_report.png`` in ``folder``, whole or not at all, and return its path.

    Raises:
        OSError: The folder cannot be written.
    """
    rows = _timelines(report)
    figure = Figure(figsize=(10, 2.6 + 1.9 * len(rows)), layout="constrained")
    axes = figure.subplots(1 + len(rows), 1, height_ratios=[1.0] + [1.4] * len(rows), squeeze=False)[:, 0]
    figure.suptitle(f"{report.diagnosis.verdict.replace('_', ' ').upper()}: {report.diagnosis.why}", wrap=True)
    _draw_wall_time(axes[0], report)
    for axis, (column, label, scale) in zip(axes[1:], rows, strict=True):
        for gpu in report.gpus:
            points = gpu.timelines.get(column, ())
            times, values = [time_s for time_s, _ in points], [value / scale for _, value in points]
            axis.plot(times, values, label=f"GPU {gpu.index}", linewidth=1)
        axis.set_ylabel(label)
        axis.set_ylim(0, 105 if label == "busy [%]" else None)
        axis.grid(alpha=0.3)
    if rows:
        axes[-1].set_xlabel("seconds since the start of training")
        axes[1].legend(ncols=8, fontsize="small")
    target = Path(folder) / PLOT_NAME
    temporary = target.with_name(f".{PLOT_NAME}.{os.getpid()}")
    try:
        figure.savefig(temporary, format="png", dpi=120)
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
    return target


def _timelines(report: Report) -> list[tuple[str, str, float]]:
    columns = [
        ("utilization_percent", "busy [%]", 1.0),
        ("memory_used_bytes", "memory [GiB]", 2.0**30),
        ("power_watts", "power [W]", 1.0),
    ]
    return [column for column in columns if any(gpu.timelines.get(column[0]) for gpu in report.gpus)]


def _draw_wall_time(axis: Axes, report: Report) -> None:
    left = 0.0
    for group, parts in phase_groups(report.phase_s).items():
        seconds = sum(parts.values())
        label = PHASE_LABELS.get(group, group)
        share = seconds / max(report.wall_s, 1e-9)
        axis.barh(0, seconds, left=left, color=_COLOURS.get(group, "#BBBBBB"), label=f"{label} {100 * share:.1f} %")
        if share >= _SMALLEST_LABELLED_SHARE:
            axis.text(
                left + seconds / 2, 0, f"{100 * share:.0f} %", ha="center", va="center", color="white", weight="bold"
            )
        left += seconds
    axis.set_xlim(0, max(left, 1e-9))
    axis.set_yticks([])
    axis.set_xlabel(f"where the {format_duration(report.wall_s)} of wall time went [s]")
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.45), ncols=4, fontsize="small", frameon=False)
