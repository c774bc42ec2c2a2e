"""The GPUs of a job as a table: a line for each GPU or node, and the outliers."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import NamedTuple

from lightning_gpu_tools.gpus.metrics import GpuSummary
from lightning_gpu_tools.units import format_bytes, line_width, number_ranges, printable

# Our default: this fits on a screen next to the rest of the report. 16 GPUs are two machines of eight.
_MAX_ROWS = 16
_MAX_OUTLIERS = 8
_MAX_ERRORS = 5
_MAX_NODES_NAMED = 8
# Iglewicz and Hoaglin, How to Detect and Handle Outliers (1993): a modified z-score above 3.5, where 1.4826 times the
# median absolute deviation estimates the standard deviation.
_MAX_DEVIATIONS = 3.5 * 1.4826
# Our default: a distance from the median below 10 percentage points, 10 degrees, or 10 % of it is not marked.
_MARGIN = 10.0


class _Column(NamedTuple):
    title: str  # in the text; "" = not in it
    page_title: str  # on the page; likewise
    unit: str
    field: str
    of_node: bool = True  # also shown in lines about a node
    compared: bool = True  # a GPU can be an outlier in it
    is_shown: Callable[[Sequence[float]], object] = bool  # in the text, given the known values
    page_zeros: bool = True  # whether the page shows a zero, not an empty cell

    def values(self, gpus: Iterable[GpuSummary]) -> list[float]:
        known = [value for gpu in gpus if (value := getattr(gpu, self.field)) is not None]
        return [value / 2**30 for value in known] if self.unit == "GiB" else known

    def page_cell(self, gpu: GpuSummary) -> str:
        """Return a cell of the page, with its unit; empty if there is no value to show."""
        value = getattr(gpu, self.field)
        if value is None or not (value or self.page_zeros):
            return ""
        if self.unit == "GiB":
            return format_bytes(value)
        if self.unit == "kWh":
            return f"{value / 3.6e6:,.2f} kWh"
        return f"{value:,.0f} {'°C' if self.unit == 'C' else self.unit}"

    def range(self, gpus: Iterable[GpuSummary]) -> str:
        """Return minimum, median and maximum, or one number if they are equal; ``"?"`` without known values."""
        values = self.values(gpus)
        texts = [self.text(value) for value in (min(values), median(values), max(values))] if values else ["?"]
        return "/".join(texts if len({*texts}) > 1 else texts[:1])

    def text(self, value: float) -> str:
        if abs(value) >= 1e6:  # no GPU has that, but a file may
            return f"{value:.0e}"
        return f"{value:.1f}" if self.unit == "GiB" and value < 99.95 else f"{value:.0f}"


# The tables of the text and of the page, in their order.
COLUMNS = (
    _Column("busy", "busy", "%", "utilization_percent_mean", is_shown=lambda values: True),
    _Column("waits", "waits for ranks", "%", "rank_wait_percent", is_shown=any, page_zeros=False),
    _Column("p5", "p5", "%", "utilization_percent_p5", of_node=False, compared=False),
    _Column("p95", "p95", "%", "utilization_percent_p95", of_node=False, compared=False),
    _Column("", "in validation", "%", "validation_utilization_percent_mean"),
    _Column("", "by other jobs", "%", "others_utilization_percent", page_zeros=False),
    _Column("SMs", "SMs active", "%", "sm_active_percent"),
    _Column("tensor", "tensor cores", "%", "tensor_active_percent", of_node=False, compared=False),
    _Column("peak", "peak memory", "GiB", "memory_used_bytes_max"),
    _Column("of", "of", "GiB", "memory_total_bytes", of_node=False),
    _Column("others", "of other jobs", "GiB", "others_memory_bytes_max", of_node=False, is_shown=any, page_zeros=False),
    _Column("others", "", "%", "others_utilization_percent", of_node=False, is_shown=any),  # after their memory
    _Column("power", "power", "W", "power_watts_mean"),
    _Column("", "energy", "kWh", "energy_joules"),
    _Column("temp", "hottest", "C", "temperature_celsius_max"),
    _Column("throttled", "throttled", "%", "throttled_percent", is_shown=any),
)


class _Compared(NamedTuple):
    gpu: GpuSummary
    excess: dict[_Column, float]  # of an outlier: distance from the median, in multiples of the limit

    @property
    def oddness(self) -> float:
        return max([math.inf if self.gpu.errors else 0.0, *map(abs, self.excess.values())])


# A line of a table: the first cells, its GPUs, and the text after the last cell.
_Line = tuple[list[str], list[_Compared], str]


def gpu_lines(gpus: Sequence[GpuSummary], *, full: bool = False) -> list[str]:
    """Return a report's lines on the GPUs: a table as wide as the terminal, and sentences; ``full``: a line per GPU."""
    columns = [column for column in COLUMNS if column.title and column.is_shown(column.values(gpus))]
    compared = _compare(gpus, columns)
    nodes = len({gpu.node for gpu in gpus})
    lines = []
    if len(gpus) > _MAX_ROWS and not full:
        place = f"{len(gpus):,} GPUs on {nodes:,} node{'s' * (nodes > 1)}"
        lines.append(f"{place}: min/median/max (each GPU: lightning-gpu-tools report FILE --full)")
        columns = [column for column in columns if column.of_node]
        lines += [*_table(["node", "GPUs"], columns, _node_lines(compared)), *_outliers(compared)]
    elif gpus:
        heads = ["node", "GPU"] if any(gpu.node for gpu in gpus) else ["GPU"]
        lines = _table(heads, columns, [_gpu_line(one, len(heads)) for one in compared])
        lines += ["* differs from the rest"] if any(one.excess for one in compared) else []
    lines += [*_products(gpus), *_errors(gpus, full)]
    watt_hours = sum(gpu.energy_joules or 0.0 for gpu in gpus) / 3600
    if watt_hours:
        amount = f"{watt_hours:,.1f} Wh" if watt_hours < 1000 else f"{watt_hours / 1000:,.1f} kWh"
        lines.append(f"GPU energy: {amount}.")
    return lines


