"""Which part of a GPU's memory and utilization is this job's, and which is someone else's. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from lightning_gpu_tools.gpus.readings import GpuProcess


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharing:
    """What the processes on a GPU use, as far as the driver reports it; ``None`` = unknown, never 0.

    Attributes:
        own_memory_bytes: Memory of this job's processes.
        others_memory_bytes: Memory of everybody else's that the driver lists.
        own_utilization_percent: How busy this job's processes kept the GPU.
        others_utilization_percent: How busy all others kept it.
    """

    own_memory_bytes: int | None = None
    others_memory_bytes: int | None = None
    own_utilization_percent: float | None = None
    others_utilization_percent: float | None = None


def share_out(processes: Sequence[GpuProcess] | None, own_pids: Collection[int] | None) -> Sharing:
    """Return who uses what of a GPU, by the processes that the driver lists on it, if they can be read.

    ``own_pids`` are this job's by the driver's numbers; ``None`` if those are not known, as in a container with process
    numbers of its own.
    """
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
    sizes = [process.memory_used_bytes for process in processes]
    known = [size for size in sizes if size is not None]
    return sum(known) if len(known) == len(sizes) else None


def _utilization(processes: Sequence[GpuProcess]) -> float | None:
    percents = [process.utilization_percent for process in processes]
    known = [percent for percent in percents if percent is not None]
    return min(sum(known), 100.0) if len(known) == len(percents) else None
