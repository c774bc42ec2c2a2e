"""Every private name of torch that measuring a training needs; where a release lacks one, a function returns ``None``.

``Without it`` says what that costs: never the training.
"""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any

import torch


def matmul_precision() -> str | None:
    """Return how exact products of float32 matrices are, as ``torch.set_float32_matmul_precision`` names it.

    torch refuses to answer where ``torch.backends.cuda.matmul.fp32_precision`` alone was set, its own way since 2.9.
    ``None``: it is neither.
    """
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return "high" if torch.backends.cuda.matmul.fp32_precision == "tf32" else None


def default_store() -> Any:
    """Return the store in which ``torch.distributed`` met the other ranks. Without it no rank hears of another."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    get = getattr(torch.distributed.distributed_c10d, "_get_default_store", None)
    return None if get is None else get()


def own_store() -> Any:
    """Return another connection to that store, which no blocked call holds up; none to a file, which would grow.

    Without it a rank that stalls does not learn where the others stand.
    """
    store = bare = default_store()
    distributed: Any = torch.distributed  # not all of it has types
    while hasattr(bare, "underlying_store"):
        bare = bare.underlying_store
    if bare is None or not isinstance(bare, distributed.TCPStore):
        return None
    clone = getattr(store, "clone", None)
    if clone is not None:
        return clone()
    return distributed.TCPStore(bare.host, bare.port, is_master=False, wait_for_workers=False)


# What the functions below read.
_OF_ITERATOR = ("_workers", "_task_info", "_data_queue")


def missing_of_iterator(iterator: object) -> set[str]:
    """Return what a DataLoader's iterator lacks of what is read below."""
    if iterator is None:
        return {"the DataLoader's iterator"}
    return {f"{type(iterator).__name__}.{name}" for name in _OF_ITERATOR if not hasattr(iterator, name)}


def kept_iterator(loader: object) -> object | None:
    """Return the iterator of persistent workers. Without it they are not watched."""
    return getattr(loader, "_iterator", None)


def workers(iterator: object) -> list[BaseProcess]:
    """Return the workers of a DataLoader's iterator. Without it they are not watched."""
    return list(getattr(iterator, "_workers", None) or ())


def worker_pids(iterator: object) -> list[int]:
    """Return their process numbers."""
    return [worker.pid for worker in workers(iterator) if worker.pid]


# Methods in which a training waits for a worker's batch.
_WAITS = ("__next__", "_next_data", "_get_data", "_try_get_data")


def iterator_waited_for(frames: Sequence[FrameType]) -> object | None:
    """Return the DataLoader's iterator that a stack waits for, if any.

    Without it a stall while waiting for data is put down to the training process.
    """
    for frame in reversed(frames):
        if frame.f_code.co_name in _WAITS and hasattr(iterator := frame.f_locals.get("self"), "_workers"):
            return iterator
    return None


def awaited_worker(iterator: object) -> int | None:
    """Return which worker the next batch comes from. Without it the first one is blamed."""
    ordered, number = getattr(iterator, "_task_info", None), getattr(iterator, "_rcvd_idx", None)
    entry = None if ordered is None else ordered.get(number)
    return None if entry is None else entry[0]


def ready_share(iterator: object) -> float | None:
    """Return the share of ordered batches that are ready. Without it one slow worker seems slow loading."""
    ordered = getattr(iterator, "_task_info", None)  # (worker,), or (worker, batch) once the batch is there
    return sum(len(entry) == 2 for entry in ordered.values()) / len(ordered) if ordered else None


def is_batch_ready(iterator: object) -> bool | None:
    """Return whether a batch is ready. Without it a loader that keeps up seems to lag."""
    queue = getattr(iterator, "_data_queue", None)
    try:
        return None if queue is None else queue.qsize() > 0
    except NotImplementedError:  # macOS
        return None


def worker_loop() -> Any:
    """Return what a DataLoader's worker runs. Without it no source line of a worker is named."""
    return getattr(getattr(getattr(torch.utils.data, "_utils", None), "worker", None), "_worker_loop", None)


def gpu_sleep() -> Any:
    """Return what keeps the GPU waiting for some cycles of its clock. Without it no step is held."""
    return getattr(torch.cuda, "_sleep", None)


def queue_in_backward() -> Any:
    """Return what queues a callback of autograd. Without it a backward's wait for other ranks is part of it."""
    return getattr(getattr(torch.autograd.Variable, "_execution_engine", None), "queue_callback", None)


def out_of_memory_observer() -> Any:
    """Return what registers a callback for failures of torch's allocator, and starts CUDA; not in a build for the CPU.

    Without it only an error's message says what was allocated.
    """
    return getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)


def memory_recorder() -> Any:
    """Return what records allocations. Without it a snapshot has no history."""
    return getattr(torch.cuda.memory, "_record_memory_history", None)


def is_recording_memory() -> Any:
    """Return what says whether somebody records allocations. Without it the largest batch that fits is not known."""
    return getattr(torch._C, "_cuda_isHistoryEnabled", None)


def memory_dumper() -> Any:
    """Return what writes a snapshot of allocations. Without it there is none."""
    return getattr(torch.cuda.memory, "_dump_snapshot", None)