def _compare(gpus: Sequence[GpuSummary], columns: Sequence[_Column]) -> list[_Compared]:
    compared = [_Compared(gpu, {}) for gpu in gpus]
    for column in columns:
        values = column.values(gpus)
        if not values or not column.compared:
            continue
        middle = median(values)
        margin = _MARGIN if column.unit in ("%", "C") else max(1.0, middle * _MARGIN / 100)
        limit = max(margin, _MAX_DEVIATIONS * median(abs(value - middle) for value in values))
        for one in compared:
            for value in column.values([one.gpu]):
                if abs(value - middle) > limit:
                    one.excess[column] = (value - middle) / limit
    return compared


def _gpu_line(one: _Compared, heads: int) -> _Line:
    head = [f"{one.gpu.node}", f"{one.gpu.index}"][-heads:]
    return head, [one], "◀" * (one.oddness > 0) + " error" * bool(one.gpu.errors)


def _node_lines(compared: Sequence[_Compared]) -> list[_Line]:
    """Return a line for each node; with many nodes, a line for each node with an outlier, and one for the rest."""
    nodes: dict[str, list[_Compared]] = {}
    for one in sorted(compared, key=lambda one: one.gpu.node):
        nodes.setdefault(f"{one.gpu.node}", []).append(one)
    oddness = {node: max(one.oddness for one in inside) for node, inside in nodes.items()}
    if len(nodes) > _MAX_ROWS:
        oddest = sorted(nodes, key=lambda node: -oddness[node])[: _MAX_ROWS - 1]
        odd = {node: inside for node, inside in nodes.items() if node in oddest and oddness[node]}
        rest = [one for node, inside in nodes.items() if node not in odd for one in inside]
        nodes = {**odd, "rest" if odd else "all": rest}
    return [([node, f"{len(inside):,}"], inside, "◀" * (oddness.get(node, 0.0) > 0)) for node, inside in nodes.items()]


