"""What a step needs of the GPU's memory at each moment, and what of that grows with its batch.

torch's allocator records its events during one step, without stacks, which costs next to nothing. What a step allocates
and gives back grows with its batch, but for 16-bit copies of weights, their gradients, and what the optimizer needs;
what stays does not: gradients, and states of the optimizer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from lightning_gpu_tools.training import compat
from lightning_gpu_tools.training.memory_readings import StepNeed

_MAX_EVENTS = 200_000  # our default: two for each tensor of a step; some 100 bytes each
_BLOCK = 512  # torch's allocator rounds up to it (kMinBlockSize in c10/cuda/CUDACachingAllocator.cpp)
_HALF = 2  # bytes of a number with 16 bits


class Allocated(NamedTuple):
    """How many tensors torch has allocated on a GPU since it began, at the moments of a step."""

    begin: int
    before_backward: int
    after_backward: int
    end: int


class Event(NamedTuple):
    """Memory that was allocated, or given back."""

    is_allocated: bool
    address: int
    size: int


class MemoryTrace:
    """Records what one step allocates on a GPU."""

    def __init__(self, gpu: torch.device) -> None:
        self._gpu = gpu.index or 0
        self._records = False

    def start(self) -> None:
        """Begin to record, unless the program does already, or this allocator cannot."""
        record, is_recording = compat.memory_recorder(), compat.is_recording_memory()
        if record is not None and is_recording is not None and not is_recording():
            record(enabled="all", context=None, stacks="python", max_entries=_MAX_EVENTS)
            self._records = True

    def take(
        self, moments: Allocated, weights: Iterable[torch.Tensor] = (), *, is_first: bool = False
    ) -> tuple[StepNeed, ...]:
        """End it, and return what the step needed; nothing without its whole record.

        ``weights`` are those that autocast makes 16-bit copies of. What the first step leaves, others begin with.
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
        """End it."""
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
    """Return the moments of a step that decide which batch fits, however large it is, from few needs to many.

    ``copies`` counts the sizes of 16-bit copies of weights, each of which may be made in forward and, as a gradient, in
    backward. Of the first step, what backward and the optimizer leave does not count.
    """
    place: dict[int, int] = {}  # by address: the event that has allocated it
    ends: set[int] = set()  # events whose memory is given back within the step
    for i, event in enumerate(events):
        if event.is_allocated:
            place[event.address] = i
        elif event.address in place:
            ends.add(place.pop(event.address))
    forward, backward = moments.before_backward - moments.begin, moments.after_backward - moments.begin
    lefts, count = (Counter(copies), Counter(copies)), 0
    grows: dict[int, bool] = {}  # by address
    now = [0, 0]  # fixed, and growing with the batch
    found = [StepNeed(0, 0)]
    for i, event in enumerate(events):
        size = -(-event.size // _BLOCK) * _BLOCK
        if event.is_allocated:
            count += 1
            left = lefts[count > forward]
            is_copy = count <= backward and left[event.size] > 0
            left[event.size] -= is_copy
            # What forward leaves, such as outputs that are kept, grows with the batch, too.
            grows[event.address] = not is_copy and (count <= forward or (count <= backward and i in ends))
            if is_first and count > forward and i not in ends:
                continue
            now[grows[event.address]] += size
            found.append(StepNeed(*now))
        else:
            now[grows.pop(event.address, False)] -= size
    return tuple(_decisive(found))


def _decisive(found: Iterable[StepNeed]) -> list[StepNeed]:
    """Return those that are the highest for some size of the batch: the upper hull of lines."""
    hull: list[StepNeed] = []
    for need in sorted(set(found), key=lambda one: (one.batch_bytes, one.fixed_bytes)):
        while hull and hull[-1].fixed_bytes <= need.fixed_bytes:
            hull.pop()
        while len(hull) > 1 and _is_below(hull[-1], hull[-2], need):
            hull.pop()
        hull.append(need)
    return hull


def _is_below(middle: StepNeed, low: StepNeed, high: StepNeed) -> bool:
    """Return whether a line is nowhere above two others, of which one is flatter and one is steeper."""
    return (low.fixed_bytes - high.fixed_bytes) * (middle.batch_bytes - low.batch_bytes) <= (
        low.fixed_bytes - middle.fixed_bytes
    ) * (high.batch_bytes - low.batch_bytes)
