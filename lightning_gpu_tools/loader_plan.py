"""How many workers a DataLoader needs so that the training step need not wait, and how many this machine can feed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from lightning_gpu_tools.readings import HostBudget, LoaderSettings

# Workers must be this much faster than the step, or the fluctuation of load times empties the queue (monitoring of a
# loader with 1 to 8 workers: with exactly load time / step time workers 6 to 9 % of the wait remained).
_HEADROOM = 1.15
# Queues and unpickling need room in /dev/shm beside the batches themselves.
_SHM_SHARE = 0.8
_DEFAULT_PREFETCH_FACTOR = 2  # torch.utils.data.DataLoader's own


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadCost:
    """What one batch costs to load.

    Attributes:
        wall_s: Time one worker needs for one batch.
        cpu_s: CPU time in it; ``None`` if it was not measured.
        batch_bytes: Size of the batch; ``None`` if it was not measured.
    """

    wall_s: float
    cpu_s: float | None = None
    batch_bytes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderPlan:
    """Settings for a DataLoader, and what they can bring.

    Attributes:
        settings: What to set.
        limited_by: What keeps the number of workers below what the step needs; ``None`` if nothing does.
        workers_needed: How many workers would feed the step without a wait.
        step_s: Predicted time from step to step with these settings.
    """

    settings: LoaderSettings
    limited_by: Literal["cores", "shm"] | None
    workers_needed: int
    step_s: float


def plan_loader(current: LoaderSettings, cost: LoadCost, *, step_s: float, host: HostBudget, cuda: bool) -> LoaderPlan:
    """Return the smallest number of workers that feeds a step of ``step_s`` seconds, within what the host grants.

    Args:
        current: The settings in use.
        cost: What a batch costs to load, measured.
        step_s: Time of a step without any wait for data, in seconds.
        host: What the host grants; shared by ``host.local_ranks`` training processes.
        cuda: Whether batches go to an NVIDIA GPU; only then is pinned memory of use.
    """
    workers_needed = max(1, math.ceil(_HEADROOM * cost.wall_s / step_s))
    limits: dict[Literal["cores", "shm"], int] = {}
    if cost.cpu_s:
        # One core is the training process's own.
        spare_cores = max(1.0, host.cores / host.local_ranks - 1)
        limits["cores"] = max(1, int(spare_cores / min(1.0, cost.cpu_s / cost.wall_s)))
    prefetch_factor = current.prefetch_factor or _DEFAULT_PREFETCH_FACTOR
    if cost.batch_bytes and host.shm_free_bytes is not None:
        room = _SHM_SHARE * host.shm_free_bytes / host.local_ranks
        limits["shm"] = int(room / (prefetch_factor * cost.batch_bytes))
    limited_by = min(limits, key=lambda name: limits[name], default=None)
    workers = workers_needed
    if limited_by is not None and limits[limited_by] < workers_needed:
        workers = limits[limited_by]
    else:
        limited_by = None
    settings = LoaderSettings(
        num_workers=workers,
        prefetch_factor=prefetch_factor if workers else None,
        persistent_workers=workers > 0,
        pin_memory=cuda,
        batch_size=current.batch_size,
    )
    loading_s = cost.wall_s / workers if workers else cost.wall_s + step_s
    return LoaderPlan(
        settings=settings, limited_by=limited_by, workers_needed=workers_needed, step_s=max(step_s, loading_s)
    )
