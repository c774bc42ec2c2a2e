"""The judgment of a dry run, its search for the largest batch, its text, and what it refuses without simulated GPUs."""

from collections.abc import Callable
from dataclasses import replace
from subprocess import CompletedProcess

import pytest
import torch

from lightning_gpu_tools.cli.dry_run import render
from lightning_gpu_tools.dry_run.result import (
    EXIT_CODES,
    NCCL_BYTES,
    Moment,
    ProcessRecord,
    Verdict,
    judge,
    next_trial,
    result,
)
from lightning_gpu_tools.memory.readings import MemoryLine

Call = Callable[..., "CompletedProcess[str]"]
GIB, MIB = 2**30, 2**20
COMPLETE = ProcessRecord(
    torch="/torch",
    outcome="complete",
    steps=3,
    uses_gpu=True,
    batch_size=32,
    peak_allocated_bytes=20 * GIB,
    peak_reserved_bytes=23 * GIB,
    peak=Moment(2, "forward", "model.py", 41, "attend"),
    parts_bytes={"parameters": 4 * GIB, "activations": 16 * GIB},
    lines=(MemoryLine(15 * GIB, 12, "forward", "model.py", 41, "attend"),),
    largest_batch=54,
    has_validated=True,
)
FAILED = ProcessRecord(
    torch="/torch",
    outcome="ended",
    error="OutOfMemoryError: CUDA out of memory.",
    uses_gpu=True,
    failures=1,
    failure=Moment(1, "backward"),
    requested_bytes=2 * GIB,
)
WITHOUT_GPU = ProcessRecord(torch="/torch", outcome="ended")


@pytest.mark.parametrize(
    ("code", "records", "verdict", "why_not"),
    [
        (0, [WITHOUT_GPU, COMPLETE], "fits", ""),
        (0, [replace(COMPLETE, failures=3)], "fits", ""),  # which the training has survived
        (1, [FAILED], "does_not_fit", ""),
        (0, [FAILED], "does_not_fit", ""),  # a script that goes on after its training has failed
        (1, [replace(FAILED, failures=0, error="RuntimeError: NCCL: out of memory")], "does_not_fit", ""),
        (-6, [replace(COMPLETE, outcome="running", steps=1)], "cannot_be_told", "signal 6"),
        (2, [WITHOUT_GPU], "cannot_be_told", "exit code 2 before the end of its first training step"),
        (0, [WITHOUT_GPU], "cannot_be_told", "did not use a GPU"),
        (0, [replace(COMPLETE, uses_gpu=False)], "cannot_be_told", "without using a GPU"),
        (0, [], "cannot_be_told", "without importing torch. Python processes started with -S"),
        (1, [replace(FAILED, failures=0, error="RuntimeError: invalid device ordinal")], "cannot_be_told", "add -n 2"),
        (1, [replace(COMPLETE, outcome="broken", error="K")], "cannot_be_told", "process failed: K"),
        (0, [replace(COMPLETE, torch="/other")], "cannot_be_told", "the torch in /other"),
    ],
)
def test_judgment(code: int, records: list[ProcessRecord], verdict: Verdict, why_not: str) -> None:
    found = judge(code, records, "/torch", None)
    assert found.verdict == verdict
    assert why_not in found.why_not
    assert (found.record is None) == (verdict == "cannot_be_told")


def test_a_command_that_fits_is_reported_with_its_needs() -> None:
    run = result(judge(0, [COMPLETE], "/torch", "a100-40gb"), "a100-40gb", 3)
    assert run.needed_bytes == 23 * GIB + 500 * MIB == sum(run.parts_bytes.values())
    assert run.min_free_bytes == pytest.approx(1.2 * run.needed_bytes)
    fits = {name: run.fits_on[name] for name in ("t4", "l4", "l40s", "a100-80gb")}
    assert fits == {"t4": "no", "l4": "perhaps", "l40s": "perhaps", "a100-80gb": "yes"}
    text = "\n".join(render(run))
    assert text.startswith("Fits: needs 23.5 GiB of the 39.4 GiB of an NVIDIA A100-SXM4-40GB (peak in forward of step")
    assert "15.0 GiB  model.py:41 in attend (forward)" in text
    assert "Largest batch: 54, predicted from the allocations of this batch of 32." in text
    assert "Value for --min-free: 28.2GiB." in text
    assert max(map(len, text.splitlines())) <= 100
    assert "validation" not in text