def _table(heads: Sequence[str], columns: Sequence[_Column], lines: Sequence[_Line]) -> list[str]:
    """Return a table whose cells are right-aligned, except for the star after them.

    If it is wider than the terminal, the first columns that lines about a node lack are left out.
    """
    rows = [[*heads, *(column.title for column in columns)], ["" for _ in heads] + [column.unit for column in columns]]
    for head, inside, _ in lines:
        gpus = [one.gpu for one in inside]
        stars = ("*" * any(column in one.excess for one in inside) for column in columns)
        rows.append([*head, *(column.range(gpus) + star for column, star in zip(columns, stars, strict=True))])
    rows = [[cell if cell.endswith("*") else f"{cell} " for cell in row] for row in rows]
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    marks = ["", "", *(mark for _, _, mark in lines)]
    table = [f"{' '.join(map(str.rjust, row, widths))} {mark}".rstrip() for row, mark in zip(rows, marks, strict=True)]
    extra = [column for column in columns if not column.of_node]
    if extra and max(map(len, table)) > line_width():
        return _table(heads, [column for column in columns if column is not extra[0]], lines)
    return table


def _outliers(compared: Sequence[_Compared]) -> list[str]:
    """Return the outliers, with reasons; GPUs with the same reasons share a line."""
    alike: defaultdict[tuple[object, ...], list[_Compared]] = defaultdict(list)
    for one in compared:
        if one.excess:
            alike[tuple((column, by > 0) for column, by in one.excess.items())].append(one)
    groups = sorted(alike.values(), key=lambda group: -max(one.oddness for one in group))
    everyone = [one.gpu for one in compared]
    lines = ["* differs from the rest:"] if groups else []
    for group in groups[:_MAX_OUTLIERS]:
        gpus = [one.gpu for one in group]
        reasons = []
        for column in group[0].excess:
            values, usual = column.values(gpus), column.text(median(column.values(everyone)))
            texts = dict.fromkeys(map(column.text, (min(values), max(values))))
            reasons.append(f"{column.title} {' to '.join(texts)} {column.unit} (median {usual})")
        lines.append(f"  {_names(gpus, everyone)}: {', '.join(reasons)}")
    rest = [one.gpu for group in groups[_MAX_OUTLIERS:] for one in group]
    if rest:
        lines.append(f"  also {_names(rest, everyone)}")
    return lines


def _products(gpus: Sequence[GpuSummary]) -> list[str]:
    """Return the product of each GPU if there are several products; a single one is in *Run*."""
    by_name: defaultdict[str, list[GpuSummary]] = defaultdict(list)
    for gpu in gpus:
        by_name[printable(gpu.name or "unknown")].append(gpu)
    listed = [f"{_names(some, gpus)}: {name}" for name, some in by_name.items()]
    return [f"Products: {'; '.join(listed)}."] if len(listed) > 1 else []


def _errors(gpus: Sequence[GpuSummary], full: bool) -> list[str]:
    by_error: defaultdict[str, list[GpuSummary]] = defaultdict(list)
    for gpu in gpus:
        for error in gpu.errors:
            by_error[printable(error)].append(gpu)
    lines = [f"ERROR on {_names(some, gpus)}: {error}" for error, some in by_error.items()]
    more = 0 if full else len(lines) - _MAX_ERRORS
    if more > 0:
        lines[_MAX_ERRORS:] = [f"{more:,} more GPU errors (lightning-gpu-tools report FILE --full)"]
    return lines


def _names(gpus: Sequence[GpuSummary], everyone: Sequence[GpuSummary]) -> str:
    """Return a name for some of a job's GPUs: ``GPU 3``, ``node 2 GPUs 0 to 7``, ``9 GPUs on nodes 3 to 6``."""
    by_node: defaultdict[int, list[int]] = defaultdict(list)
    for gpu in gpus:
        by_node[gpu.node].append(gpu.index)
    if len(by_node) > _MAX_NODES_NAMED:
        return f"{len(gpus):,} GPUs on nodes {number_ranges(by_node)}"
    has_nodes = any(gpu.node for gpu in everyone)
    return ", ".join(
        f"{f'node {node} ' * has_nodes}GPU{'s' * (len(indices) > 1)} {number_ranges(indices)}"
        for node, indices in by_node.items()
    )
