"""The contents of the picture and the page of a report, as plain data."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from lightning_gpu_tools.advice.memory_account import MemoryAccount
from lightning_gpu_tools.gpus.metrics import GpuSummary
from lightning_gpu_tools.reports.report import Report
from lightning_gpu_tools.reports.text import gpu_label, phase_groups, phase_label
from lightning_gpu_tools.training.phases import PHASES

# Our defaults: more lines than this hide each other; with more GPUs than this, each node is a row.
MAX_LINES = 4
MAX_ROWS = 32
_COLUMNS = 400  # of a chart 1,000 pixels wide; half as many with a row for each node
_GPU_OF_NODE = 0.4  # of the height of a node's row
_LABEL = 0.6  # height of a label, in rows
_MIN_VISIBLE = 0.01  # of a span: a pixel of the panel's height
_UNKNOWN_COLOR = "#BBBBBB"
# Memory of torch on the GPU of rank 0: field of ``MemoryPoint``, label, color (Okabe and Ito's).
_MEMORY_BANDS = (
    ("kept_bytes", "tensors kept between steps", "#0072B2"),
    ("step_bytes", "activations and temporaries", "#009E73"),
    ("reserved_bytes", "allocator cache", "#F0E442"),
)
# Metrics drawn as rows of colors: the label, the name of the most unusual GPU, and how to choose it.
ROW_METRICS: Mapping[str, tuple[str, str, Callable[..., Any]]] = {
    "utilization_percent": ("GPU busy", "least busy", min),
    "memory_used_bytes": ("GPU memory in use", "fullest", max),
}


class _LineChart(NamedTuple):
    label: str
    divisor: float
    height: int  # in pixels of the page; the picture has 100 to the inch


# Timelines drawn as lines.
LINES: Mapping[str, _LineChart] = {
    "utilization_percent": _LineChart("GPU busy (%)", 1.0, 260),
    "memory_used_bytes": _LineChart("GPU memory in use (GiB)", 2.0**30, 220),
    "power_watts": _LineChart("Power (W)", 1.0, 180),
}


class _TimeUnit(NamedTuple):
    name: str
    seconds: float


def time_unit(wall_s: float) -> _TimeUnit:
    """Return the largest unit of which a run lasts at least three."""
    units = (_TimeUnit("days", 86_400.0), _TimeUnit("hours", 3600.0), _TimeUnit("minutes", 60.0))
    return next((unit for unit in units if wall_s >= 3 * unit.seconds), _TimeUnit("seconds", 1.0))


class _Band(NamedTuple):
    label: str
    color: str
    bottom: list[float]
    top: list[float]
    amount: str = ""  # share of the whole time, as text
    is_visible: bool = True


def phase_color(group: str) -> str:
    """Return the color of a group of phases; a file may have unknown ones."""
    return PHASES[group].color if group in PHASES else _UNKNOWN_COLOR


def phase_bands(report: Report, order: Iterable[str] = ()) -> list[_Band]:
    """Return the groups of phases from bottom to top, in percent of each of the report's spans.

    The default order is that of the report's tree; ``order`` names groups that come first.
    """
    bands = []
    bottom = [0.0] * len(report.spans)
    groups = phase_groups(report.phase_s)
    for group in dict.fromkeys([*order, *groups]):
        parts = groups.get(group, {})
        shares = [span.phase_s.get(group, 0.0) / max(span.end_s - span.begin_s, 1e-9) for span in report.spans]
        top = [min(low + 100 * share, 100.0) for low, share in zip(bottom, shares, strict=True)]
        whole = sum(parts.values()) / max(report.wall_s, 1e-9)
        amount = f"{100 * whole:.0f} %" if whole >= 0.005 else "< 1 %"
        is_visible = max([whole, *shares]) >= _MIN_VISIBLE
        bands.append(_Band(phase_label(group, report.activity), phase_color(group), bottom, top, amount, is_visible))
        bottom = top
    return bands


def span_edges_s(report: Report) -> list[float]:
    """Return the start times of the spans, and the end of the last one."""
    return [span.begin_s for span in report.spans] + [span.end_s for span in report.spans[-1:]]


def torch_account(report: Report) -> MemoryAccount | None:
    """Return the account of the GPU with memory values over time, if any."""
    return next((account for account in report.memory if account.timeline), None)


def torch_bands(account: MemoryAccount) -> list[_Band]:
    """Return torch's use of a GPU's memory, in GiB at each point of the account's timeline."""
    bands = []
    bottom = [0.0] * len(account.timeline)
    for field, label, color in _MEMORY_BANDS:
        sizes = [getattr(point, field) / 2**30 for point in account.timeline]
        top = [max(low, size) for low, size in zip(bottom, sizes, strict=True)]
        bands.append(_Band(label, color, bottom, top))
        bottom = top
    return bands


