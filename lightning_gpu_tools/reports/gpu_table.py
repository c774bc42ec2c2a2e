"""The GPUs of a job as a table: a line for each GPU, or for the least busy ones of a large job."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from lightning_gpu_tools.advice.memory_account import MemoryAccount
from lightning_gpu_tools.gpus.metrics import GpuSummary
from lightning_gpu_tools.gpus.readings import not_none
from lightning_gpu_tools.units import line_width, plural, printable

_MAX_ROWS = 16  # our default: two machines of eight GPUs fit on a screen next to the rest of the report
_MAX_ERRORS = 5
_MAX_NAMED = 8


class _Column(NamedTuple):
    title: str
    unit: str
    field: str
    is_extra: bool = False  # left out first if the lines are too long
    hides_zero: bool = False

    def is_shown(self, gpus: Sequence[GpuSummary]) -> bool:
        values = not_none(getattr(gpu, self.field) for gpu in gpus)
        return any(values) if self.hides_zero else bool(values) or self is COLUMNS[0]

    def cell(self, gpu: GpuSummary) -> str:
        value = getattr(gpu, self.field)
        if value is None:
            return "?"
        if self.unit == "GiB":
            value /= 2**30
        if abs(value) >= 1e6:  # no GPU has that, but a file may
            return f"{value:.0e}"
        return f"{value:.1f}" if self.unit == "GiB" and value < 99.95 else f"{value:.0f}"


COLUMNS = (
    _Column("busy", "%", "utilization_percent_mean"),
    _Column("waits", "%", "rank_wait_percent", hides_zero=True),
    _Column("p5", "%", "utilization_percent_p5", is_extra=True),
    _Column("p95", "%", "utilization_percent_p95", is_extra=True),
    _Column("SMs", "%", "sm_active_percent"),
    _Column("tensor", "%", "tensor_active_percent", is_extra=True),
    _Column("peak", "GiB", "memory_used_bytes_max"),
    _Column("of", "GiB", "memory_total_bytes", is_extra=True),
    _Column("others", "GiB", "others_memory_bytes_max", is_extra=True, hides_zero=True),
    _Column("others", "%", "others_utilization_percent", is_extra=True, hides_zero=True),
    _Column("power", "W", "power_watts_mean"),
    _Column("temp", "C", "temperature_celsius_max"),
    _Column("throttled", "%", "throttled_percent", hides_zero=True),
)


def gpu_rows(gpus: Sequence[GpuSummary], *, full: bool = False, max_width: float = math.inf) -> list[list[str]]:
    """Return the cells of a table, with titles and units in the first two rows.

    Of more than 16 GPUs, those with errors and the least busy ones have a row, or all if ``full``. If the rows are
    wider than ``max_width``, columns are left out.
    """
    if len(gpus) > _MAX_ROWS and not full:
        gpus = sorted(gpus, key=lambda gpu: (not gpu.errors, gpu.utilization_percent_mean or 0.0))[:_MAX_ROWS]
    heads = ("node", "GPU") if any(gpu.node for gpu in gpus) else ("GPU",)
    columns = [column for column in COLUMNS if column.is_shown(gpus)]
    extra = [column for column in columns if column.is_extra]
    while True:
        rows = [
            [*heads, *(column.title for column in columns), ""],
            [*("" for _ in heads), *(column.unit for column in columns), ""],
        ]
        for gpu in gpus:
            place = [str(gpu.node), str(gpu.index)][-len(heads) :]
            rows.append([*place, *(column.cell(gpu) for column in columns), "error" if gpu.errors else ""])
        if not extra or sum(max(map(len, cells)) + 2 for cells in zip(*rows, strict=True)) <= max_width:
            return rows
        columns.remove(extra.pop(0))


def gpu_lines(gpus: Sequence[GpuSummary], *, full: bool = False) -> list[str]:
    """Return the table as text, as wide as the terminal."""
    if not gpus:
        return []
    rows = gpu_rows(gpus, full=full, max_width=line_width())
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    lines = [f"{'  '.join(map(str.rjust, row[:-1], widths))}  {row[-1]}".rstrip() for row in rows]
    if len(gpus) > len(rows):
        busy = median(gpu.utilization_percent_mean or 0.0 for gpu in gpus)
        note = f"half of them are at most {busy:.0f}% busy; errors and the least busy (report FILE --full: all)"
        lines.insert(0, f"{len(gpus):,} GPUs: {note}")
    return lines


def gpu_label(gpu: GpuSummary | MemoryAccount) -> str:
    """Return the short name of a GPU."""
    return f"{f'node {gpu.node} ' if gpu.node else ''}GPU {gpu.index}"


def gpu_sentences(gpus: Sequence[GpuSummary], *, full: bool = False) -> list[str]:
    """Return what the table does not show: errors, and the energy of all GPUs."""
    by_error: defaultdict[str, list[GpuSummary]] = defaultdict(list)
    for gpu in gpus:
        for error in gpu.errors:
            by_error[printable(error)].append(gpu)
    lines = []
    for error, some in by_error.items():
        names = ", ".join(map(gpu_label, some)) if len(some) <= _MAX_NAMED else f"{len(some):,} GPUs"
        lines.append(f"ERROR on {names}: {error}")
    more = 0 if full else len(lines) - _MAX_ERRORS
    if more > 0:
        lines[_MAX_ERRORS:] = [f"{plural(more, 'more GPU error')} (lightning-gpu-tools report FILE --full)"]
    watt_hours = sum(gpu.energy_joules or 0.0 for gpu in gpus) / 3600
    if watt_hours:
        lines.append(f"GPU energy: {watt_hours:,.1f} Wh.")
    return lines
