"""The peak of recorded allocations, and the parts of memory at it."""

from typing import Any

import pytest

from lightning_gpu_tools.memory.blocks import ends_of, find_peak, parts_at, phase_of
from lightning_gpu_tools.memory.readings import Block


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
        (stack(LINEAR, ("/lib/python3/threading.py", "_bootstrap")), "forward"),  # as in DataParallel
        (of_program(FOREACH, ADAM, MODEL), "optimizer"),
        (of_program(ENGINE, MODEL), "backward"),
        (of_program(LINEAR, MODEL, RECOMPUTED), "backward"),
        (stack(("/site-packages/torch/_native/registry.py", "eager_router")), "backward"),
    ],
)
def test_the_phase_of_an_allocation(frames: list[dict[str, Any]], phase: str) -> None:
    assert phase_of(frames) == phase


def test_the_parts_at_the_peak_of_a_step() -> None:
    forward = of_program(LINEAR, MODEL)
    before = {1: Block(1, 100, stack=forward), 2: Block(2, 10, stack=forward), 3: Block(3, 7, stack=of_program(DDP))}
    events = [
        Block(4, 50, stack=forward),
        Block(5, 8, stack=forward),  # a workspace, which stays
        Block(2, -10),
        Block(2, 200),  # a gradient at the address of what was the batch
        Block(4, -50),
        Block(4, 20, stack=of_program(ADAM)),
    ]
    events = [event._replace(phase=phase_of(event.stack)) for event in events]
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
    assert ends_of(events) == (2, 3)
    assert find_peak(before, ()).blocks == before
