"""The source lines that allocate GPU memory, from records of torch's allocator.

While torch records, it keeps the Python stack of each new block, even after the end of the record, until the block is
freed. That takes about 2 µs for each allocation, so only some steps are recorded.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, NamedTuple

import torch

from lightning_gpu_tools.training import compat
from lightning_gpu_tools.training.memory_readings import MemoryLine
from lightning_gpu_tools.training.source_lines import Seen, line_in

# Our defaults.
_MAX_LINES = 10
_MAX_EVENTS = 200_000  # two for each tensor of a step; about 100 bytes each

Stack = Sequence[Mapping[str, Any]]


class MemoryRecorder:
    """A switch for torch's record of allocations on all GPUs. If the program itself records, nothing happens."""

    def __init__(self) -> None:
        self.is_recording = False  # by this recorder

    def start(self, what: Literal["state", "all"]) -> None:
        """Record the stacks of new blocks (``"state"``), or of all allocations and their order (``"all"``)."""
        record, is_recording = compat.memory_recorder(), compat.is_recording_memory()
        with suppress(RuntimeError):  # cudaMallocAsync keeps no record
            if record is not None and is_recording is not None and (self.is_recording or not is_recording()):
                record(what, context="alloc", stacks="python", max_entries=_MAX_EVENTS if what == "all" else 1)
                self.is_recording = True

    def stop(self) -> None:
        """Stop recording. Idempotent."""
        if self.is_recording:
            self.is_recording = False
            with suppress(RuntimeError):  # CUDA itself may have failed
                compat.memory_recorder()(enabled=None)


class Block(NamedTuple):
    """GPU memory in use."""

    size: int  # as requested, in bytes
    stack: Stack = ()  # of its allocation, innermost frame first; empty if it was not recorded, or no Python ran
    phase: str = ""
    address: int = 0


def snapshot_segments(gpu: torch.device) -> list[dict[str, Any]]:
    """Return the segments of torch's allocator on a GPU; none if it has no such list, or before CUDA starts."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return []
    try:
        segments = torch.cuda.memory._snapshot()["segments"]
    except RuntimeError:  # cudaMallocAsync
        return []
    return [segment for segment in segments if segment["device"] == (gpu.index or 0)]


def live_blocks(gpu: torch.device) -> list[Block]:
    """Return the blocks of torch's allocator in use on a GPU, where it lists them."""
    return [
        Block(block.get("requested_size", block["size"]), block.get("frames", ()), address=block.get("address", 0))
        for segment in snapshot_segments(gpu)
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
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
