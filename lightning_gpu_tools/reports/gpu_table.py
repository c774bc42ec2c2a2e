"""The GPUs of a job as a table: a line for each GPU, or for the least busy ones of a large job, and for the rest."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import NamedTuple

from lightning_gpu_tools.gpus.metrics import GpuSummary
from lightning_gpu_tools.units import line_width, number_ranges, plural, printable

# Our defaults: this fits on a screen next to the rest of the report. 16 GPUs are two machines of eight.
_MAX_ROWS = 16
_MAX_ALONE = 8  # with more GPUs than rows; the last row is of the rest
_MAX_ERRORS = 5
_MAX_NODES_NAMED = 8


class _Column(NamedTuple):
    title: str
    unit: str
    field: str
    of_rest: bool = True  # also shown next to a row of several GPUs
    is_shown: Callable[[Sequence[float]], object] = bool  # given the known values

    def values(self, gpus: Iterable[GpuSummary]) -> list[float]:
        known = [value for gpu in gpus if (value := getattr(gpu, self.field)) is not None]
        return [value / 2**30 for value in known] if self.unit == "GiB" else known

    def range(self, gpus: Iterable[GpuSummary]) -> str:
        """Return minimum, median and maximum, or one number if they are equal; ``"?"`` without known values."""
        values = self.values(gpus)
        texts = [self.text(value) for value in (min(values), median(values), max(values))] if values else ["?"]
        return "/".join(texts if len({*texts}) > 1 else texts[:1])

    def text(self, value: float) -> str:
        if abs(value) >= 1e6:  # no GPU has that, but a file may
            return f"{value:.0e}"
        return f"{value:.1f}" if self.unit == "GiB" and value < 99.95 else f"{value:.0f}"


COLUMNS = (
    _Column("busy", "%", "utilization_percent_mean", is_shown=lambda values: True),
    _Column("waits", "%", "rank_wait_percent", is_shown=any),
    _Column("p5", "%", "utilization_percent_p5", of_rest=False),
    _Column("p95", "%", "utilization_percent_p95", of_rest=False),
    _Column("SMs", "%", "sm_active_percent"),
    _Column("tensor", "%", "tensor_active_percent", of_rest=False),
    _Column("peak", "GiB", "memory_used_bytes_max"),
    _Column("of", "GiB", "memory_total_bytes", of_rest=False),
    _Column("others", "GiB", "others_memory_bytes_max", of_rest=False, is_shown=any),
    _Column("others", "%", "others_utilization_percent", of_rest=False, is_shown=any),
    _Column("power", "W", "power_watts_mean"),
    _Column("temp", "C", "temperature_celsius_max"),
    _Column("throttled", "%", "throttled_percent", is_shown=any),
)


def gpu_rows(gpus: Sequence[GpuSummary], *, full: bool = False, max_width: float = math.inf) -> list[list[str]]:
    """Return the cells of a table, with titles and units in the first two rows; ``full``: a row for each GPU.

    If the rows are wider than ``max_width``, columns are left out.
    """
    columns = [column for column in COLUMNS if column.is_shown(column.values(gpus))]
    alone, rest = gpus, []
    if len(gpus) > _MAX_ROWS and not full:
        columns = [column for column in columns if column.of_rest]
        ordered = sorted(gpus, key=lambda gpu: (not gpu.errors, gpu.utilization_percent_mean or 0.0))
        alone, rest = ordered[:_MAX_ALONE], ordered[_MAX_ALONE:]
    extra = [column for column in columns if not column.of_rest]
    while True:
        rows = _rows(alone, rest, columns)
        if not extra or sum(max(map(len, cells)) + 2 for cells in zip(*rows, strict=True)) <= max_width:
            return rows
        columns.remove(extra.pop(0))


def _rows(alone: Sequence[GpuSummary], rest: Sequence[GpuSummary], columns: Sequence[_Column]) -> list[list[str]]:
    heads = 2 if rest or any(gpu.node for gpu in alone) else 1
    rows = [
        [*("node", "GPU")[-heads:], *(column.title for column in columns), ""],
        [*[""] * heads, *(column.unit for column in columns), ""],
    ]
    for gpu in alone:
        cells = [column.range([gpu]) for column in columns]
        rows.append([*[str(gpu.node), str(gpu.index)][-heads:], *cells, "error" if gpu.errors else ""])
    if rest:
        rows.append(["others", f"{len(rest):,}", *(column.range(rest) for column in columns), ""])
    return rows


def gpu_lines(gpus: Sequence[GpuSummary], *, full: bool = False) -> list[str]:
    """Return the table as text, as wide as the terminal."""
    if not gpus:
        return []
    rows = gpu_rows(gpus, full=full, max_width=line_width())
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    lines = [f"{'  '.join(map(str.rjust, row[:-1], widths))}  {row[-1]}".rstrip() for row in rows]
    if len(gpus) > len(rows):
        note = "errors and the least busy, min/median/max of the others (report FILE --full: all)"
        lines.insert(0, f"{len(gpus):,} GPUs: {note}")
    return lines


def gpu_sentences(gpus: Sequence[GpuSummary], *, full: bool = False) -> list[str]:
    """Return what the table does not show: errors, and the energy of all GPUs."""
    by_error: defaultdict[str, list[GpuSummary]] = defaultdict(list)
    for gpu in gpus:
        for error in gpu.errors:
            by_error[printable(error)].append(gpu)
    lines = [f"ERROR on {_names(some, gpus)}: {error}" for error, some in by_error.items()]
    more = 0 if full else len(lines) - _MAX_ERRORS
    if more > 0:
        lines[_MAX_ERRORS:] = [f"{plural(more, 'more GPU error')} (lightning-gpu-tools report FILE --full)"]
    watt_hours = sum(gpu.energy_joules or 0.0 for gpu in gpus) / 3600
    if watt_hours:
        amount = f"{watt_hours:,.1f} Wh" if watt_hours < 1000 else f"{watt_hours / 1000:,.1f} kWh"
        lines.append(f"GPU energy: {amount}.")
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
