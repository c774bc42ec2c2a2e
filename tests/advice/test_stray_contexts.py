"""CUDA contexts on GPUs of other ranks: their description, and errors that they cause."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from lightning_gpu_tools.advice.causes.memory.stray_contexts import find_early
from lightning_gpu_tools.advice.diagnosis import diagnose
from lightning_gpu_tools.advice.examples import FLAT, GIB, MIB, STEP, an_error, gpu_run
from lightning_gpu_tools.advice.findings import Finding
from lightning_gpu_tools.training.run_measurements import HeldContext


def held(rank: int, gpu: int, **facts: Any) -> HeldContext:
    """Return the context of a rank on a GPU of its node, of which each has eight."""
    node = rank // 8
    known = {"pid": 4000 + rank, "uuid": f"GPU-{node}-{gpu}", "is_own": rank % 8 == gpu, "held_bytes": 530 * MIB}
    return HeldContext(rank=rank, node=node, gpu=gpu, **{**known, **facts})


OWN = [held(rank, rank % 8) for rank in range(16)]
ADVICE = (
    "Call torch.cuda.set_device(local_rank) before anything else uses CUDA. Avoid 'cuda:0' and torch.load without "
    "map_location, which use another GPU."
)


HELD = {
    "one": (
        [held(3, 0)],
        f"Rank 3 holds 530 MiB on GPU 0, which is not its GPU. {ADVICE}",
    ),
    "all of a node": (
        [held(rank, 0) for rank in range(1, 8)],
        f"Ranks 1 to 7 hold 3.62 GiB on GPU 0, which is not their GPU. {ADVICE}",
    ),
}


def stray_contexts(contexts: Sequence[HeldContext]) -> list[Finding]:
    return list(find_early(gpu_run(STEP, contexts=tuple(contexts))))


@pytest.mark.parametrize(("contexts", "said"), HELD.values(), ids=HELD)
def test_a_description_has_the_ranks_the_size_and_the_gpu(contexts: list[HeldContext], said: str) -> None:
    (finding,) = stray_contexts([*OWN, *contexts])
    assert finding.advice == said


def test_a_process_alone_is_told_its_own_gpu() -> None:
    (finding,) = stray_contexts([held(0, 2, is_own=True), held(0, 0, is_own=False)])
    assert finding.advice.startswith("This process holds 530 MiB on GPU 0, which is not its GPU.")
    assert "Call torch.cuda.set_device(2) before" in finding.advice


def test_a_gpu_that_is_used_on_purpose_is_none() -> None:
    """Two ranks with two GPUs each, and one process with another model on a second GPU."""
    own = [held(0, 0), held(1, 2, is_own=True)]
    assert not stray_contexts([*own, held(0, 1, reserved_bytes=GIB), held(1, 3, reserved_bytes=GIB)])
    assert not stray_contexts([held(0, 0), held(0, 1, reserved_bytes=GIB)])
    # But not what a rank has loaded onto the GPU of another one.
    assert stray_contexts([*own, held(1, 0, reserved_bytes=GIB)])


def test_no_verdict_changes() -> None:
    strays = {"contexts": (*OWN, held(3, 0))}
    for run in (gpu_run(STEP, 97.0), gpu_run({"data_loading": 30.0, "training_step": 10.0}, 25.0)):
        without, found = diagnose(run), diagnose(replace(run, **strays))
        assert (found.verdict, found.why, found.findings[:-1]) == (without.verdict, without.why, without.findings)
        assert found.findings[-1].cause == "stray_contexts"
        assert found.findings[-1].share == 0
        assert found.next_step == (without.next_step if without.findings else found.findings[-1].advice)


def test_stray_contexts_are_named_but_not_blamed_for_inevitable_errors() -> None:
    contexts = (*OWN, *(held(rank, 0) for rank in range(1, 8)))
    error = an_error(begins=FLAT, uuid="GPU-0-0", allowed=23 * GIB)
    found = diagnose(gpu_run(STEP, 97.0, contexts=contexts), out_of_memory=error)
    assert [one.cause for one in found.findings] == ["batch_too_large", "stray_contexts"]
    assert "set_device" not in found.next_step