class _Strip(NamedTuple):
    label: str
    place: float  # from the top, in rows
    height: float
    percent: list[float | None]  # in columns of equal width over the whole run


class Row(NamedTuple):
    """The colors over time of a GPU, or of a node and its most unusual GPU."""

    label: str
    gpu: GpuSummary
    strips: list[_Strip]  # for a node: its mean, and that GPU below it


def rows(report: Report, metric: str) -> list[Row]:
    """Return a row for each GPU with a timeline, or for each node of a large job; memory is in percent of the GPU's."""
    known = [
        (gpu, whole)
        for gpu in report.gpus
        if metric in gpu.timelines
        and gpu.timelines[metric].points()
        and (whole := 100 if metric == "utilization_percent" else gpu.memory_total_bytes)
    ]
    columns = _COLUMNS if len(known) <= MAX_ROWS else _COLUMNS // 2
    edges_s = [report.wall_s * number / columns for number in range(columns + 1)]
    gpus = [(gpu, _percent(gpu.timelines[metric].means(edges_s), whole)) for gpu, whole in known]
    nodes = defaultdict(list)
    for gpu, percent in gpus:
        nodes[gpu.node].append((gpu, percent))
    found = []
    if len(gpus) <= MAX_ROWS or len(nodes) == 1:
        for place, (gpu, percent) in enumerate(gpus):
            label = gpu_label(gpu)
            found.append(Row(label, gpu, [_Strip(label, place, 1.0, percent)]))
        return found
    _, extreme, pick = ROW_METRICS[metric]
    for place, node in enumerate(sorted(nodes)):
        label = f"node {node}"
        means = [mean(column) for column in zip(*(percent for _, percent in nodes[node]), strict=True)]
        gpu, percent = pick(nodes[node], key=lambda one: mean(one[1]) or 0.0)
        below = _Strip(f"GPU {gpu.index}, {extreme} of {label}", place + 1 - _GPU_OF_NODE, _GPU_OF_NODE, percent)
        found.append(Row(label, gpu, [_Strip(label, place, 1 - _GPU_OF_NODE, means), below]))
    return found


def _percent(values: Iterable[float | None], whole: float) -> list[float | None]:
    return [None if value is None else min(100 * value / whole, 100.0) for value in values]


def rows_title(shown: Sequence[Row], metric: str) -> str:
    """Return a title with the metric, the meaning of a row, and the most unusual of all GPUs."""
    what, extreme, pick = ROW_METRICS[metric]
    each = "one row per GPU" if len(shown[0].strips) == 1 else f"mean of each node, with its {extreme} GPU below"
    percents = [mean(row.strips[-1].percent) or 0.0 for row in shown]
    percent = pick(percents)
    gpu = shown[percents.index(percent)].gpu
    return f"{what}: {each}; {extreme} of all: {gpu_label(gpu)}, mean {percent:.0f} %"


def label_every(count: int, room: float) -> int:
    """Return n so that labels of every n-th of ``count`` rows fit into the space of ``room`` full rows."""
    return math.ceil(max(1.0, _LABEL * count / room))


def mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the known values, if any."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
