"""The GPU memory that a recorded step needs at each moment, and the part of it that grows with the batch.

Memory that a step allocates and frees grows with its batch, except for 16-bit copies of weights, their gradients, and
the optimizer's temporary memory. Memory that stays does not grow: gradients and optimizer states.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from lightning_gpu_tools.training.memory_lines import Block, Stack
from lightning_gpu_tools.training.memory_readings import StepNeed

_BLOCK = 512  # torch's allocator rounds up to this (kMinBlockSize in c10/cuda/CUDACachingAllocator.cpp)
_HALF = 2  # bytes of a 16-bit number


class Allocated(NamedTuple):
    """Torch's running totals of tensors allocated on a GPU, at the moments of a step."""

    begin: int
    before_backward: int
    after_backward: int
    end: int


class Event(NamedTuple):
    """An allocation or release of memory."""

    is_allocated: bool
    address: int
    size: int
    stack: Stack = ()


def recorded_events(gpu: torch.device) -> list[Event]:
    """Return the events on a GPU since the record began."""
    entries = torch.cuda.memory._snapshot()["device_traces"][gpu.index or 0]
    return [
        Event(entry["action"] == "alloc", entry["addr"], entry["size"], entry.get("frames", ()))
        for entry in entries
        if entry["action"] in ("alloc", "free_completed")
    ]


def is_complete(events: Iterable[Event], moments: Allocated) -> bool:
    """Return whether these are all events of a step."""
    return sum(event.is_allocated for event in events) == moments.end - moments.begin


def sizes_in_16_bits(weights: Iterable[torch.Tensor]) -> Counter[int]:
    """Return how many weights have each size in bytes, once autocast has copied them."""
    return Counter(weight.numel() * _HALF for weight in weights if weight.dtype is torch.float32)


def blocks_at_peak(events: Sequence[Event], moments: Allocated) -> list[Block]:
    """Return what a step has allocated and not freed at the moment with the most memory in use."""
    size = highest = peak = 0
    for place, event in enumerate(events, 1):
        size += event.size if event.is_allocated else -event.size
        if size > highest:
            highest, peak = size, place
    live: dict[int, Block] = {}
    count = moments.begin
    for event in events[:peak]:
        if event.is_allocated:
            count += 1
            phase = "forward" if count <= moments.before_backward else "backward"
            phase = phase if count <= moments.after_backward else "optimizer"
            live[event.address] = Block(event.size, event.stack, phase, event.address)
        else:
            live.pop(event.address, None)
    return list(live.values())


def needs(
    events: Sequence[Event], moments: Allocated, copies: Mapping[int, int], *, is_first: bool = False
) -> tuple[StepNeed, ...]:
    """Return the moments of a step that determine which batch fits, for any batch size, by increasing growth with it.

    ``copies`` counts 16-bit copies of weights by size. Each may be made in forward and, as a gradient, in backward. In
    the first step, memory that backward and the optimizer leave does not count.
    """
    place: dict[int, int] = {}  # by address: the event that allocated it
    ends: set[int] = set()  # events whose memory is freed within the step
    for i, event in enumerate(events):
        if event.is_allocated:
            place[event.address] = i
        elif event.address in place:
            ends.add(place.pop(event.address))
    forward, backward = moments.before_backward - moments.begin, moments.after_backward - moments.begin
    lefts, count = (Counter(copies), Counter(copies)), 0
    grows: dict[int, bool] = {}  # by address
    now = [0, 0]  # fixed bytes, and bytes that grow with the batch
    found = [StepNeed(0.0, 0)]
    for i, event in enumerate(events):
        size = -(-event.size // _BLOCK) * _BLOCK
        if event.is_allocated:
            count += 1
            left = lefts[count > forward]
            is_copy = count <= backward and left[event.size] > 0
            left[event.size] -= is_copy
            # Memory that forward leaves, such as outputs that are kept, grows with the batch, too.
            grows[event.address] = not is_copy and (count <= forward or (count <= backward and i in ends))
            if is_first and count > forward and i not in ends:
                continue
            now[grows[event.address]] += size
            found.append(StepNeed(float(now[0]), now[1]))
        else:
            now[grows.pop(event.address, False)] -= size
    return tuple(_decisive(found))


def _decisive(found: Iterable[StepNeed]) -> list[StepNeed]:
    """Return the needs that are highest for some batch size: the upper hull of lines."""
    hull: list[StepNeed] = []
    for need in sorted(set(found), key=lambda one: (one.batch_bytes, one.fixed_bytes)):
        while hull and hull[-1].fixed_bytes <= need.fixed_bytes:
            hull.pop()
        while len(hull) > 1 and _is_below(hull[-1], hull[-2], need):
            hull.pop()
        hull.append(need)
    return hull


def _is_below(middle: StepNeed, low: StepNeed, high: StepNeed) -> bool:
    """Return whether a line is nowhere above two others, one flatter and one steeper."""
    return (low.fixed_bytes - high.fixed_bytes) * (middle.batch_bytes - low.batch_bytes) <= (
        low.fixed_bytes - middle.fixed_bytes
    ) * (high.batch_bytes - low.batch_bytes)
