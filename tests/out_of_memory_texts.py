"""Messages of out-of-memory errors, as torch's c10/cuda/CUDACachingAllocator.cpp writes them."""

from __future__ import annotations

from collections.abc import Mapping

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
