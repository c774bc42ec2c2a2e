"""The GPUs of a job as a table: a line for each GPU, or for the least busy ones of a large job."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from statistics import median
from typing import NamedTuple

from lightning_gpu_tools.advice.memory_account import MemoryAccount
from lightning_gpu_tools.gpus.metrics import GpuSummary
from lightning_gpu_tools.units import printable

MAX_ROWS = 16  # our default: two machines of eight GPUs fit on a screen next to the rest of the report
_MAX_NAMED = 8


class _Column(NamedTuple):
    title: str
    unit: str
    field: str
    hides_zero: bool = False


# All of them fit in 100 columns.
COLUMNS = (
    _Column("busy", "%", "utilization_percent_mean"),
    _Column("SMs", "%", "sm_active_percent"),
    _Column("tensor", "%", "tensor_active_percent"),
    _Column("peak", "GiB", "memory_used_bytes_max"),
    _Column("of", "GiB", "memory_total_bytes"),
    _Column("others", "GiB", "others_memory_bytes_max", hides_zero=True),
    _Column("others", "%", "others_utilization_percent", hides_zero=True),
    _Column("waits", "%", "rank_wait_percent", hides_zero=True),
    _Column("power", "W", "power_watts_mean"),
    _Column("temp", "C", "temperature_celsius_max"),
    _Column("throttled", "%", "throttled_percent", hides_zero=True),
)


def gpu_lines(gpus: Sequence[GpuSummary], *, full: bool = False) -> list[str]:
    """Return a table of the GPUs, without columns that have no data.

    Of more than 16 GPUs, those with errors and the least busy ones have a row, or all if ``full``.
    """
    if not gpus:
        return []
    shown = gpus
    if len(gpus) > MAX_ROWS and not full:
        shown = sorted(gpus, key=lambda gpu: (not gpu.errors, gpu.utilization_percent_mean or 0.0))[:MAX_ROWS]
    heads = ("node", "GPU") if any(gpu.node for gpu in shown) else ("GPU",)
    columns = []
    for column in COLUMNS:
        values = [getattr(gpu, column.field) for gpu in shown]
        if any(values) if column.hides_zero else any(value is not None for value in values):
            columns.append(column)
    rows = [
        [*heads, *(column.title for column in columns), ""],
        [*("" for _ in heads), *(column.unit for column in columns), ""],
    ]
    for gpu in shown:
        place = [str(gpu.node), str(gpu.index)][-len(heads) :]
        cells = [_cell(getattr(gpu, column.field), column.unit) for column in columns]
        rows.append([*place, *cells, "error" if gpu.errors else ""])
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    lines = [f"{'  '.join(map(str.rjust, row[:-1], widths))}  {row[-1]}".rstrip() for row in rows]
    if len(gpus) > len(shown):
        busy = median(gpu.utilization_percent_mean or 0.0 for gpu in gpus)
        note = f"half of them are at most {busy:.0f}% busy; errors and the least busy (report FILE --full: all)"
        lines.insert(0, f"{len(gpus):,} GPUs: {note}")
    return lines


def _cell(value: float | None, unit: str) -> str:
    if value is None:
        return "?"
    if unit == "GiB":
        value /= 2**30
    return f"{value:.1f}" if unit == "GiB" and value < 99.95 else f"{value:.0f}"


def gpu_label(gpu: GpuSummary | MemoryAccount) -> str:
    """Return the short name of a GPU."""
    return f"{f'node {gpu.node} ' if gpu.node else ''}GPU {gpu.index}"


def gpu_errors(gpus: Sequence[GpuSummary]) -> Iterator[str]:
    """Yield each error, and the GPUs that have reported it."""
    by_error: defaultdict[str, list[GpuSummary]] = defaultdict(list)
    for gpu in gpus:
        for error in gpu.errors:
            by_error[printable(error)].append(gpu)
    for error, some in by_error.items():
        names = ", ".join(map(gpu_label, some)) if len(some) <= _MAX_NAMED else f"{len(some):,} GPUs"
        yield f"ERROR on {names}: {error}"
