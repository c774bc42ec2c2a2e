"""Blocks of a recorded step that grow with its batch, and the memory that the step adds at its peak."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate, chain
from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from lightning_gpu_tools.training.memory_readings import BlockEvent
from lightning_gpu_tools.training.memory_trace import Allocated, Event, block_events, peak_bytes

BLOCK = 512


class Tensor(NamedTuple):
    blocks: int
    grows: bool
    lives: int  # for how many more tensors; 0: it stays


class Step(NamedTuple):
    tensors: list[Tensor]
    moments: Allocated


forward = st.lists(st.builds(Tensor, st.integers(1, 50), st.just(True), st.integers(0, 12)), max_size=12)
temporary = st.builds(Tensor, st.integers(1, 50), st.just(True), st.integers(1, 12))
gradient = st.builds(Tensor, st.integers(1, 50), st.just(False), st.just(0))
backward = st.lists(temporary | gradient, max_size=12)
optimizer = st.lists(st.builds(Tensor, st.integers(1, 50), st.just(False), st.integers(0, 12)), max_size=6)


@st.composite
def steps(draw: st.DrawFn) -> Step:
    parts = [draw(part) for part in (forward, backward, optimizer)]
    return Step([*chain(*parts)], Allocated(100, *(100 + end for end in accumulate(map(len, parts)))))


def recorded(tensors: list[Tensor], times: int) -> list[Event]:
    """Return the events of a step with a batch that is so many times as large, which frees at its end what it can."""
    events: list[Event] = []
    ends: dict[int, list[Event]] = {}
    for i, tensor in enumerate(tensors):
        size = tensor.blocks * BLOCK * (times if tensor.grows else 1)
        events += ends.pop(i, [])
        events.append(Event(True, i, size))
        if tensor.lives:
            ends.setdefault(i + tensor.lives, []).append(Event(False, i, size))
    return [*events, *(event for late in ends.values() for event in late)]


def found_in(events: list[Event], moments: Allocated, **counts: dict[int, int]) -> tuple[BlockEvent, ...]:
    return block_events(events, moments, **{"copies": {}, "gradients": {}, "fixed": set(), **counts})  # type: ignore[arg-type]


@given(steps(), st.integers(1, 40))
def test_a_step_at_one_size_tells_what_it_is_at_another(step: Step, times: int) -> None:
    found = found_in(recorded(step.tensors, 1), step.moments)
    scaled = [event.size * (times if event.grows else 1) for event in found if event.size > 0]
    larger = recorded(step.tensors, times)
    assert scaled == [event.size for event in larger if event.is_allocated]
    now = highest = 0
    for event in larger:
        now += event.size if event.is_allocated else -event.size
        highest = max(highest, now)
    assert peak_bytes(larger) == highest


def test_copies_of_weights_do_not_grow_with_the_batch() -> None:
    """Take one of two tensors with the size of a copy for the copy, and one in backward for its gradient."""
    events = [Event(True, i, 1000) for i in range(4)] + [Event(False, i, 1000) for i in range(4)]
    found = found_in(events, Allocated(0, 2, 4, 4), copies=Counter({1000: 1}))
    assert [event.grows for event in found[:4]] == [False, True, False, True]


def test_gradients_that_are_added_to_older_ones_do_not_grow() -> None:
    """Two gradients of a size are made, and one of them stays, so that one more is a temporary block."""
    events = [Event(True, i, 1000) for i in range(4)] + [Event(False, i, 1000) for i in range(3)]
    found = found_in(events, Allocated(0, 0, 4, 4), gradients=Counter({1000: 2}))
    assert [event.grows for event in found[:4]] == [False, True, True, False]
    assert [event.size for event in found] == [1000] * 4 + [-1000] * 3


def test_blocks_of_a_fixed_size_do_not_grow() -> None:
    """Count only those that stay: an output of the same size does not."""
    events = [Event(True, 1, 1000), Event(True, 2, 1001), Event(True, 3, 1000), Event(False, 3, 1000)]
    found = found_in(events, Allocated(0, 3, 3, 3), fixed={1000})  # type: ignore[arg-type]
    assert [event.grows for event in found[:3]] == [False, True, True]
