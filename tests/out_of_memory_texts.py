"""Out-of-memory errors: messages as torch's c10/cuda/CUDACachingAllocator.cpp writes them, and what is known then."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_gpu_tools.advice.out_of_memory import ModelSize, OutOfMemory, parse
from lightning_gpu_tools.training.memory_readings import MemoryHoldings, MemoryReading, RankMemory, StepMemory

MIB, GIB = 2**20, 2**30


def size_text(size: int) -> str:
    """Return a size as torch's format_size gives it."""
    if size <= 1024:
        return f"{size} bytes"
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (1024, "KiB")):
        if size > unit or unit == 1024:
            return f"{size / unit:.2f} {name}"
    raise AssertionError


def torch_text(
    requested: int,
    total: int,
    free: int,
    allocated: int,
    cached: int,
    process: int | None,
    others: Mapping[int, int] = {},
    allowed: int | None = None,
) -> str:
    """Return the message for an allocation that fails, in bytes; ``process`` is this one, ``others`` are by number."""
    return (
        f"CUDA out of memory. Tried to allocate {size_text(requested)}. GPU 0 has a total capacity of "
        f"{size_text(total)} of which {size_text(free)} is free. "
        + "".join(f"Process {pid} has {size_text(size)} memory in use. " for pid, size in others.items())
        + (
            ""
            if process is None
            else f"Including non-PyTorch memory, this process has {size_text(process)} memory in use. "
        )
        + ("" if allowed is None else f"{size_text(allowed)} allowed; ")
        + f"Of the allocated memory {size_text(allocated)} is allocated by PyTorch, and {size_text(cached)} is "
        "reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for Memory "
        "Management  (https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
    )


def counted(batch_size: int, begin: int, peak: int) -> RankMemory:
    """Return what a rank has counted: steps of one size, with 2 GiB each of parameters and gradients, 3 of states."""

    def reading(allocated: int) -> MemoryReading:
        return MemoryReading(
            allocated_bytes=allocated, peak_allocated_bytes=peak, reserved_bytes=peak, peak_reserved_bytes=peak
        )

    first = StepMemory(step=1, batch_shape=(batch_size, 512), begin=reading(2 * GIB))
    return RankMemory(
        latest=reading(begin),
        holdings=MemoryHoldings(
            parameters_bytes=2 * GIB, gradients_bytes=2 * GIB, gradients_kept_bytes=2 * GIB, optimizer_bytes=3 * GIB
        ),
        first_step=first,
        last_step=StepMemory(step=9, batch_shape=(batch_size, 512), begin=reading(begin), after_forward=reading(peak)),
        peaks_bytes={"forward": peak},
    )


def an_error(
    *,
    allocated: int = 22 * GIB,
    cached: int = 0,
    free: int = 10 * MIB,
    others: Mapping[int, int] = {},
    allowed: int | None = None,
    **known: Any,
) -> OutOfMemory:
    """Return an error of torch on a GPU of 24 GiB, where 200 MiB could not be had in forward."""
    process = allocated + cached + GIB // 2
    message = parse(torch_text(200 * MIB, 24 * GIB, free, allocated, cached, process, others, allowed))
    assert message is not None
    model = ModelSize(parameters_bytes=2 * GIB, gradients_bytes=2 * GIB, optimizer_bytes=3 * GIB, fusible=("AdamW",))
    return OutOfMemory(
        **{"message": message, "phase": "training_step/forward", "step": 12, "uuid": "GPU-0", "model": model, **known}
    )
