"""What the picture and the page of a report draw, as plain data. Standard library only."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from lightning_gpu_tools.advice.memory_account import MemoryAccount
from lightning_gpu_tools.gpus.metrics import GpuSummary
from lightning_gpu_tools.reports.report import Report
from lightning_gpu_tools.reports.text import phase_groups, phase_label
from lightning_gpu_tools.training.phases import PHASES

# Our defaults: more lines than this hide each other; more rows than this are too many to compare, so nodes are.
MAX_LINES = 4
MAX_ROWS = 32
# Of a chart that is 1,000 pixels wide; of many GPUs, half of it.
_COLUMNS = 400
_GPU_OF_NODE = 0.4  # of the height of a node's row
# Bands of the memory of torch on the GPU of rank 0: field of ``MemoryPoint``, label, color (Okabe and Ito's).
_MEMORY_BANDS = (
    ("kept_bytes", "tensors kept between steps", "#0072B2"),
    ("step_bytes", "activations and temporaries", "#009E73"),
    ("reserved_bytes", "allocator cache", "#F0E442"),
)
_LABEL = 0.6  # of the height of a row
_UNKNOWN_COLOR = "#BBBBBB"
_MIN_VISIBLE = 0.01  # of a span, which is a pixel of the panel's height

RowMetric = Literal["utilization_percent", "memory_used_bytes"]
# Each with its name, and which GPU of a node stands out.
ROW_METRICS: Mapping[RowMetric, tuple[str, str]] = {
    "utilization_percent": ("GPU busy", "least busy"),
    "memory_used_bytes": ("GPU memory in use", "fullest"),
}


class TimeUnit(NamedTuple):
    """The unit of a time axis."""

    name: str
    seconds: float


def time_unit(wall_s: float) -> TimeUnit:
    """Return the unit in which a run takes some three to some hundred."""
    units = (TimeUnit("days", 86_400.0), TimeUnit("hours", 3600.0), TimeUnit("minutes", 60.0))
    return next((unit for unit in units if wall_s >= 3 * unit.seconds), TimeUnit("seconds", 1.0))


class PhaseBand(NamedTuple):
    """A group of phases over the run, as a band in a stack of them.

    Attributes:
        label: What it is.
        amount: Its share of the whole time, in words.
        color: Its color.
        bottom: Where the band begins in each span of the report, in percent of the span.
        top: Where it ends.
        is_visible: Whether it is more than a hair anywhere.
    """

    label: str
    amount: str
    color: str
    bottom: list[float]
    top: list[float]
    is_visible: bool


def phase_color(group: str) -> str:
    """Return the color of a group of phases; a file may have unknown ones."""
    return PHASES[group].color if group in PHASES else _UNKNOWN_COLOR


def phase_bands(report: Report) -> list[PhaseBand]:
    """Return the groups of phases from the bottom of the stack to its top."""
    bands = []
    bottom = [0.0] * len(report.spans)
    for group, parts in phase_groups(report.phase_s).items():
        shares = [span.phase_s.get(group, 0.0) / max(span.end_s - span.begin_s, 1e-9) for span in report.spans]
        top = [min(low + 100 * share, 100.0) for low, share in zip(bottom, shares, strict=True)]
        whole = sum(parts.values()) / max(report.wall_s, 1e-9)
        amount = f"{100 * whole:.0f} %" if whole >= 0.005 else "< 1 %"
        is_visible = max([whole, *shares]) >= _MIN_VISIBLE
        bands.append(PhaseBand(phase_label(group), amount, phase_color(group), bottom, top, is_visible))
        bottom = top
    return bands


def span_edges_s(report: Report) -> list[float]:
    """Return where the spans begin, and where the last one ends."""
    return [span.begin_s for span in report.spans] + [span.end_s for span in report.spans[-1:]]


class MemoryBand(NamedTuple):
    """What torch used memory for, as a band in a stack: from bottom to top at each point of the account, in GiB."""

    label: str
    color: str
    bottom: list[float]
    top: list[float]


def torch_account(report: Report) -> MemoryAccount | None:
    """Return the account of the GPU whose memory is known over time; ``None`` without one."""
    return next((account for account in report.memory if account.timeline), None)


def torch_bands(account: MemoryAccount) -> list[MemoryBand]:
    """Return what torch used the memory of a GPU for, from the bottom of the stack to its top."""
    bands = []
    bottom = [0.0] * len(account.timeline)
    for field, label, color in _MEMORY_BANDS:
        sizes = [getattr(point, field) / 2**30 for point in account.timeline]
        top = [max(low, size) for low, size in zip(bottom, sizes, strict=True)]
        bands.append(MemoryBand(label, color, bottom, top))
        bottom = top
    return bands


class Row(NamedTuple):
    """A row of colors over time: a GPU, or a node with the GPU of it that stands out.

    Attributes:
        label: Whose it is.
        percent: In columns of equal width over the whole run; ``None`` where nothing was reported.
        gpu: The GPU; of a node the one that stands out: the least busy one, or the fullest.
        gpu_percent: Of a node, the same for that GPU; else ``None``.
    """

    label: str
    percent: list[float | None]
    gpu: GpuSummary
    gpu_percent: list[float | None] | None = None


def rows(report: Report, metric: RowMetric) -> list[Row]:
    """Return a row for each GPU with a timeline, or if there are too many, for each node.

    Args:
        report: The report.
        metric: Memory is in percent of what the GPU has, and left out if that is unknown.
    """
    gpus = [
        gpu for gpu in report.gpus if metric in gpu.timelines and gpu.timelines[metric].points() and _whole(gpu, metric)
    ]
    columns = _COLUMNS if len(gpus) <= MAX_ROWS else _COLUMNS // 2
    edges_s = [report.wall_s * number / columns for number in range(columns + 1)]
    percents = [_scaled(gpu.timelines[metric].means(edges_s), 100 / _whole(gpu, metric)) for gpu in gpus]
    if len(gpus) <= MAX_ROWS or len({gpu.node for gpu in gpus}) == 1:
        return [Row(gpu_label(gpu), percent, gpu) for gpu, percent in zip(gpus, percents, strict=True)]
    nodes = defaultdict(list)
    for gpu, percent in zip(gpus, percents, strict=True):
        nodes[gpu.node].append((gpu, percent))
    return [_node_row(node, nodes[node], metric) for node in sorted(nodes)]


def rows_title(shown: Sequence[Row], metric: RowMetric) -> str:
    """Return what the rows are, and which GPU stands out of all."""
    what, extreme = ROW_METRICS[metric]
    each = "a row each" if shown[0].gpu_percent is None else f"the mean of each node, and below it its {extreme} GPU"
    row = _extreme(metric)(shown, key=_extreme_percent)
    return f"{what}: {each}; {extreme} of all is {gpu_label(row.gpu)}, on average {_extreme_percent(row):.0f} %"


def _extreme_percent(row: Row) -> float:
    return mean(row.gpu_percent or row.percent) or 0.0


def _extreme(metric: RowMetric) -> Callable[..., Any]:
    return min if metric == "utilization_percent" else max


class Strip(NamedTuple):
    """What one color after the other is drawn in: a row, or a part of it.

    Attributes:
        label: Whose it is.
        place: Where it begins, in rows from the top.
        height: Its height in rows.
        percent: As in :class:`Row`.
    """

    label: str
    place: float
    height: float
    percent: list[float | None]


def strips(shown: Sequence[Row], metric: RowMetric) -> list[Strip]:
    """Return what the rows consist of, from top to bottom."""
    found = []
    for place, row in enumerate(shown):
        height = 1.0 if row.gpu_percent is None else 1.0 - _GPU_OF_NODE
        found.append(Strip(row.label, place, height, row.percent))
        if row.gpu_percent is not None:
            label = f"GPU {row.gpu.index}, {ROW_METRICS[metric][1]} of {row.label}"
            found.append(Strip(label, place + height, _GPU_OF_NODE, row.gpu_percent))
    return found


def label_every(count: int, room: float) -> int:
    """Return n, so that every n-th of these rows has room for its label if there is room for so many whole rows."""
    return math.ceil(max(1.0, _LABEL * count / room))


def gpu_label(gpu: GpuSummary) -> str:
    """Return how a chart calls a GPU."""
    return f"{f'node {gpu.node} ' if gpu.node else ''}GPU {gpu.index}"


def mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of what is known; ``None`` if nothing is."""
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


def _whole(gpu: GpuSummary, metric: RowMetric) -> float:
    """Return what 100 % are; 0 if that is unknown."""
    return 100.0 if metric == "utilization_percent" else float(gpu.memory_total_bytes or 0)


def _scaled(values: Iterable[float | None], factor: float) -> list[float | None]:
    return [None if value is None else min(value * factor, 100.0) for value in values]


def _node_row(node: int, gpus: Sequence[tuple[GpuSummary, list[float | None]]], metric: RowMetric) -> Row:
    gpu, percent = _extreme(metric)(gpus, key=lambda one: mean(one[1]) or 0.0)
    means = [mean(column) for column in zip(*(percent for _, percent in gpus), strict=True)]
    return Row(f"node {node}", means, gpu, percent)
