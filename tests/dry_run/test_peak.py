"""The peak of recorded allocations, and the parts of memory at it."""

from typing import Any

import pytest

from lightning_gpu_tools.dry_run.peak import find_peak, moments_of, parts_at, phase_of
from lightning_gpu_tools.training.memory_lines import Block
from lightning_gpu_tools.training.memory_trace import Allocated, Event


def stack(*frames: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"filename": file, "line": 1, "name": function} for file, function in frames]


def of_program(*frames: tuple[str, str]) -> list[dict[str, Any]]:
    return stack(*frames, ("/home/train.py", "<module>"))


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
        (of_program(LINEAR, MODEL), "forward"),
        (of_program(MODEL, ADAM), "forward"),  # Lightning runs forward in the optimizer's step
        (stack(LINEAR, ("/lib/python3/threading.py", "_bootstrap")), "forward"),  # as in DataParallel
        (of_program(FOREACH, ADAM, MODEL), "optimizer"),
        ([], "backward"),
        (of_program(ENGINE, MODEL), "backward"),
        (of_program(LINEAR, MODEL, RECOMPUTED), "backward"),
        (stack(("/site-packages/torch/_native/registry.py", "eager_router")), "backward"),
        (stack(MODEL), "backward"),  # a hook of a tensor
    ],
)
def test_the_phase_of_an_allocation(frames: list[dict[str, Any]], phase: str) -> None:
    assert phase_of(frames) == phase


def test_the_parts_at_the_peak_of_a_step() -> None:
    forward = of_program(LINEAR, MODEL)
    before = {1: Block(100, forward, "", 1), 2: Block(10, forward, "", 2), 3: Block(7, of_program(DDP), "", 3)}
    events = [
        Event(True, 4, 50, forward),
        Event(True, 5, 8, forward),  # a workspace, which stays
        Event(False, 2, 10),
        Event(True, 2, 200, ()),  # a gradient at the address of what was the batch
        Event(False, 4, 50),
        Event(True, 4, 20, of_program(ADAM)),
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
