"""The peak of recorded allocations, and the parts of memory at it."""

from typing import Any

import pytest

from lightning_gpu_tools.dry_run.peak import find_peak, moments_of, parts_at, phase_of
from lightning_gpu_tools.training.memory_lines import Block
from lightning_gpu_tools.training.memory_trace import Allocated, Event


def stack(*frames: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"filename": file, "line": 1, "name": function} for file, function in frames]


MODEL = ("/home/train.py", "forward")
LINEAR = ("/site-packages/torch/nn/modules/linear.py", "forward")
ADAM = ("/site-packages/torch/optim/adam.py", "step")
ENGINE = ("/site-packages/torch/autograd/graph.py", "_engine_run_backward")
FOREACH = ("/site-packages/torch/utils/_foreach_utils.py", "group")
RECOMPUTED = ("/site-packages/torch/utils/checkpoint.py", "unpack_hook")
DDP = ("/site-packages/torch/nn/parallel/distributed.py", "_ddp_init_helper")


@pytest.mark.parametrize(
    ("frames", "phase"),
    [
        ([LINEAR, MODEL], "forward"),
        ([MODEL, ADAM], "forward"),  # Lightning runs forward in the optimizer's step
        ([FOREACH, ADAM, MODEL], "optimizer"),
        ([], "backward"),
        ([ENGINE, MODEL], "backward"),
        ([LINEAR, MODEL, RECOMPUTED], "backward"),
    ],
)
def test_the_phase_of_an_allocation(frames: list[tuple[str, str]], phase: str) -> None:
    assert phase_of(stack(*frames)) == phase


def test_the_parts_at_the_peak_of_a_step() -> None:
    forward = stack(LINEAR, MODEL)
    before = {1: Block(100, forward, "", 1), 2: Block(10, forward, "", 2), 3: Block(7, stack(DDP), "", 3)}
    events = [
        Event(True, 4, 50, forward),
        Event(True, 5, 8, forward),  # a workspace, which stays
        Event(False, 2, 10),
        Event(True, 2, 200, ()),  # a gradient at the address of what was the batch
        Event(False, 4, 50),
        Event(True, 4, 20, stack(ADAM)),
    ]
    peak = find_peak(before, events)
    assert (peak.size, peak.reached_by) == (365, peak.blocks[2])
    assert (peak.old, peak.kept) == ({1, 3}, {1, 2, 3, 5})
    names = {1: "parameters", 2: "gradients", 4: "optimizer_states"}
    assert parts_at(peak, {1: "parameters"}, names, {8}) == {
        "parameters": 100,
        "gradient_buckets": 7,
        "activations": 50,
        "workspaces": 8,
        "gradients": 200,
    }
    assert moments_of(events) == Allocated(0, 2, 3, 4)
    assert find_peak(before, ()).blocks == before
