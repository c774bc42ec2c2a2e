"""The allocations of a recorded step: what is in use at its peak, and what grows with the batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from lightning_gpu_tools.training.memory_lines import Block, Stack, snapshot_segments
from lightning_gpu_tools.training.memory_readings import BlockEvent, Segment

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


def segments(gpu: torch.device) -> tuple[Segment, ...]:
    """Return the segments of torch's allocator on a GPU."""
    return tuple(
        Segment(
            one["segment_type"] == "small",
            tuple((block["address"], block["size"], block["state"] == "inactive") for block in one["blocks"]),
        )
        for one in snapshot_segments(gpu)
    )


def is_complete(events: Iterable[Event], moments: Allocated) -> bool:
    """Return whether these are all events of a step."""
    return sum(event.is_allocated for event in events) == moments.end - moments.begin


def sizes_in_16_bits(weights: Iterable[torch.Tensor]) -> Counter[int]:
    """Return how many weights have each size in bytes, once autocast has copied them."""
    return Counter(weight.numel() * _HALF for weight in weights if weight.dtype is torch.float32)


def gradient_sizes(weights: Iterable[torch.Tensor]) -> Counter[int]:
    """Return how many gradients of each size in bytes these weights get."""
    return Counter(weight.nbytes for weight in weights if weight.requires_grad)


def blocks_at_peak(events: Sequence[Event], moments: Allocated) -> list[Block]:
    """Return the blocks that a step has allocated and not freed at the peak of memory in use."""
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


def peak_bytes(events: Iterable[Event]) -> int:
    """Return the largest memory in use during a step, beyond that at its start."""
    return max(accumulate((one.size if one.is_allocated else -one.size for one in events), initial=0))


def block_events(
    events: Sequence[Event],
    moments: Allocated,
    *,
    copies: Mapping[int, int],
    gradients: Mapping[int, int],
    fixed: Container[int],
) -> tuple[BlockEvent, ...]:
    """Return the events with the blocks that grow with the batch.

    Memory that a step allocates and frees grows with its batch, and so does memory that forward leaves, such as outputs
    that are kept. Gradients, optimizer states and the optimizer's temporary memory do not grow.

    Args:
        events: The events of a step.
        moments: When its parts began and ended.
        copies: How many 16-bit copies of weights there may be, by size: each in forward, and as a gradient in backward.
        gradients: How many gradients there are, by size. Backward adds gradients that it does not leave to older ones.
        fixed: Sizes of blocks that do not grow if forward leaves them, such as workspaces.
    """
    place: dict[int, int] = {}  # by address: the event that allocated it
    ends: set[int] = set()  # events whose memory is freed within the step
    for i, event in enumerate(events):
        if event.is_allocated:
            place[event.address] = i
        elif event.address in place:
            ends.add(place.pop(event.address))
    forward, backward = moments.before_backward - moments.begin, moments.after_backward - moments.begin
    number = {i: count for count, i in enumerate((i for i, one in enumerate(events) if one.is_allocated), 1)}
    left_behind = Counter(
        events[i].size for i, count in number.items() if forward < count <= backward and i not in ends
    )
    lefts = Counter(copies), Counter(copies) + (Counter(gradients) - left_behind)
    found = []
    for i, event in enumerate(events):
        if not event.is_allocated:
            found.append(BlockEvent(event.address, -event.size))
            continue
        in_forward, in_backward = number[i] <= forward, forward < number[i] <= backward
        may_grow = in_forward or (in_backward and i in ends)
        left = lefts[in_backward]
        is_of_weight = may_grow and left[event.size] > 0
        left[event.size] -= is_of_weight
        grows = may_grow and not is_of_weight and (i in ends or event.size not in fixed)
        found.append(BlockEvent(event.address, event.size, grows))
    return tuple(found)
