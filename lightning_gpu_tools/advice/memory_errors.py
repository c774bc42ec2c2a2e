"""Which errors say that memory has run out, and what their messages say."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from lightning_gpu_tools.units import MAX_BYTES

Source = Literal["allocator", "library", "driver", "host"]

_SIZE = r"(\d+(?:\.\d+)?) (bytes|KiB|MiB|GiB)"
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_ROUNDING = 0.01  # sizes have two decimals

# torch's c10/cuda/CUDACachingAllocator.cpp from 2.2 to 2.15, CUDAMallocAsyncAllocator.cpp, c10/core/impl/alloc_cpu.cpp;
# numpy's _ArrayMemoryError. Any field may be missing: torch 2.3 wrote a NUL that cut the message off.
_FIELDS = {
    "requested_bytes": rf"(?:[Tt]ried to allocate|Unable to allocate|[Aa]llocation of|Requested\s*:) {_SIZE}",
    "total_bytes": rf"(?:total capacity of|Device limit\s*:) {_SIZE}",
    "free_bytes": rf"(?:of which|Free \(according to CUDA\):) {_SIZE}",
    "process_bytes": rf"this process has {_SIZE}",
    "allowed_bytes": rf"(?:memory fraction\)\s*: |(?=[\d.]+ \w+ allowed;)){_SIZE}",
    "allocated_bytes": rf"(?:Of the allocated memory|Currently allocated\s*:) {_SIZE}",
    "graph_pool_bytes": rf"with {_SIZE} allocated in private pools",
    "cached_bytes": rf"and {_SIZE} is reserved by PyTorch but unallocated",
}
_OTHER_PROCESS = re.compile(rf"Process (\d+) has {_SIZE} memory in use")
_WORKERS = re.compile(
    r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\) (?:exited unexpectedly|is killed by signal: Killed)"
)


class _Kind(NamedTuple):
    pattern: str
    source: Source
    name: str
    is_certain: bool = True


# The first that fits counts.
_KINDS = (
    _Kind(r"(?:CUDA|HIP) out of memory|would exceed allowed memory|preemptively rejected", "allocator", "torch"),
    _Kind(r"CUBLAS_STATUS_ALLOC_FAILED", "library", "cuBLAS"),
    _Kind(r"CUDNN_STATUS_ALLOC_FAILED", "library", "cuDNN"),
    _Kind(r"(?i)nccl[\s\S]*out of memory|out of memory[\s\S]*nccl", "library", "NCCL"),
    # Also a wrong index in an earlier kernel, or libraries that do not match.
    _Kind(r"CUBLAS_STATUS_NOT_INITIALIZED", "library", "cuBLAS", is_certain=False),
    _Kind(r"CUDNN_STATUS_NOT_INITIALIZED|valid cuDNN algorithm", "library", "cuDNN", is_certain=False),
    _Kind(r"handles_\.at\(i\)", "library", "CUDA", is_certain=False),
    _Kind(r"(?:CUDA(?: driver)?|Triton|HIP) [Ee]rror(?: \[CUDA\])?: out of memory", "driver", "CUDA"),
    _Kind(r"DefaultCPUAllocator|Unable to allocate|Cannot allocate memory", "host", "the program"),
    _Kind(_WORKERS.pattern, "host", "the program", is_certain=False),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class OutOfMemoryMessage:
    """What an out-of-memory error says; ``None`` where it says nothing."""

    source: Source  # that ran out of the GPU's memory, or the host of its own
    name: str  # who asked for it, in words
    is_certain: bool = True  # the message has no other meaning
    requested_bytes: int | None = None  # on a GPU the segment: 2 MiB for up to 1, 20 for up to 10
    total_bytes: int | None = None
    free_bytes: int | None = None  # as the driver reports it
    others_bytes: Mapping[int, int] = field(default_factory=dict)  # by the driver's number of the process
    allowed_bytes: int | None = None  # by a limit on torch
    allocated_bytes: int | None = None  # in tensors
    graph_pool_bytes: int | None = None  # the part of it in pools of CUDA graphs, with what is free there
    cached_bytes: int | None = None  # what torch keeps beside it
    workers: tuple[int, ...] = ()  # PIDs of the loader's workers that were killed


def out_of_memory(error: BaseException) -> OutOfMemoryMessage | None:
    """Return what an error, or one behind it, says of memory that ran out; ``None`` if nothing."""
    for one in _chain(error):
        text = str(one)
        classes = {(cls.__module__.partition(".")[0], cls.__name__) for cls in type(one).__mro__}
        if ("torch", "OutOfMemoryError") in classes:
            return parse(text) or OutOfMemoryMessage(source="allocator", name="torch")
        if isinstance(one, MemoryError):
            return parse(text) or OutOfMemoryMessage(source="host", name="the program")
        if isinstance(one, (ConnectionResetError, EOFError)):  # a worker ended while it sent a batch
            return OutOfMemoryMessage(source="host", name="the program", is_certain=False)
        # An error of the user's program may quote such a text.
        if isinstance(one, (RuntimeError, OSError)) and (found := parse(text)) is not None:
            return found
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    now: BaseException | None = error
    while now is not None and id(now) not in seen:
        seen.add(id(now))
        yield now
        now = now.__cause__ or (None if now.__suppress_context__ else now.__context__)


def parse(text: str) -> OutOfMemoryMessage | None:
    """Return what the text of an error says of memory that ran out; ``None`` if nothing."""
    kind = next((kind for kind in _KINDS if re.search(kind.pattern, text)), None)
    if kind is None:
        return None
    sizes = {name: _size(re.search(pattern, text)) for name, pattern in _FIELDS.items()}
    others = {int(match[1]): size for match in _OTHER_PROCESS.finditer(text) if (size := _size(match)) is not None}
    if sizes.pop("process_bytes") is None and sizes["allocated_bytes"] is not None:
        # In a container torch does not know which process it is.
        reserved = sizes["allocated_bytes"] + (sizes["cached_bytes"] or 0)
        large = [(size, pid) for pid, size in others.items() if size >= reserved * (1 - _ROUNDING)]
        if large:
            del others[min(large)[1]]
    workers = _WORKERS.search(text)
    return OutOfMemoryMessage(
        source=kind.source,
        name=kind.name,
        is_certain=kind.is_certain,
        others_bytes=others,
        workers=() if workers is None else tuple(map(int, workers[1].split(","))),
        **sizes,
    )


def _size(match: re.Match[str] | None) -> int | None:
    """Return the size at the end of a match; ``None`` for 2^64, by which NVML says "not available"."""
    if match is None:
        return None
    number, unit = match.groups()[-2:]
    size = float(number) * _UNITS[unit]
    return int(size) if size < MAX_BYTES / 2 else None  # the text is rounded
