"""All private torch names that the measurements use. If a release lacks one, its function returns ``None``.

``Without it`` describes the consequence, which never affects training.
"""

import math
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any

import torch

from lightning_gpu_tools.patches import frames_kept
from lightning_gpu_tools.units import printable


def matmul_precision() -> str | None:
    """Return the precision of float32 matrix products, in terms of ``torch.set_float32_matmul_precision``.

    That API raises if only ``torch.backends.cuda.matmul.fp32_precision`` was set, the new way since torch 2.9; the
    result is then "high" for TF32, else ``None``.
    """
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return "high" if torch.backends.cuda.matmul.fp32_precision == "tf32" else None


def default_store() -> Any:
    """Return the rendezvous store of ``torch.distributed``. Without it, ranks cannot exchange facts."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    get = getattr(torch.distributed.distributed_c10d, "_get_default_store", None)
    return None if get is None else get()


def own_store() -> Any:
    """Open a second connection to that store, so that a blocked call on the first one cannot delay it.

    Return ``None`` for a ``FileStore``, whose file every write makes longer.

    Without it, a stalled rank does not get the state of the others.
    """
    store = default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    distributed: Any = torch.distributed  # only partly typed
    if store is None or not isinstance(store, distributed.TCPStore):
        return None
    return distributed.TCPStore(store.host, store.port, is_master=False, wait_for_workers=False)


_COLLECTIVE_RECORDS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")  # gloo's, since torch 2.8; NCCL's, since 2.5


def collective_records() -> list[bytes]:
    """Return torch's records of the collectives that this process has called, as JSON.

    They have no stacks, for which torch would import its compiler in 5 to 20 s. Since torch 2.13 at the latest, torch
    keeps them by default; before that, ``TORCH_FR_BUFFER_SIZE`` has to be set. Without the records, only the stacks of
    the training threads show where ranks wait.
    """
    module = getattr(torch._C, "_distributed_c10d", None)
    dumps = [getattr(module, name, None) for name in _COLLECTIVE_RECORDS]
    return [dump() for dump in dumps if dump is not None]


def workers(iterator: object) -> list[BaseProcess]:
    """Return the workers of a DataLoader's iterator. Without it, they are not watched."""
    return list(getattr(iterator, "_workers", None) or ())


def worker_pids(iterator: object) -> list[int]:
    """Return the PIDs of the workers."""
    return [worker.pid for worker in workers(iterator) if worker.pid]


_INDICES = "_index_sampler"  # of a DataLoader and of its iterator


def _attributes(thing: object) -> dict[str, Any]:
    try:
        found: dict[str, Any] = object.__getattribute__(thing, "__dict__")  # without a class's own way
    except AttributeError:
        return {}
    return found


def loader_waited_for(frame: FrameType | None, loaders: Sequence[object]) -> int | None:
    """Return the place of the loader that a stack is waiting for; call this in ``frames_kept``.

    Without it, advice for several loaders does not name the slow one.
    """
    indices = [getattr(loader, _INDICES, loader) for loader in loaders]
    while frame is not None:
        owner = frame.f_locals.get("self")
        known = _attributes(owner)
        signs = (owner, known.get("_loader"), known.get(_INDICES))  # the second: an iterator of this package
        for place, (loader, its_indices) in enumerate(zip(loaders, indices, strict=True)):
            if any(one is not None and (one is loader or one is its_indices) for one in signs):
                return place
        frame = frame.f_back
    return None


# Methods in which training waits for a worker's batch.
_WAITS = ("__next__", "_next_data", "_get_data", "_try_get_data")


def iterator_waited_for(frames: Sequence[FrameType]) -> object | None:
    """Return the DataLoader iterator that a stack is waiting for, if any.

    Without it, a stall in data loading is attributed to the training process.
    """
    with frames_kept():
        for frame in reversed(frames):
            if frame.f_code.co_name in _WAITS and hasattr(iterator := frame.f_locals.get("self"), "_workers"):
                return iterator
    return None


def awaited_worker(iterator: object) -> int | None:
    """Return the number of the worker that loads the next batch. Without it, the first worker is reported."""
    ordered, number = getattr(iterator, "_task_info", None), getattr(iterator, "_rcvd_idx", None)
    entry = None if ordered is None else ordered.get(number)
    return None if entry is None else entry[0]


def ready_share(iterator: object) -> float | None:
    """Return the share of requested batches that are ready. Without it, one slow worker looks like slow loading."""
    ordered = getattr(iterator, "_task_info", None)  # (worker,), or (worker, batch) once the batch has arrived
    return sum(len(entry) == 2 for entry in ordered.values()) / len(ordered) if ordered else None


def is_batch_ready(iterator: object) -> bool | None:
    """Return whether a batch is ready. Without it, a loader that keeps up seems to lag."""
    queue = getattr(iterator, "_data_queue", None)
    return None if queue is None else queue.qsize() > 0


