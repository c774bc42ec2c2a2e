"""Facts about stalled DataLoader workers, shared by several stall causes."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_gpu_tools.advice.stall_words import COMPUTES
from lightning_gpu_tools.training.stall_facts import WorkerFacts


def awaited_of(workers: Sequence[WorkerFacts]) -> WorkerFacts:
    """Return the worker that has to deliver the next batch."""
    return next((one for one in workers if one.is_awaited), workers[0])


def is_idle(worker: WorkerFacts) -> bool:
    """Return whether a worker waits instead of computing."""
    return worker.cpu_share < COMPUTES


def name_of(worker: WorkerFacts) -> str:
    """Return the name of a worker, for the beginning of a sentence."""
    return f"Worker {worker.number} (PID {worker.activity.pid})"
