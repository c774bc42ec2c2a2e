"""Out-of-memory errors on synthetic data: causes that look alike, numbers in the advice, and the messages of errors."""

import dataclasses
import re
from typing import Any

import pytest
import synthetic
import torch
from hypothesis import given
from hypothesis import strategies as st
from synthetic import FLAT, GIB, GROWING, MIB, an_error, counted_steps, gpu_run

from lightning_gpu_tools.advice.diagnosis import diagnose
from lightning_gpu_tools.advice.out_of_memory import is_out_of_memory
from lightning_gpu_tools.gpus.readings import GpuProcess, GpuReading
from lightning_gpu_tools.memory.readings import Block, MemoryLine, MemoryReading, OutOfMemory, out_of_memory, parse
from lightning_gpu_tools.training.run_measurements import RunMeasurements

LOADER = dataclasses.replace(synthetic.LOADER, batch_size=64)
RUN = gpu_run({"training_step": 50.0}, 95.0, loader=LOADER)
TWO = (
    GpuReading(index=0, uuid="GPU-0", memory_total_bytes=24 * GIB, memory_free_bytes=0),
    GpuReading(index=3, uuid="GPU-3", memory_total_bytes=80 * GIB, memory_free_bytes=79 * GIB),
)


def said(oom: OutOfMemory, run: RunMeasurements = RUN) -> tuple[str, str]:
    diagnosis = diagnose(run, out_of_memory=oom)
    assert diagnosis.verdict == "out_of_memory"
    return diagnosis.findings[0].cause, f"{diagnosis.why} {diagnosis.next_step}"


USUAL: dict[str, Any] = {"batch_shape": (64, 512), "usual_items": 64.0 * 512}
UP_TO_18 = {"memory": counted_steps(64, 8 * GIB, 18 * GIB)}
PIECES = {
    "allocated": 18 * GIB,
    "cached": 5 * GIB,
    "free_bytes": 0,
    "allocator": "PYTORCH_ALLOC_CONF=max_split_size_mb:64",
}
FREE = {"allocated": 9 * GIB, "cached": 10 * MIB, "free_bytes": 12 * GIB}
STATES = {"phase": "training_step/optimizer"}
CAPPED = {
    "allocated": 10 * GIB,
    "cached": 10 * MIB,
    "free_bytes": 12 * GIB,
    "allowed_bytes": int(10.1 * GIB),
    "gpus": TWO,
}


def larger_batch(room: float) -> dict[str, Any]:
    """Return a larger batch than usual, in a job that could have this room when its first step ended."""
    memory = counted_steps(64, 8 * GIB, 11 * GIB)
    memory = dataclasses.replace(memory, room_bytes=int(room))
    return {"allocated": 12 * GIB, "batch_shape": (64, 700), "usual_items": 64.0 * 512, "memory": memory}


NET = MemoryLine(9 * GIB, 12, "forward", "net.py", 41, "forward")
OF_16 = dataclasses.replace(counted_steps(16, 8 * GIB, 18 * GIB), peak_lines=(NET,))
LARGER = {"batch_shape": (64, 512), "memory": OF_16}
SMALL = {**USUAL, "memory": counted_steps(64, 8 * GIB, 12 * GIB)}
ANN = GpuProcess(pid=9, user="ann", name="train.py", memory_used_bytes=6 * GIB)
# What differs from an error of a step that began with 8 GiB in tensors, as all steps before it; the cause, and words.
ERRORS = {
    "first step": ({"begins": [(1, 2 * GIB)], "batch_shape": (64, 512)}, "batch_too_large", "About 39 fit"),
    "rows that are no samples": ({"batch_shape": (640, 512)}, "batch_too_large", "Lower the batch size (now 64)."),
    "growth": ({"begins": GROWING}, "memory_growth", "grown by 102 MiB per step since step 6"),
    "pieces, with settings to keep": (PIECES, "fragmentation", "=max_split_size_mb:64,expandable_segments:True in the"),
    "a limit": (CAPPED, "batch_too_large", "it uses 10.0 GiB of the 10.1 GiB allowed"),
    "more free than asked for": (FREE, "unexplained", "More was free than was requested"),
    "a batch that fitted before": ({**UP_TO_18, **USUAL}, "unexplained", "no step took more than 18.0 GiB."),
    "a callback": ({"phase": "callback/WeightAveraging", **UP_TO_18}, "spike", "WeightAveraging takes more than 14"),
    "states to shard": ({**STATES, "begins": FLAT[:1], "gpus": TWO}, "optimizer_too_large", "needs 3.50 GiB instead"),
    "states to fuse": ({**STATES, "begins": [(1, 16 * GIB)]}, "optimizer_too_large", "Set AdamW(..., fused=True): its"),
    "states in 8 bits": ({**STATES, "begins": [(1, 18 * GIB)]}, "optimizer_too_large", "with 8-bit states, or without"),
    "a step unlike the others": (SMALL, "spike", "3.55 times as much as earlier steps"),
    "lines": (LARGER, "batch_too_large", "is allocated at net.py:41 in forward (9.00 GiB)."),
    "others that came later": (larger_batch(23 * GIB), "other_processes", "11.0 GiB belong to processes that are not"),
    "others from the beginning": ({"others": (ANN,)}, "other_processes", "process 9 (train.py) of ann holds 6.00 GiB"),
}


