"""The report of a training run as a picture (needs the extra ``plot``)."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib import style
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from lightning_gpu_tools.advice.memory_account import MemoryAccount
from lightning_gpu_tools.checkpoints.atomic_file import replacing
from lightning_gpu_tools.gpus.metrics import GpuSummary
from lightning_gpu_tools.reports.report import PLOT_NAME, Report
from lightning_gpu_tools.reports.text import phase_groups, phase_label
from lightning_gpu_tools.training.phases import PHASES
from lightning_gpu_tools.units import format_duration, printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_UNKNOWN_COLOR = "#BBBBBB"
# Lines of GPUs differ in dashes as well as in shade, so that they can be told apart in print.
_LINES = (("#000000", "-"), ("#000000", ":"), ("#666666", "-"), ("#666666", "--"), ("#999999", "-"), ("#999999", ":"))
# Panels below the phases: timeline, label, divisor, height against that of the phases.
_PANELS = (
    ("utilization_percent", "GPU busy (%)", 1.0, 2.0),
    ("memory_used_bytes", "memory (GiB)", 2.0**30, 1.5),
    ("power_watts", "power (W)", 1.0, 1.0),
)
# Whatever the user's own style is. Text may hold dollar signs, which are not meant as mathematics.
# Bands of the memory of torch on the GPU of rank 0: field of ``MemoryPoint``, label, color (Okabe and Ito's).
_BANDS = (
    ("kept_bytes", "tensors kept between steps", "#0072B2"),
    ("step_bytes", "activations and temporaries", "#009E73"),
    ("reserved_bytes", "allocator cache", "#F0E442"),
)
_STYLE: list[Any] = ["default", {"text.parse_math": False}]
_MIN_VISIBLE = 0.01  # of a span, which is a pixel of the panel's height


def save_plot(report: Report, folder: str | os.PathLike[str]) -> Path:
    """Draw the report into ``gpu_report.png`` in ``folder``, completely or not at all, and return its path.

    From top to bottom: the phases of the wall time; how busy each GPU was, over the colors of the phases; memory;
    power. What was not reported is left out.

    Raises:
        OSError: The folder is not writable.
    """
    target = Path(folder) / PLOT_NAME
    with style.context(_STYLE), replacing(str(target)) as file:
        _draw(report).savefig(file, format="png", dpi=120)
    return target


def _draw(report: Report) -> Figure:
    panels = [panel for panel in _PANELS if any(gpu.timelines.get(panel[0]) for gpu in report.gpus)]
    heights = [1.0, *(height for *_, height in panels)]
    figure = Figure(figsize=(11, 2.2 + 1.4 * sum(heights)), layout="constrained")
    axes: list[Axes] = list(figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False, sharex=True)[:, 0])
    verdict = report.diagnosis.verdict.replace("_", " ").upper()
    title = textwrap.fill(f"{verdict}: {printable(report.diagnosis.why, 1000)}", 110)
    figure.suptitle(title, x=0.01, ha="left", weight="bold", fontsize="medium")
    _draw_phases(axes[0], report)
    axes[0].set_ylabel("time (%)")
    for axis, (timeline, label, divisor, _) in zip(axes[1:], panels, strict=True):
        if timeline == "utilization_percent":
            _draw_phases(axis, report, alpha=0.2)
        if timeline == "memory_used_bytes":
            _draw_memory(axis, report.memory, divisor)
        _draw_gpus(axis, report.gpus, timeline, divisor)
        axis.set_ylabel(label)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel("time since training started (s)")
    axes[-1].set_xlim(0, max(report.wall_s, 1e-9))
    axes[0].set_title(f"Where the {format_duration(report.wall_s)} went", loc="left", fontsize="medium")
    figure.legend(handles=_legend(report), loc="outside lower left", ncols=4, fontsize="small", frameon=False)
    return figure


def _draw_phases(axis: Axes, report: Report, alpha: float = 1.0) -> None:
    """Stack, span by span, the share of the time that each phase took."""
    edges = [span.begin_s for span in report.spans] + [span.end_s for span in report.spans[-1:]]
    bottom = [0.0] * len(report.spans)
    for group in phase_groups(report.phase_s):
        top = [min(low + 100 * share, 100.0) for low, share in zip(bottom, _shares(report, group), strict=True)]
        color = _color(group)
        axis.fill_between(
            edges, [*bottom, *bottom[-1:]], [*top, *top[-1:]], step="post", color=color, alpha=alpha, linewidth=0
        )
        bottom = top
    axis.set_ylim(0, 100)


def _color(group: str) -> str:
    return PHASES[group].color if group in PHASES else _UNKNOWN_COLOR


def _shares(report: Report, group: str) -> list[float]:
    """Return which share of each span a group of phases took."""
    return [span.phase_s.get(group, 0.0) / max(span.end_s - span.begin_s, 1e-9) for span in report.spans]


def _draw_gpus(axis: Axes, gpus: Sequence[GpuSummary], timeline: str, divisor: float) -> None:
    shown = [gpu for gpu in gpus if gpu.timelines.get(timeline)]
    for place, gpu in enumerate(shown):
        times, values = zip(*gpu.timelines[timeline], strict=True)
        color, style = _LINES[place % len(_LINES)]
        axis.plot(
            times,
            [value / divisor for value in values],
            label=f"GPU {gpu.index}",
            color=color,
            linestyle=style,
            linewidth=1.2,
        )
    if timeline == "memory_used_bytes":
        for total in {gpu.memory_total_bytes for gpu in shown if gpu.memory_total_bytes}:
            axis.axhline(total / divisor, color="#D55E00", linewidth=1, linestyle="--")
            axis.text(0, total / divisor, " total", va="top", fontsize="small", color="#D55E00")
    axis.set_ylim(0, 103 if timeline == "utilization_percent" else None)
    axis.grid(alpha=0.25)
    if len(shown) > 1 and timeline == "utilization_percent":
        axis.legend(loc="upper right", ncols=8, fontsize="small")


def _draw_memory(axis: Axes, accounts: Sequence[MemoryAccount], divisor: float) -> None:
    """Stack what torch used the memory of a GPU for; what the driver says is drawn over it."""
    account = next((account for account in accounts if account.timeline), None)
    if account is None:
        return
    times = [point.time_s for point in account.timeline]
    bottom = [0.0] * len(times)
    for field, label, color in _BANDS:
        top = [max(low, getattr(point, field) / divisor) for low, point in zip(bottom, account.timeline, strict=True)]
        axis.fill_between(times, bottom, top, color=color, alpha=0.6, linewidth=0, label=label)
        bottom = top
    axis.set_title(f"Torch on GPU {account.index}", loc="left", fontsize="small")
    where: Any = {"loc": "lower right", "bbox_to_anchor": (1.0, 1.0), "borderaxespad": 0.2}
    axis.legend(**where, ncols=len(_BANDS), fontsize="small", frameon=False)


def _legend(report: Report) -> list[Patch]:
    """Return an entry for each group of phases that can be seen."""
    patches = []
    for group, parts in phase_groups(report.phase_s).items():
        percent = 100 * sum(parts.values()) / max(report.wall_s, 1e-9)
        if max([percent / 100, *_shares(report, group)]) >= _MIN_VISIBLE:
            amount = f"{percent:.0f} %" if percent >= 0.5 else "< 1 %"
            patches.append(Patch(color=_color(group), label=f"{phase_label(group)} {amount}"))
    return patches
