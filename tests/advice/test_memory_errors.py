"""Messages of out-of-memory errors of torch, its libraries and the host, and of other errors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_gpu_tools.gpus.readings import GpuProcess
from lightning_gpu_tools.memory.out_of_memory import OutOfMemory, out_of_memory, parse
from lightning_gpu_tools.memory.readings import MemoryReading

MIB, GIB = 2**20, 2**30
HINT = " If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
# The Tesla T4 of many bug reports.
WHOLE = (
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 14.75 GiB of which 11.06 MiB is "
    "free. Process 2054 has 1.50 GiB memory in use. Including non-PyTorch memory, this process has 13.22 GiB memory in "
    "use. 13.00 GiB allowed; Of the allocated memory 12.50 GiB is allocated by PyTorch, with 1.00 GiB allocated in "
    f"private pools (e.g., CUDA Graphs), and 256.00 MiB is reserved by PyTorch but unallocated.{HINT}"
)


def held(allocated: int, cached: int = 0) -> MemoryReading:
    """Return what a message says of torch's memory."""
    return MemoryReading(allocated_bytes=allocated, reserved_bytes=allocated + cached)


def test_every_field_of_torchs_message_is_read() -> None:
    assert parse(WHOLE) == OutOfMemory(
        source="allocator",
        name="torch",
        requested_bytes=20 * MIB,
        total_bytes=int(14.75 * GIB),
        free_bytes=int(11.06 * MIB),
        own_bytes=int(13.22 * GIB),
        others=(GpuProcess(pid=2054, memory_used_bytes=int(1.5 * GIB)),),
        allowed_bytes=13 * GIB,
        graph_pool_bytes=GIB,
        reading=held(int(12.5 * GIB), 256 * MIB),
    )


MESSAGES = {
    "WSL: 2^64 is no size, and more is allocated than there is": (
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 8.00 GiB of which 0 bytes "
        "is free. Including non-PyTorch memory, this process has 17179869184.00 GiB memory in use. Of the "
        "allocated memory 9.00 GiB is allocated by PyTorch, and 512 bytes is reserved by PyTorch but unallocated.",
        {"free_bytes": 0, "reading": held(9 * GIB, 512), "others": ()},
    ),
    "cudaMallocAsync": (
        "Allocation on device 0 would exceed allowed memory. (out of memory)\n"
        "Currently allocated     : 9.50 GiB\nRequested               : 640.00 MiB\n"
        "Device limit            : 12.00 GiB\nFree (according to CUDA): 7.00 MiB\n"
        "PyTorch limit (set by user-supplied memory fraction)\n                        : 6.00 GiB",
        {
            "requested_bytes": 640 * MIB,
            "total_bytes": 12 * GIB,
            "free_bytes": 7 * MIB,
            "reading": held(int(9.5 * GIB)),
            "allowed_bytes": 6 * GIB,
        },
    ),
    "2.15": (
        "CUDA out of memory. Allocation of 3.00 GiB on GPU 0 was preemptively rejected by per_process_memory_fraction",
        {"requested_bytes": 3 * GIB},
    ),
    "cuBLAS": ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", {"name": "cuBLAS"}),
    "NCCL": (
        "NCCL error in: ProcessGroupNCCL.cpp:1, unhandled cuda error\nncclUnhandledCudaError: Call to CUDA "
        "function failed.\nLast error:\nCuda failure 2 'out of memory'",
        {"source": "library", "name": "NCCL"},
    ),
    "driver": ("CUDA error: out of memory\nCUDA kernel errors might be", {"source": "driver"}),
    "host": (
        "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
        "allocate 4000000000000 bytes. Error code 12 (Cannot allocate memory)",
        {"source": "host", "requested_bytes": 4_000_000_000_000},
    ),
    "numpy in a worker": (
        "Caught an error in DataLoader worker process 0.\nnumpy._core._exceptions._ArrayMemoryError: Unable to "
        "allocate 182. TiB for an array with shape (25000000000000,) and data type float64",
        {"source": "host", "requested_bytes": 182 * 1024 * GIB},
    ),
    "workers that ended": (
        "DataLoader worker (pid(s) 17, 18) exited unexpectedly",
        {"source": "host", "is_certain": False, "workers": (17, 18)},
    ),
}


@pytest.mark.parametrize(("text", "fields"), MESSAGES.values(), ids=MESSAGES)
def test_every_kind_of_message_is_read(text: str, fields: dict[str, object]) -> None:
    found = out_of_memory(RuntimeError(text))
    assert found is not None
    assert {name: getattr(found, name) for name in fields} == fields


def from_another() -> None:
    try:
        raise torch.OutOfMemoryError(WHOLE)
    except RuntimeError as error:
        raise ValueError("the step failed") from error


def in_a_circle() -> None:
    first, second = ValueError("first"), KeyError("second")
    first.__cause__, second.__cause__ = second, first
    raise first


@pytest.mark.parametrize(
    ("fail", "requested_bytes"),
    [(from_another, 20 * MIB), (in_a_circle, None)],
)
def test_an_error_is_followed_to_what_it_was_raised_from(fail: Callable[[], None], requested_bytes: int | None) -> None:
    with pytest.raises((ValueError, KeyError)) as caught:
        fail()
    found = out_of_memory(caught.value)
    assert (None if found is None else found.requested_bytes) == requested_bytes


@pytest.mark.parametrize(
    ("error", "source"),
    [
        (MemoryError("Unable to allocate 7.45 GiB for an array with shape (1000000000,)"), "host"),
        (OSError(12, "Cannot allocate memory"), "host"),
        (torch.OutOfMemoryError("words of a later version"), "allocator"),
        (ValueError(f"the log says: {WHOLE}"), None),
        (RuntimeError("NCCL error: Call to ibv_reg_mr failed: Cannot allocate memory"), None),
    ],
)
def test_only_errors_of_memory_are_taken_for_one(error: BaseException, source: str | None) -> None:
    found = out_of_memory(error)
    assert (None if found is None else found.source) == source


@given(st.text())
def test_no_text_is_too_strange_to_be_read(text: str) -> None:
    parse(text)
    parse(f"CUDA out of memory. {text}")