@pytest.mark.parametrize(
    ("record", "gpu", "verdict", "doubt"),
    [
        (replace(COMPLETE, peak_reserved_bytes=22 * GIB), "rtx-3090", "fits", "in attend)."),
        (replace(COMPLETE, peak_reserved_bytes=23 * GIB), "rtx-3090", "perhaps", "Above 97% of it, a real GPU"),
        (replace(COMPLETE, peak_reserved_bytes=22 * GIB, retries=1), "rtx-3090", "perhaps", "Torch had to empty its"),
        (FAILED, "t4", "does_not_fit", "failed in backward"),
    ],
)
def test_near_the_limit_of_a_gpu_the_verdict_is_perhaps(
    record: ProcessRecord, gpu: str, verdict: Verdict, doubt: str
) -> None:
    found = judge(1 if record is FAILED else 0, [record], "/torch", gpu)
    run = result(found, gpu, 3, COMPLETE)
    assert (run.verdict, run.needed_bytes is not None) == (verdict, True)
    assert doubt in run.reason
    assert (EXIT_CODES[verdict] == 3) == (verdict == "perhaps")
    assert ("perhaps" in "".join(render(run)).lower().split(":")[0]) == (verdict == "perhaps")


def test_ranks_need_nccls_buffers() -> None:
    run = result(judge(0, [replace(COMPLETE, world_size=2)] * 2, "/torch", None), "a100-40gb", 3)
    assert run.needed_bytes == 23 * GIB + 500 * MIB + NCCL_BYTES
    assert "NCCL" in " ".join(run.unknown)


def test_a_command_that_does_not_fit_is_reported_with_its_needs() -> None:
    judgment = judge(1, [FAILED], "/torch", "t4")
    run = result(judgment, "t4", 3, COMPLETE)
    assert run.reason == (
        "needs 23.1 GiB of the 14.6 GiB of a Tesla T4. Allocating 2.00 GiB more failed in backward of step 1."
    )
    assert run.peak == COMPLETE.peak
    assert run.needed_bytes is not None
    assert run.min_free_bytes == pytest.approx(1.2 * run.needed_bytes)  # on a GPU that is large enough
    unknown = result(judgment, "t4", 3)
    first, *_ = render(unknown)
    assert first.startswith("Does not fit: needs more than the 14.6 GiB of a Tesla T4. Allocating 2.00 GiB")


def test_parts_that_a_run_did_not_measure_are_named() -> None:
    missing = {"has_validated": False, "has_convolutions": True, "masks": True, "generates": True}
    record = replace(COMPLETE, outcome="ended", steps=1, largest_batch=289, **missing)
    run = result(judge(0, [record], "/torch", None), "t4", 3)
    words = ("after training step 1", "No validation", "cuDNN", "A mask", "maximum length", "than 8 times", "Kernels")
    assert [word in said for word, said in zip(words, run.unknown, strict=True)] == [True] * 7


@pytest.mark.parametrize("largest", [0, 7, 36, 1000])
@pytest.mark.parametrize("guess", [1, 36])
def test_the_search_finds_the_largest_to_within_a_twentieth(largest: int, guess: int) -> None:
    tried: dict[int, bool] = {}
    while (number := next_trial(tried, guess)) is not None:
        assert number not in tried
        tried[number] = number <= largest
    found = max((one for one, fits in tried.items() if fits), default=0)
    assert largest - max(1, largest / 20) < found <= largest
    assert len(tried) <= (4 if guess == largest else 14)


# What the command refuses


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--", "python", "train.py"], "--gpu"),
        (["--gpu", "h1000", "--", "python"], "There is no GPU 'h1000'. Choose one of b200, h200,"),
        (["--gpu", "A100", "--", "python"], "'A100' is a part of 2 names. Choose one of a100-80gb, a100-40gb."),
        (["--gpu", "t4"], "no command given: put it last, after --"),
        (["--gpu", "t4", "-n", "17", "--", "python"], "-n must be from 1 to 16, got 17"),
        (["--gpu", "t4", "--vary=--batch-size 4", "--", "python"], "--vary needs {} in place of the number"),
    ],
)
def test_wrong_usage(call: Call, arguments: list[str], complaint: str) -> None:
    answer = call("dry-run", *arguments)
    assert (answer.returncode, answer.stdout, complaint in answer.stderr) == (2, "", True)


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA")
def test_without_torchs_cuda_build_it_names_what_installs_it(call: Call) -> None:
    answer = call("dry-run", "--gpu", "t4", "--", "python", "train.py")
    text = " ".join(answer.stdout.split())
    assert (answer.returncode, text.startswith("Unknown: torch ")) == (3, True)
    assert "is built without CUDA" in text
    assert "`pip install --force-reinstall torch`" in text
