"""Blocks of GPU memory: their lines, those at a step's peak, and those that grow with its batch."""

import os
import sysconfig
from itertools import accumulate, chain
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_gpu_tools.memory import blocks
from lightning_gpu_tools.memory.blocks import (
    by_line,
    events_with_growth,
    find_peak,
    parts_at,
    phase_of,
    with_phases,
)
from lightning_gpu_tools.memory.holdings import workspace_sizes
from lightning_gpu_tools.memory.readings import Block, MemoryLine

PACKAGES = sysconfig.get_path("purelib")


def stack(*calls: tuple[str, str], line: int = 1) -> list[dict[str, Any]]:
    """Return a stack of these calls, a file and a function each, innermost first."""
    return [{"filename": file, "line": line, "name": function} for file, function in calls]


LINEAR = (f"{PACKAGES}/torch/nn/functional.py", "linear")
FIT = (f"{PACKAGES}/lightning/pytorch/trainer/trainer.py", "fit")
OURS = (blocks.__file__, "called")
NET = (os.path.join(os.getcwd(), "net.py"), "forward")
IN_A_LIST = (os.path.join(os.getcwd(), "net.py"), "<listcomp>")
SCRIPT = (os.path.join(os.getcwd(), "train.py"), "<module>")


def test_memory_adds_up_by_the_programs_innermost_line() -> None:
    blocks = [
        Block(0, 5, phase="forward", stack=stack(LINEAR, NET, FIT, SCRIPT, line=41)),
        Block(1, 6, phase="forward", stack=stack(LINEAR, NET, OURS, FIT, SCRIPT, line=41)),
        Block(2, 3, phase="forward", stack=stack(LINEAR, IN_A_LIST, NET, FIT, SCRIPT, line=57)),
        Block(3, 4, phase="backward"),
        Block(4, 1, phase="optimizer", stack=stack(LINEAR, FIT, SCRIPT)),
    ]
    assert by_line(blocks) == (
        MemoryLine(11, 2, "forward", "net.py", 41, "forward"),
        MemoryLine(4, 1, "backward"),
        MemoryLine(3, 1, "forward", "net.py", 57, "forward"),
        MemoryLine(1, 1, "optimizer"),  # torch's own lines are nobody's to change
    )


@pytest.mark.parametrize(
    ("config", "capability", "mib"),
    [("", (8, 9), {8.125}), ("", (9, 0), {8.125, 32}), (":4096:8", (8, 0), {32})],
)
def test_a_workspace_of_cublas_has_a_known_size(
    config: str, capability: tuple[int, int], mib: set[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", config)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda gpu: capability)
    assert {size / 2**20 for size in workspace_sizes(None)} == mib


# The phase of an allocation, by its stack


def of_program(*frames: tuple[str, str]) -> list[dict[str, Any]]:
    return stack(*frames, ("/home/train.py", "<module>"))


TRAINED = ("/home/train.py", "forward")
LAYER = ("/site-packages/torch/nn/modules/linear.py", "forward")
ADAM = ("/site-packages/torch/optim/adam.py", "step")
ENGINE = ("/site-packages/torch/autograd/graph.py", "_engine_run_backward")
FOREACH = ("/site-packages/torch/utils/_foreach_utils.py", "group")
RECOMPUTED = ("/site-packages/torch/utils/checkpoint.py", "unpack_hook")
DDP = ("/site-packages/torch/nn/parallel/distributed.py", "_ddp_init_helper")
# Of forward, backward and the optimizer.
STACKS = of_program(LAYER, TRAINED), of_program(ENGINE, TRAINED), of_program(FOREACH, ADAM, TRAINED)


BLOCK = 512


class Tensor(NamedTuple):
    blocks: int
    grows: bool
    lives: int  # for how many more tensors; 0: it stays


class Step(NamedTuple):
    tensors: list[Tensor]
    ends: tuple[int, int]


forward = st.lists(st.builds(Tensor, st.integers(1, 50), st.just(True), st.integers(0, 12)), max_size=12)
temporary = st.builds(Tensor, st.integers(1, 50), st.just(True), st.integers(1, 12))
gradient = st.builds(Tensor, st.integers(1, 50), st.just(False), st.just(0))
backward = st.lists(temporary | gradient, min_size=1, max_size=12)
optimizer = st.lists(st.builds(Tensor, st.integers(1, 50), st.just(False), st.integers(0, 12)), max_size=6)


@st.composite
def steps(draw: st.DrawFn) -> Step:
    parts = [draw(part) for part in (forward, backward, optimizer)]
    in_forward, in_backward, _ = accumulate(map(len, parts))
    return Step([*chain(*parts)], (in_forward, in_backward))


def recorded(step: Step, times: int) -> list[Block]:
    """Return the events of a step with a batch that is so many times as large, which frees at its end what it can."""
    tensors = step.tensors
    events: list[Block] = []
    frees: dict[int, list[Block]] = {}
    for i, tensor in enumerate(tensors):
        size = tensor.blocks * BLOCK * (times if tensor.grows else 1)
        events += frees.pop(i, [])
        events.append(Block(i, size, stack=STACKS[sum(i >= end for end in step.ends)]))
        if tensor.lives:
            frees.setdefault(i + tensor.lives, []).append(Block(i, -size))
    return [*events, *(event for late in frees.values() for event in late)]


@given(steps(), st.integers(1, 40))
def test_a_step_at_one_size_tells_what_it_is_at_another(step: Step, times: int) -> None:
    found = events_with_growth(with_phases(recorded(step, 1)), (), is_mixed=False, fixed=())
    scaled = [event.size * (times if event.grows else 1) for event in found if event.size > 0]
    larger = recorded(step, times)
    assert scaled == [event.size for event in larger if event.size > 0]
    # What is live at the peak is what was allocated up to then, each in its phase.
    peak = find_peak({}, with_phases(larger))
    assert peak.size == max(accumulate((event.size for event in larger), initial=0))
    assert peak.size == sum(block.size for block in peak.blocks.values())
    assert all(block.phase == phase_of(block.stack) for block in peak.blocks.values())


def test_blocks_of_a_fixed_size_do_not_grow() -> None:
    """Count only those that stay: an output of the same size does not."""
    events = [Block(1, 1000), Block(2, 1001), Block(3, 1000), Block(3, -1000)]
    in_forward = [event._replace(phase="forward") for event in events]
    found = events_with_growth(in_forward, (), is_mixed=False, fixed={1000})
    assert [event.grows for event in found[:3]] == [False, True, True]


@pytest.mark.parametrize(
    ("frames", "phase"),
    [
        (of_program(LAYER, TRAINED), "forward"),
        (stack(LAYER, ("/lib/python3/threading.py", "_bootstrap")), "forward"),  # as in DataParallel
        (of_program(FOREACH, ADAM, TRAINED), "optimizer"),
        (of_program(ENGINE, TRAINED), "backward"),
        (of_program(LAYER, TRAINED, RECOMPUTED), "backward"),
        (stack(("/site-packages/torch/_native/registry.py", "eager_router")), "backward"),
    ],
)
def test_the_phase_of_an_allocation(frames: list[dict[str, Any]], phase: str) -> None:
    assert phase_of(frames) == phase


def test_the_parts_at_the_peak_of_a_step() -> None:
    forward = of_program(LAYER, TRAINED)
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
    assert [event.phase for event in with_phases(events)] == [*["forward"] * 3, *["backward"] * 2, "optimizer"]
    assert find_peak(before, ()).blocks == before
