"""What a step needs at other sizes of its batch, by what was recorded at one."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from itertools import accumulate, chain
from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from lightning_gpu_tools.reports.typed_json import read
from lightning_gpu_tools.training.memory_readings import StepMemory, StepNeed
from lightning_gpu_tools.training.memory_trace import Allocated, Event, needs

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


def peak(events: list[Event]) -> int:
    now = highest = 0
    for event in events:
        now += event.size if event.is_allocated else -event.size
        highest = max(highest, now)
    return highest


@given(steps(), st.integers(1, 40))
def test_needs_at_one_size_are_the_peak_at_another(step: Step, times: int) -> None:
    found = needs(recorded(step.tensors, 1), step.moments, {})
    assert max(need.fixed_bytes + times * need.batch_bytes for need in found) == peak(recorded(step.tensors, times))
    assert list(found) == sorted(found, key=lambda need: (need.batch_bytes, -need.fixed_bytes))


@given(steps(), st.integers(1, 40))
def test_what_the_first_step_leaves_is_what_others_begin_with(step: Step, times: int) -> None:
    found = needs(recorded(step.tensors, 1), step.moments, {}, is_first=True)
    # The law of the test above, of steps in which nothing is new that stays.
    of_forward = step.moments.before_backward - step.moments.begin
    stays = [i >= of_forward and not tensor.lives for i, tensor in enumerate(step.tensors)]
    alike = [Tensor(0, one.grows, 0) if is_kept else one for one, is_kept in zip(step.tensors, stays, strict=True)]
    assert max(need.fixed_bytes + times * need.batch_bytes for need in found) == peak(recorded(alike, times))


def test_old_gradients_that_go_make_room() -> None:
    events = [Event(True, 1, BLOCK), Event(False, 77, 10 * BLOCK), Event(True, 2, BLOCK), Event(False, 2, BLOCK)]
    assert needs(events, Allocated(0, 1, 2, 2), {}) == ((0, BLOCK), (-10 * BLOCK, 2 * BLOCK))


def test_needs_arrive_at_other_ranks_as_they_were() -> None:
    step = StepMemory(step=2, batch_shape=(8, 4), needs=(StepNeed(20.0, 0), StepNeed(-30.0, 600)))
    sent = json.loads(json.dumps(dataclasses.asdict(step)))
    assert read(StepMemory, sent, {}) == step


def test_copies_of_weights_do_not_grow_with_the_batch() -> None:
    """Of two tensors with the size of a copy one is the copy, and one in backward its gradient."""
    events = [Event(True, i, 1000) for i in range(4)] + [Event(False, i, 1000) for i in range(4)]
    assert needs(events, Allocated(0, 2, 4, 4), Counter({1000: 1})) == ((2048, 2048),)
