"""Out-of-memory errors on synthetic data: causes that look alike, and the numbers in the advice."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from lightning_gpu_tools.advice import examples
from lightning_gpu_tools.advice.diagnosis import diagnose
from lightning_gpu_tools.advice.examples import FLAT, GIB, GROWING, MIB, an_error, counted_steps, gpu_run
from lightning_gpu_tools.advice.out_of_memory import is_out_of_memory
from lightning_gpu_tools.gpus.readings import GpuProcess, GpuReading
from lightning_gpu_tools.memory.out_of_memory import OutOfMemory, parse
from lightning_gpu_tools.memory.readings import Block, MemoryLine
from lightning_gpu_tools.training.run_measurements import RunMeasurements

LOADER = dataclasses.replace(examples.LOADER, batch_size=64)
RUN = gpu_run({"training_step": 50.0}, 95.0, loader=LOADER)
TWO = (
    GpuReading(index=0, uuid="GPU-0", memory_total_bytes=24 * GIB, memory_free_bytes=0),
    GpuReading(index=3, uuid="GPU-3", memory_total_bytes=80 * GIB, memory_free_bytes=79 * GIB),
)


def parsed(text: str) -> OutOfMemory:
    message = parse(text)
    assert message is not None
    return message


def said(oom: OutOfMemory, run: RunMeasurements = RUN) -> tuple[str, str]:
    diagnosis = diagnose(run, out_of_memory=oom)
    assert diagnosis.verdict == "out_of_memory"
    return diagnosis.findings[0].cause, f"{diagnosis.why} {diagnosis.next_step}"


USUAL: dict[str, Any] = {"batch_shape": (64, 512), "usual_items": 64.0 * 512}
UP_TO_18 = {"memory": counted_steps(64, 8 * GIB, 18 * GIB)}
PIECES = {"allocated": 18 * GIB, "cached": 5 * GIB, "free": 0, "allocator": "PYTORCH_ALLOC_CONF=max_split_size_mb:64"}
FREE = {"allocated": 9 * GIB, "cached": 10 * MIB, "free": 12 * GIB}
STATES = {"phase": "training_step/optimizer"}
CAPPED = {"allocated": 10 * GIB, "cached": 10 * MIB, "free": 12 * GIB, "allowed": int(10.1 * GIB), "gpus": TWO}


def larger_batch(room: float) -> dict[str, Any]:
    """Return a larger batch than usual, in a job that could have this room when its first step ended."""
    memory = counted_steps(64, 8 * GIB, 11 * GIB)
    memory = dataclasses.replace(memory, room_bytes=int(room))
    return {"allocated": 12 * GIB, "batch_shape": (64, 700), "usual_items": 64.0 * 512, "memory": memory}


ANN = GpuProcess(pid=9, user="ann", name="train.py", memory_used_bytes=6 * GIB)
# What differs from an error of a step that began with 8 GiB in tensors, as all steps before it; the cause, and words.
ERRORS = {
    "first step": ({"begins": [(1, 2 * GIB)], "batch_shape": (64, 512)}, "batch_too_large", "About 39 fit"),
    "growth": ({"begins": GROWING}, "memory_growth", "grown by 102 MiB per step since step 6"),
    "pieces, with settings to keep": (PIECES, "fragmentation", "=max_split_size_mb:64,expandable_segments:True in the"),
    "a cap to raise": (CAPPED, "batch_too_large", "A limit allows torch 10.1 GiB, but 12.0 GiB of 24.0 GiB are free."),
    "more free than asked for": (FREE, "unexplained", "More was free than was requested"),
    "a batch that fitted before": ({**UP_TO_18, **USUAL}, "unexplained", "no step took more than 18.0 GiB."),
    "a callback": ({"phase": "callback/WeightAveraging", **UP_TO_18}, "spike", "WeightAveraging takes more than 14"),
    "states to shard": ({**STATES, "begins": FLAT[:1], "gpus": TWO}, "optimizer_too_large", "needs 3.50 GiB instead"),
    "states to fuse": ({**STATES, "begins": [(1, 16 * GIB)]}, "optimizer_too_large", "Set AdamW(..., fused=True): its"),
    "states in 8 bits": ({**STATES, "begins": [(1, 18 * GIB)]}, "optimizer_too_large", "with 8-bit states, or without"),
    "others that came later": (larger_batch(23 * GIB), "other_processes", "11.0 GiB belong to processes that are not"),
    "others from the beginning": ({"others": (ANN,)}, "other_processes", "process 9 (train.py) of ann holds 6.00 GiB"),
}


@pytest.mark.parametrize(("options", "cause", "words"), ERRORS.values(), ids=ERRORS)
def test_causes_that_look_alike_are_told_apart(options: dict[str, Any], cause: str, words: str) -> None:
    found, text = said(an_error(**{"begins": FLAT, **options}))
    assert (found, words in text) == (cause, True), text


def test_the_batch_that_fits_keeps_the_effective_batch_size() -> None:
    # Forward needs 10 GiB for 32 samples beside 8, and backward up to 12 beside as much, as gradients are accumulated.
    memory = counted_steps(32, 8 * GIB, 18 * GIB)
    oom = an_error(memory=memory, begins=FLAT, batch_shape=(128, 512), allocated=23 * GIB, cached=0, free=0)
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
    assert "The first step fit because it had no optimizer states and no old gradients, which take 5.00 GiB." in text
    assert re.search(r"\b\d+ fit, based on measured memory", text)
    crowded = an_error(
        memory=memory, begins=FLAT[:2], step=1, allocated=6 * GIB, others=(GpuProcess(999, 17 * GIB),), **USUAL
    )
    assert said(crowded)[0] == "other_processes"


def test_remedies_at_the_same_batch_size_have_numbers() -> None:
    memory = counted_steps(32, 8 * GIB, 18 * GIB)
    oom = an_error(memory=memory, begins=FLAT, batch_shape=(64, 512), allocated=18 * GIB, free=4 * GIB)
    _, text = said(oom)
    assert "activation checkpointing (about 2.00 GiB instead of 10.0 GiB)" in text
    assert "precision='bf16-mixed' (frees up to 4.00 GiB)" in text
    _, text = said(oom, dataclasses.replace(RUN, precision="bf16-mixed"))
    assert "precision" not in text


NET = MemoryLine(9 * GIB, 12, "forward", "net.py", 41, "forward")
UP_TO_12 = counted_steps(64, 8 * GIB, 12 * GIB)
OF_16 = dataclasses.replace(counted_steps(16, 8 * GIB, 18 * GIB), peak_lines=(NET,))
LARGER = {"batch_shape": (64, 512), "memory": OF_16}


WITH_LINES = {
    "a step that takes far more": ({**USUAL, "memory": UP_TO_12}, "spike", "3.55 times as much as earlier steps"),
    "the lines of the batch": (LARGER, "batch_too_large", "is allocated at net.py:41 in forward (9.00 GiB)."),
}


@pytest.mark.parametrize(("options", "cause", "words"), WITH_LINES.values(), ids=WITH_LINES)
def test_the_step_and_the_lines_that_hold_the_memory_are_named(options: dict[str, Any], cause: str, words: str) -> None:
    asked = MemoryLine(200 * MIB, 1, "", "train.py", 5, "training_step")
    oom = an_error(**{"begins": FLAT, **options}, asked=asked)
    found, text = said(oom)
    assert (found, words in text) == (cause, True), text
    assert "torch asked for 200 MiB at train.py:5 in training_step" in text
    evidence = diagnose(RUN, out_of_memory=oom).findings[0].evidence
    assert evidence["asked_at"] == "train.py:5 in training_step"


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
    oom = dataclasses.replace(parsed(text), total_bytes=24 * GIB, free_bytes=free, oom_kills=oom_kills)
    assert is_out_of_memory(oom) is is_one


def test_another_rank_is_named_and_the_findings_of_time_stay() -> None:
    slow = gpu_run({"data_loading": 30.0, "training_step": 10.0}, 25.0)
    diagnosis = diagnose(slow, out_of_memory=an_error(begins=FLAT, rank=3))
    assert diagnosis.why.startswith("Rank 3: Out of memory in forward at step 12: torch asked for")
    assert [finding.cause for finding in diagnosis.findings] == ["batch_too_large", "data_loading"]
    assert "Speedup" not in diagnosis.next_step