@pytest.mark.parametrize(("options", "cause", "words"), ERRORS.values(), ids=ERRORS)
def test_causes_that_look_alike_are_told_apart(options: dict[str, Any], cause: str, words: str) -> None:
    asked = MemoryLine(200 * MIB, 1, "", "train.py", 5, "training_step")
    found, text = said(an_error(**{"begins": FLAT, **options}, asked=asked))
    assert (found, words in text) == (cause, True), text
    assert "torch asked for 200 MiB at train.py:5 in training_step" in text


def test_the_batch_that_fits_keeps_the_effective_batch_size() -> None:
    # Forward needs 10 GiB for 32 samples beside 8, and backward up to 12 beside as much, as gradients are accumulated.
    memory = counted_steps(32, 8 * GIB, 18 * GIB)
    oom = an_error(memory=memory, begins=FLAT, batch_shape=(128, 512), allocated=23 * GIB, cached=0, free_bytes=0)
    run = dataclasses.replace(RUN, loader=dataclasses.replace(LOADER, batch_size=128), accumulate_grad_batches=2)
    cause, text = said(oom, run)
    assert cause == "batch_too_large"
    assert "Set batch_size=32 (now 128), and accumulate_grad_batches=8 (now 2) to keep the effective batch size" in text
    assert "38 fit, based on measured memory" in text
    evidence = diagnose(run, out_of_memory=oom).findings[0].evidence
    assert evidence["largest_batch_size"] == 38
    assert evidence["begin_bytes"] == 8 * GIB
    _, text = said(oom, dataclasses.replace(run, has_trainer=False))
    assert "optimizer.step() after every 8 batches, with the loss divided by 8" in text


def test_a_first_step_that_fitted_is_no_proof() -> None:
    """The first step has neither states of the optimizer nor old gradients."""
    memory = counted_steps(64, 8 * GIB, 18 * GIB)
    assert memory.first_step is not None
    # Forward and backward take 15 GiB for these samples, and leave the gradients and the states.
    batch = Block(10, 15 * GIB, grows=True), Block(10, -15 * GIB)
    events = (*batch, Block(11, 2 * GIB), Block(12, 3 * GIB))
    recorded = dataclasses.replace(memory.first_step, segments=((Block(1, 2 * GIB),),), events=events)
    memory = dataclasses.replace(memory, last_step=memory.first_step, recorded=(recorded,))
    cause, text = said(an_error(memory=memory, begins=FLAT[:2], step=1, **USUAL))
    assert cause == "batch_too_large"
    assert re.search(r"\b\d+ fit, based on measured memory", text)
    crowded = an_error(
        memory=memory, begins=FLAT[:2], step=1, allocated=6 * GIB, others=(GpuProcess(999, 17 * GIB),), **USUAL
    )
    assert said(crowded)[0] == "other_processes"


def test_remedies_at_the_same_batch_size_have_numbers() -> None:
    memory = counted_steps(32, 8 * GIB, 18 * GIB)
    oom = an_error(memory=memory, begins=FLAT, batch_shape=(64, 512), allocated=18 * GIB, free_bytes=4 * GIB)
    _, text = said(oom)
    assert "activation checkpointing (about 2.00 GiB instead of 10.0 GiB)" in text
    assert "precision='bf16-mixed' (frees up to 4.00 GiB)" in text
    _, text = said(oom, dataclasses.replace(RUN, precision="bf16-mixed"))
    assert "precision" not in text


@pytest.mark.parametrize(
    ("text", "free", "oom_kills", "is_one"),
    [
        ("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`", 12 * GIB, 0, False),
        ("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`", 10 * MIB, 0, True),
        ("DataLoader worker (pid(s) 17) exited unexpectedly", None, 0, False),
        ("DataLoader worker (pid(s) 17) exited unexpectedly", None, 1, True),
    ],
)
def test_a_message_with_two_meanings_counts_if_memory_is_short(
    text: str, free: int | None, oom_kills: int, is_one: bool
) -> None:
    oom = dataclasses.replace(parse(text), total_bytes=24 * GIB, free_bytes=free, oom_kills=oom_kills)
    assert is_out_of_memory(oom) is is_one


def test_another_rank_is_named_and_the_findings_of_time_stay() -> None:
    slow = gpu_run({"data_loading": 30.0, "training_step": 10.0}, 25.0)
    diagnosis = diagnose(slow, out_of_memory=an_error(begins=FLAT, rank=3))
    assert diagnosis.why.startswith("Rank 3: Out of memory in forward at step 12: torch asked for")
    assert [finding.cause for finding in diagnosis.findings] == ["batch_too_large", "data_loading"]
    assert "Speedup" not in diagnosis.next_step


# Messages of torch, its libraries and the host, and of other errors


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


def test_an_error_is_followed_to_what_it_was_raised_from() -> None:
    first, last = torch.OutOfMemoryError(WHOLE), ValueError("the step failed")
    last.__cause__ = first
    first.__context__ = last  # in a circle
    found = out_of_memory(last)
    assert found is not None
    assert found.requested_bytes == 20 * MIB


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
