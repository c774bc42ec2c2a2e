"""Every private name of torch that measuring a training needs, asked for when it is used.

A release of torch without one of them costs what its docstring says, and never the training: each function then
returns ``None``.
"""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any

import torch


def default_store() -> Any:
    """Return the store in which ``torch.distributed`` met the other ranks. Without it no rank hears of another."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    get = getattr(torch.distributed.distributed_c10d, "_get_default_store", None)
    return None if get is None else get()


def own_store() -> Any:
    """Return another connection to that store, which no blocked call of the first one holds up.

    Without it a rank that stalls does not learn where the others stand. Ranks that met in a file have none: the file
    grows with every message.
    """
    store = bare = default_store()
    distributed: Any = torch.distributed  # of which type checkers do not know all
    while hasattr(bare, "underlying_store"):
        bare = bare.underlying_store
    if bare is None or not isinstance(bare, distributed.TCPStore):
        return None
    clone = getattr(store, "clone", None)
    if clone is not None:
        return clone()
    return distributed.TCPStore(bare.host, bare.port, is_master=False, wait_for_workers=False)


# What the functions below read of a DataLoader's iterator that has workers.
_OF_ITERATOR = ("_workers", "_task_info", "_data_queue")


def missing_of_iterator(iterator: object) -> set[str]:
    """Return the names that the functions below would miss of a DataLoader's iterator."""
    if iterator is None:
        return {"the DataLoader's iterator"}
    return {f"{type(iterator).__name__}.{name}" for name in _OF_ITERATOR if not hasattr(iterator, name)}


def kept_iterator(loader: object) -> object | None:
    """Return the iterator that a DataLoader keeps for its next epoch. Without it its workers are not watched then."""
    return getattr(loader, "_iterator", None)


def workers(iterator: object) -> list[BaseProcess]:
    """Return the workers of a DataLoader's iterator. Without it nothing is known of what they do and how they end."""
    return list(getattr(iterator, "_workers", None) or ())


def worker_pids(iterator: object) -> list[int]:
    """Return the numbers of their processes."""
    return [worker.pid for worker in workers(iterator) if worker.pid]


# In which a training waits for a batch of workers.
_WAITS = ("__next__", "_next_data", "_get_data", "_try_get_data")


def iterator_waited_for(frames: Sequence[FrameType]) -> object | None:
    """Return the DataLoader's iterator that a stack (outermost call first) waits for; ``None`` if it waits for none.

    Without these names a stall while waiting for data is put down to the training process.
    """
    for frame in reversed(frames):
        if frame.f_code.co_name in _WAITS and hasattr(iterator := frame.f_locals.get("self"), "_workers"):
            return iterator
    return None


def awaited_worker(iterator: object) -> int | None:
    """Return the number of the worker that the next batch comes from. Without it the first one is blamed."""
    ordered, number = getattr(iterator, "_task_info", None), getattr(iterator, "_rcvd_idx", None)
    entry = None if ordered is None else ordered.get(number)
    return None if entry is None else entry[0]


def ready_share(iterator: object) -> float | None:
    """Return the share of ordered batches that are ready out of turn. Without it one slow worker seems slow loading."""
    ordered = getattr(iterator, "_task_info", None)  # (worker,), or (worker, batch) once the batch is there
    return sum(len(entry) == 2 for entry in ordered.values()) / len(ordered) if ordered else None


def is_batch_ready(iterator: object) -> bool | None:
    """Return whether a batch is ready. Without it, or on macOS, a loader that keeps up seems to lag."""
    queue = getattr(iterator, "_data_queue", None)
    try:
        return None if queue is None else queue.qsize() > 0
    except NotImplementedError:  # macOS
        return None


def is_profiling() -> bool | None:
    """Return whether the process's one profiler is in use. Without it no step is profiled."""
    enabled = getattr(getattr(torch._C, "_autograd", None), "_profiler_enabled", None)
    return None if enabled is None else bool(enabled())


def dispatch_mode() -> Any:
    """Return the class whose subclasses see every operation. Without it no source line is named for a wait."""
    try:
        from torch.utils._python_dispatch import TorchDispatchMode
    except ImportError:
        return None
    return TorchDispatchMode


def value_operation() -> object:
    """Return the operation that reads a tensor's value, as ``.item()`` does. Without it no line is named for a wait."""
    return getattr(getattr(torch.ops.aten, "_local_scalar_dense", None), "default", None)


def is_compiled(module: torch.nn.Module) -> bool:
    """Return whether a module is compiled. Without it profiling compiles a compiled step once more."""
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def queue_in_backward() -> Any:
    """Return what queues a function for when autograd has computed a graph. Without it backward is not told apart."""
    return getattr(getattr(torch.autograd.Variable, "_execution_engine", None), "queue_callback", None)


def out_of_memory_observer() -> Any:
    """Return what has a function called when torch's allocator fails; calling it starts CUDA.

    Without it, as in a build for the CPU, an error's message alone says what was allocated.
    """
    return getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)


def memory_recorder() -> Any:
    """Return what starts and stops the recording of allocations. Without it a snapshot has no history."""
    return getattr(torch.cuda.memory, "_record_memory_history", None)


def memory_dumper() -> Any:
    """Return what writes a snapshot of all that is allocated. Without it there is none."""
    return getattr(torch.cuda.memory, "_dump_snapshot", None)
