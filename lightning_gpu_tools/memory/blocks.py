"""The blocks of torch's GPU memory allocator: their source lines, and the record of those that a step allocates.

While torch records, it keeps the Python stack of each new block, even after the end of the record, until the block is
freed. That takes about 2 µs for each allocation, so only some steps are recorded.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Any, Literal

import torch

from lightning_gpu_tools.memory.readings import Block, MemoryLine, Segment, Stack
from lightning_gpu_tools.training import compat
from lightning_gpu_tools.training.source_lines import Seen, line_in

# Our defaults.
_MAX_LINES = 10
_MAX_EVENTS = 200_000  # two for each tensor of a step; about 100 bytes each
_HALF = 2  # bytes of a 16-bit number


class MemoryRecorder:
    """A switch for torch's record of allocations on all GPUs. If the program itself records, nothing happens."""

    def __init__(self) -> None:
        self.is_recording = False  # by this recorder

    def start(self, what: Literal["state", "all"]) -> None:
        """Record the stacks of new blocks (``"state"``), or of all allocations and their order (``"all"``)."""
        record, is_recording = compat.find(compat.MEMORY_RECORDER), compat.find(compat.IS_RECORDING_MEMORY)
        with suppress(RuntimeError):  # cudaMallocAsync keeps no record
            if record is not None and is_recording is not None and (self.is_recording or not is_recording()):
                record(what, context="alloc", stacks="python", max_entries=_MAX_EVENTS if what == "all" else 1)
                self.is_recording = True

    def stop(self) -> None:
        """Stop recording. Idempotent."""
        if self.is_recording:
            self.is_recording = False
            with suppress(RuntimeError):  # CUDA itself may have failed
                compat.find(compat.MEMORY_RECORDER)(enabled=None)


def _segments(gpu: torch.device) -> list[dict[str, Any]]:
    """Return the segments of torch's allocator on a GPU; none if it has no such list, or before CUDA starts."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return []
    try:
        segments = torch.cuda.memory._snapshot()["segments"]
    except RuntimeError:  # cudaMallocAsync
        return []
    return [segment for segment in segments if segment["device"] == (gpu.index or 0)]


def segments(gpu: torch.device) -> tuple[Segment, ...]:
    """Return the segments of torch's allocator on a GPU."""
    return tuple(
        tuple(
            Block(
                block["address"],
                block["size"],
                is_free=block["state"] == "inactive",
                is_small=segment["segment_type"] == "small",
            )
            for block in segment["blocks"]
        )
        for segment in _segments(gpu)
    )


def live_blocks(gpu: torch.device) -> list[Block]:
    """Return the blocks of torch's allocator in use on a GPU, where it lists them."""
    return [
        Block(block.get("address", 0), block.get("requested_size", block["size"]), stack=block.get("frames", ()))
        for segment in _segments(gpu)
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    ]


def recorded_events(gpu: torch.device) -> list[Block]:
    """Return the blocks allocated and released on a GPU since the record began, in order."""
    signs = {"alloc": 1, "free_completed": -1}
    return [
        Block(entry["addr"], signs[entry["action"]] * entry["size"], stack=entry.get("frames", ()))
        for entry in torch.cuda.memory._snapshot()["device_traces"][gpu.index or 0]
        if entry["action"] in signs
    ]


def by_line(blocks: Iterable[Block]) -> tuple[MemoryLine, ...]:
    """Return the ten lines that allocated most of these blocks, most first."""
    found: defaultdict[tuple[str, Seen | None], list[int]] = defaultdict(list)
    # Equal frames of a snapshot are the same object. The stacks are kept, so that no other object gets such an id.
    known: dict[tuple[int, ...], tuple[Stack, Seen | None]] = {}
    for block in blocks:
        frames = tuple(map(id, block.stack))
        if frames not in known:
            known[frames] = block.stack, line_in(block.stack)
        found[block.phase, known[frames][1]].append(block.size)
    lines = [
        MemoryLine(sum(sizes), len(sizes), phase, *(() if seen is None else (seen.file, seen.line, seen.function)))
        for (phase, seen), sizes in found.items()
    ]
    return tuple(sorted(lines, key=lambda line: (-line.bytes, line))[:_MAX_LINES])


def blocks_at_peak(events: Sequence[Block], ends: tuple[int, int]) -> list[Block]:
    """Return the blocks that a step has allocated and not freed at the peak of memory in use.

    ``ends`` are the numbers of its allocations up to the end of forward, and of backward.
    """
    sizes = list(accumulate((event.size for event in events), initial=0))
    live: dict[int, Block] = {}
    count = 0
    for event in events[: sizes.index(max(sizes))]:
        if event.size > 0:
            count += 1
            phase = "forward" if count <= ends[0] else "backward" if count <= ends[1] else "optimizer"
            live[event.address] = event._replace(phase=phase)
        else:
            live.pop(event.address, None)
    return list(live.values())


def peak_bytes(events: Iterable[Block]) -> int:
    """Return the largest memory in use during a step, beyond that at its start."""
    return max(accumulate((event.size for event in events), initial=0))


def events_with_growth(
    events: Sequence[Block],
    ends: tuple[int, int],
    weights: Iterable[torch.Tensor],
    *,
    is_mixed: bool,
    fixed: Container[int],
) -> tuple[Block, ...]:
    """Return the events of a step without their stacks, and with the blocks that grow with the batch.

    Memory that a step allocates and frees grows with its batch, and so does memory that forward leaves, such as outputs
    that are kept. Gradients, optimizer states and the optimizer's temporary memory do not grow.

    Args:
        events: The events of a step.
        ends: As in ``blocks_at_peak``.
        weights: The model's parameters. Backward adds gradients that it does not leave to older ones.
        is_mixed: Whether autocast copies weights in 16 bits: each in forward, and as a gradient in backward.
        fixed: Sizes of blocks that do not grow if forward leaves them, such as workspaces.
    """
    weights = list(weights)
    copies = Counter(one.numel() * _HALF for one in weights if is_mixed and one.dtype is torch.float32)
    gradients = Counter(one.nbytes for one in weights if one.requires_grad)
    place: dict[int, int] = {}  # by address: the event that allocated it
    freed: set[int] = set()  # events whose memory is freed within the step
    number: dict[int, int] = {}  # of the allocations, from 1, by event
    for i, event in enumerate(events):
        if event.size > 0:
            place[event.address] = i
            number[i] = len(number) + 1
        elif event.address in place:
            freed.add(place.pop(event.address))
    in_backward = [i for i, count in number.items() if ends[0] < count <= ends[1]]
    left_behind = Counter(events[i].size for i in in_backward if i not in freed)
    lefts = copies.copy(), copies + (gradients - left_behind)
    found = []
    for i, event in enumerate(events):
        is_backwards = i in number and ends[0] < number[i] <= ends[1]
        may_grow = i in number and (number[i] <= ends[0] or (is_backwards and i in freed))
        left = lefts[is_backwards]
        is_of_weight = may_grow and left[event.size] > 0
        left[event.size] -= is_of_weight
        grows = may_grow and not is_of_weight and (i in freed or event.size not in fixed)
        found.append(Block(event.address, event.size, grows))
    return tuple(found)
