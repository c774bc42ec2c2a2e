"""The blocks of torch's GPU memory allocator: their source lines, and the record of those that a step allocates.

While torch records, it keeps the Python stack of each new block, even after the end of the record, until the block is
freed. That takes about 2 µs for each allocation, so only some steps are recorded.
"""

from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import torch

from lightning_gpu_tools.memory.readings import Block, MemoryLine, Segment, Stack
from lightning_gpu_tools.training import compat
from lightning_gpu_tools.training.source_lines import Seen, line_in

# Our defaults.
_MAX_LINES = 10
_MAX_EVENTS = 200_000  # two for each tensor of a step; about 100 bytes each
_HALF = 2  # bytes of a 16-bit number
# Functions of torch in which the training thread runs backward, and in which backward recomputes activations.
_BACKWARD = ("_engine_run_backward", "unpack_hook")
# The outermost function of a thread that Python started. Backward's own threads have none of them.
_OUTERMOST = ("<module>", "_run_module_as_main", "_bootstrap")
_NEXT_PHASE = {"forward": "backward", "backward": "optimizer"}
_DDP_FILE = "torch/nn/parallel/distributed.py"


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
    lines = [MemoryLine(sum(sizes), len(sizes), phase, *(seen or ())[:3]) for (phase, seen), sizes in found.items()]
    return tuple(sorted(lines, key=lambda line: (-line.bytes, line))[:_MAX_LINES])


class Peak(NamedTuple):
    """The moment with the most memory in use."""

    size: int  # requested bytes
    blocks: Mapping[int, Block]  # blocks in use, by address
    old: Set[int]  # addresses of the blocks that existed at the beginning
    kept: Set[int]  # addresses of the blocks that still exist at the end
    reached_by: Block | None  # last allocated block; None if the peak is at the beginning


def find_peak(before: Mapping[int, Block], events: Sequence[Block]) -> Peak:
    """Return the peak of these events, given the blocks in use before them."""
    sizes = list(accumulate((event.size for event in events), initial=sum(block.size for block in before.values())))
    place = sizes.index(max(sizes))
    live, at_peak, reached_by = dict(before), dict(before), None
    for number, event in enumerate(events, 1):
        if event.size > 0:
            live[event.address] = event
        else:
            live.pop(event.address, None)
        if number == place:
            at_peak, reached_by = dict(live), live.get(event.address)
    old = {address for address, block in at_peak.items() if before.get(address) is block}
    kept = {address for address, block in at_peak.items() if live.get(address) is block}
    return Peak(sizes[place], at_peak, old, kept, reached_by)


def parts_at(
    peak: Peak, names_before: Mapping[int, str], names_after: Mapping[int, str], workspace_sizes: Set[int]
) -> Counter[str]:
    """Return the memory in use at a peak by part, in bytes; the parts are named as in ``memory_account.PARTS``.

    ``names_before`` and ``names_after`` map addresses of known tensors to parts, at the beginning and at the end.
    """
    parts: Counter[str] = Counter()
    for address, block in peak.blocks.items():
        is_old = address in peak.old
        name = (is_old and names_before.get(address)) or (address in peak.kept and names_after.get(address))
        if not name and address in peak.kept and block.size in workspace_sizes:
            name = "workspaces"
        if not name and block.stack and block.stack[0]["filename"].endswith(_DDP_FILE):
            name = "gradient_buckets"
        parts[name or ("other_tensors" if is_old else "activations")] += block.size
    return parts


def phase_of(stack: Stack) -> str:
    """Return the phase of a step that allocated memory with this stack: forward, backward or optimizer.

    Backward runs in its own threads, in which Python is called only for hooks, functions and operators that are written
    in Python. Lightning runs forward within the optimizer's ``step``, so the innermost of the two decides.
    """
    if not stack or stack[-1]["name"] not in _OUTERMOST or any(frame["name"] in _BACKWARD for frame in stack):
        return "backward"
    for frame in stack:
        file = frame["filename"]
        if "/torch/optim/" in file:
            return "optimizer"
        if "/torch/" not in file:
            break
    return "forward"


def with_phases(events: Iterable[Block]) -> list[Block]:
    """Return the events of a step, which passes through forward, backward and the optimizer once, with their phases."""
    found, phase = [], "forward"
    for event in events:
        if event.size > 0:
            own = phase_of(event.stack)
            phase = own if _NEXT_PHASE.get(phase) == own else phase
        found.append(event._replace(phase=phase))
    return found


def events_with_growth(
    events: Sequence[Block], weights: Iterable[torch.Tensor], *, is_mixed: bool, fixed: Container[int]
) -> tuple[Block, ...]:
    """Return the events of a step without their stacks, and with the blocks that grow with the batch.

    Memory that a step allocates and frees grows with its batch, and so does memory that forward leaves, such as outputs
    that are kept. Gradients, optimizer states and the optimizer's temporary memory do not grow.

    Args:
        events: The events of a step, from ``with_phases``.
        weights: The model's parameters. Backward adds gradients that it does not leave to older ones.
        is_mixed: Whether autocast copies weights in 16 bits: each in forward, and as a gradient in backward.
        fixed: Sizes of blocks that do not grow if forward leaves them, such as workspaces.
    """
    weights = list(weights)
    copies = Counter(one.numel() * _HALF for one in weights if is_mixed and one.dtype is torch.float32)
    gradients = Counter(one.nbytes for one in weights if one.requires_grad)
    place: dict[int, int] = {}  # by address: the event that allocated it
    freed: set[int] = set()  # events whose memory is freed within the step
    for i, event in enumerate(events):
        if event.size > 0:
            place[event.address] = i
        elif event.address in place:
            freed.add(place.pop(event.address))
    left_behind = Counter(events[i].size for i in place.values() if events[i].phase == "backward")
    lefts = {"forward": copies.copy(), "backward": copies + (gradients - left_behind)}
    found = []
    for i, event in enumerate(events):
        left = lefts.get(event.phase, Counter())
        may_grow = event.size > 0 and (event.phase == "forward" or (event.phase == "backward" and i in freed))
        is_of_weight = may_grow and left[event.size] > 0
        left[event.size] -= is_of_weight
        grows = may_grow and not is_of_weight and (i in freed or event.size not in fixed)
        found.append(Block(event.address, event.size, grows))
    return tuple(found)
