"""Which part of a GPU's memory and utilization is this job's, and which is someone else's. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from lightning_gpu_tools.gpus.readings import GpuProcess, known


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharing:
    """What this job's processes use of a GPU, and all others that the driver lists; ``None`` = unknown, never 0."""

    own_memory_bytes: int | None = None
    others_memory_bytes: int | None = None
    own_utilization_percent: float | None = None
    others_utilization_percent: float | None = None


def share_out(processes: Sequence[GpuProcess] | None, own_pids: Collection[int] | None) -> Sharing:
    """Return who uses what of a GPU, by the processes that the driver lists on it, and its numbers of this job's."""
    if not processes or own_pids is None:  # an empty list does not mean idle: containers hide processes
        return Sharing()
    own = [process for process in processes if process.pid in own_pids]
    others = [process for process in processes if process.pid not in own_pids]
    return Sharing(
        own_memory_bytes=_memory(own),
        others_memory_bytes=_memory(others),
        own_utilization_percent=_utilization(own),
        others_utilization_percent=_utilization(others),
    )


def _memory(processes: Sequence[GpuProcess]) -> int | None:
    sizes = known(one.memory_used_bytes for one in processes)
    return sum(sizes) if len(sizes) == len(processes) else None


def _utilization(processes: Sequence[GpuProcess]) -> float | None:
    percents = known(one.utilization_percent for one in processes)
    return min(sum(percents), 100.0) if len(percents) == len(processes) else None