# Of torch.utils.data: runs a worker, and loads the samples of a batch. Without them, no source line of a worker is
# reported, and an error of a dataset in a worker lacks the index.
WORKER_LOOP = "_utils.worker._worker_loop"
FETCH = "_utils.fetch._MapDatasetFetcher.fetch"
# Of torch._C: what torch.cuda.synchronize calls. Without it, such waits are not among the lines that wait for the GPU.
SYNCHRONIZE = "_cuda_synchronize"
# Of torch, for `find`:
# Makes the GPU wait for a number of clock cycles. Without it, no step is held.
GPU_SLEEP = "cuda._sleep"
# Queues an autograd callback. Without it, backward includes its wait for other ranks.
QUEUE_IN_BACKWARD = "autograd.Variable._execution_engine.queue_callback"
# Registers a callback for allocator failures, and starts CUDA. Without it, as in CPU builds, the only facts about
# memory are those in the error message.
OUT_OF_MEMORY_OBSERVER = "_C._cuda_attach_out_of_memory_observer"
# Records allocations, and reports whether someone does. Without them, there are no lines and no largest batch.
MEMORY_RECORDER, IS_RECORDING_MEMORY = "cuda.memory._record_memory_history", "_C._cuda_isHistoryEnabled"


def find(path: str) -> Any:
    """Return a function of torch; ``None`` if this release or build lacks it."""
    found: Any = torch
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


def noting_index(fetch: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Wrap ``FETCH`` to note the dataset's index in its errors, for ``advice.workers``. Needs Python 3.11."""

    def fetched(self: Any, indices: Any) -> Any:
        try:
            return fetch(self, indices)
        except Exception as error:
            index = index_of([frame for frame, _ in traceback.walk_tb(error.__traceback__)])
            if index is not None and hasattr(error, "add_note"):
                error.add_note(f"At index {index} of the dataset.")
            raise

    return fetched


def index_of(frames: Sequence[FrameType]) -> str | None:
    """Return the index with which torch requested a sample from the dataset. Without it, as without ``FETCH``."""
    for caller, frame in reversed(list(pairwise(frames))):
        if caller.f_code.co_filename.endswith("torch/utils/data/_utils/fetch.py"):
            names = frame.f_code.co_varnames
            is_request = frame.f_code.co_name == "__getitem__" and len(names) > 1
            return printable(repr(frame.f_locals.get(names[1])), 50) if is_request else None
    return None


def accumulation(weight: torch.Tensor) -> Any:
    """Return the node of the autograd graph that accumulates a weight's gradient.

    Without it, the same as without ``collectives_started``.
    """
    return torch.autograd.graph.get_gradient_edge(weight).node


def collectives_started() -> int:
    """Return the number of collectives of the default process group so far; 0 if it does not count them.

    Without it, the GPU's time in backward is not compared between ranks from torch 2.15 on.
    """
    count = getattr(torch.distributed.group.WORLD, "_get_sequence_number_for_group", int)
    try:
        return int(count())
    except RuntimeError:  # a backend without numbers
        return 0


def waits_for_each_bucket() -> bool:
    """Return whether GPUs wait for a bucket of gradients when it is sent, as with NCCL's backend since torch 2.15.

    Without it, a rank that is slow in backward may look like those that wait for it.
    """
    get = getattr(torch.distributed.group.WORLD, "_get_backend", type)
    try:
        return type(get(torch.device("cuda"))).__name__ == "ProcessGroupNCCL2"
    except RuntimeError:  # it has no backend for GPUs
        return False


def call_once_cuda_starts(act: Callable[[], None]) -> None:
    """Call a function when CUDA starts, or now if it has. Without torch's list of such calls, it is never called."""
    later = getattr(torch.cuda, "_lazy_call", None)
    if later is not None:
        later(act)


def keep_from_compiler() -> None:
    """Keep torch.compile, if it is loaded, from compiling this package's own functions.

    Interrupted compiled code calls them, as in ``backward``. Without it, torch compiles them as well.
    """
    skip = getattr(sys.modules.get("torch._dynamo.trace_rules"), "add", None)
    if skip is not None:
        _keep_from_compiler(skip)


@cache
def _keep_from_compiler(skip: Callable[[str], object]) -> None:
    skip(__name__.partition(".")[0])


def compilations() -> list[Any] | None:
    """Return torch's record of its last 64 compilations; ``None`` if torch.compile is not loaded.

    Without it, compiled code is not measured.
    """
    read = getattr(sys.modules.get("torch._dynamo.utils"), "get_compilation_metrics", None)
    return None if read is None else read()


def allowed_bytes(gpu: torch.device) -> float:
    """Return the GPU memory that the program lets torch use. Without the function, it is unlimited."""
    fraction = getattr(torch.cuda, "get_per_process_memory_fraction", None)
    return math.inf if fraction is None else fraction(gpu) * torch.cuda.get_device_properties(gpu).total_memory


def saved_by(function: Any) -> list[object]:
    """Return the tensors that a function of an autograd graph has saved, still packed: unpacking may compute or copy.

    Without it, the tensors of a graph do not count for the tensor that holds the graph.
    """
    try:
        saved = [getattr(function, name) for name in dir(type(function)) if name.startswith("_raw_saved_")]
    except RuntimeError:  # a function in Python after backward, which has freed them
        return []
    return [getattr(one, "data", None) for some in saved for one in (some if isinstance(some, tuple) else (some,))]
