"""The GPU memory that a step needs at each moment, and the part of it that grows with the batch.

torch's allocator records its events during one step, without stacks, at almost no cost. Memory that a step allocates
and frees grows with its batch, except for 16-bit copies of weights, their gradients, and the optimizer's temporary
memory. Memory that stays does not grow: gradients and optimizer states.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from lightning_gpu_tools.training import compat
from lightning_gpu_tools.training.memory_readings import StepNeed

_MAX_EVENTS = 200_000  # our default: two for each tensor of a step; about 100 bytes each
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


class MemoryTrace:
    """A recorder of one step's allocations on a GPU."""

    def __init__(self, gpu: torch.device) -> None:
        self._gpu = gpu.index or 0
        self._records = False

    def start(self) -> None:
        """Start recording, unless the program already records or this allocator cannot."""
        record, is_recording = compat.memory_recorder(), compat.is_recording_memory()
        if record is not None and is_recording is not None and not is_recording():
            record(enabled="all", context=None, stacks="python", max_entries=_MAX_EVENTS)
            self._records = True

    def take(
        self, moments: Allocated, weights: Iterable[torch.Tensor] = (), *, is_first: bool = False
    ) -> tuple[StepNeed, ...]:
        """Stop recording, and return the needs of the step; empty if the record is incomplete.

        ``weights`` are those that autocast copies in 16 bits. Later steps begin with the memory that the first leaves.
        """
        if not self._records:
            return ()
        entries = torch.cuda.memory._snapshot()["device_traces"][self._gpu]
        self.stop()
        events = [event for entry in entries for event in _event(entry)]
        if sum(event.is_allocated for event in events) != moments.end - moments.begin:
            return ()
        copies = Counter(weight.numel() * _HALF for weight in weights if weight.dtype is torch.float32)
        return needs(events, moments, copies, is_first=is_first)

    def stop(self) -> None:
        """Stop recording."""
        record, is_ours = compat.memory_recorder(), self._records
        self._records = False
        if is_ours and record is not None:
            with suppress(RuntimeError):  # CUDA may be what has failed
                record(enabled=None)


def _event(entry: Mapping[str, Any]) -> Iterator[Event]:
    if entry["action"] in ("alloc", "free_completed"):
        yield Event(entry["action"] == "alloc", entry["addr"], entry["size"])


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
