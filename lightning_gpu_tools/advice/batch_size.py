"""The largest batch size that fits a GPU's memory, from the record of a smaller one. All sizes are in bytes.

The recorded steps are replayed on a model of torch's allocator with the sizes of another batch, so that memory lost in
fragments counts as it would in training.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from functools import partial

from lightning_gpu_tools.memory.caching_allocator import CachingAllocator, block_size
from lightning_gpu_tools.memory.readings import StepMemory

# Our defaults.
_SPARE = 0.02  # share of the memory that a search leaves free
_PRECISION = 0.01  # of the batch size that a search returns
_MAX_TIMES = 2**20  # times the recorded batch size, where a search ends
_LOST = 0.16  # of the memory of a failed step, at most; measured with ten models

_NOBODY = None, 0


def largest_batch(
    steps: Sequence[StepMemory],
    room_bytes: float,
    batch_bytes: int = 0,
    *,
    keeps_gradients: bool = False,
) -> int | None:
    """Return the largest batch size that fits, in samples: 0 if not even one fits, ``None`` if the batch takes nothing.

    Args:
        steps: The recorded steps of a run with small batches.
        room_bytes: The GPU memory that torch can have.
        batch_bytes: Size of a whole batch on the GPU, in the last of these steps.
        keeps_gradients: Whether gradients stay during steps, as with accumulation.
    """
    fits = partial(_trains, steps, (1 - _SPARE) * room_bytes, batch_bytes, keeps_gradients=keeps_gradients)
    if not any(event.grows for event in steps[-1].events):
        return None
    usual = steps[-1].batch_shape[0]
    largest, too_large = 0, max(1, usual)
    while fits(too_large):
        largest, too_large = too_large, 2 * too_large
        if too_large > _MAX_TIMES * usual:
            return None
    while too_large - largest > max(1, _PRECISION * largest):
        middle = (largest + too_large) // 2
        largest, too_large = (middle, too_large) if fits(middle) else (largest, middle)
    return largest


def bound_by_failure(batch_size: int, taken_bytes: float, fixed_bytes: float, room_bytes: float) -> int:
    """Return an upper bound from a failed step that had taken ``taken_bytes`` in addition to ``fixed_bytes``."""
    size = math.floor(batch_size * (1 - _LOST) * (room_bytes - fixed_bytes) / taken_bytes)
    return max(0, min(size, batch_size - 1))


def _trains(
    steps: Sequence[StepMemory], room_bytes: float, batch_bytes: int, size: int, *, keeps_gradients: bool
) -> bool:
    """Return whether memory suffices for the recorded steps with batches of this size, and for one more step."""
    allocator = CachingAllocator(room_bytes, steps[0].segments)
    owners: dict[int, tuple[Hashable, int]] = {}  # the key and size of the block at each recorded address
    left: defaultdict[int, list[Hashable]] = defaultdict(list)  # blocks of the previous step, by size
    last = steps[-1]
    for number, step in enumerate((*steps, last)):
        times = size / max(1, step.batch_shape[0])
        extra = math.ceil((times - 1) * batch_bytes)
        if extra > 0 and not allocator.allocate("batch", extra):
            return False
        stays = _left_by(step) if keeps_gradients and number and step is last else frozenset()
        made: dict[Hashable, int] = {}
        for place, event in enumerate(step.events):
            if event.size > 0:
                key: Hashable = (step.step, place)
                # Blocks left by the same step still exist, and gradients that stay are not allocated again.
                if place in stays or key in allocator:
                    continue
                if not allocator.allocate(key, math.ceil(times * event.size) if event.grows else event.size):
                    return False
                owners[event.address] = key, event.size
                made[key] = block_size(event.size)
            elif not stays or owners.get(event.address, _NOBODY)[0] in made:
                _release(allocator, event.address, -event.size, owners, left)
        if extra > 0:
            allocator.free("batch")
        left.clear()
        for key, size_of_block in made.items():
            if key in allocator:
                left[size_of_block].append(key)
    return True


def _release(
    allocator: CachingAllocator,
    address: int,
    size: int,
    owners: dict[int, tuple[Hashable, int]],
    left: dict[int, list[Hashable]],
) -> None:
    """Free the block that the recorded address stands for, or else one of its size left by the previous step."""
    key, own_size = owners.pop(address, (address, size))
    if own_size == size and key in allocator:
        allocator.free(key)
        return
    same = left.get(block_size(size), [])
    while same:
        key = same.pop()
        if key in allocator:
            allocator.free(key)
            return


def _left_by(step: StepMemory) -> frozenset[int]:
    """Return the positions of events whose blocks remain after the step, without those that grow with the batch."""
    live: dict[int, int] = {}
    for place, event in enumerate(step.events):
        if event.size > 0:
            live[event.address] = place
        else:
            live.pop(event.address, None)
    return frozenset(place for place in live.values() if not step.events[place].grows)


def split(batch_size: int, fits: int, accumulate: int = 1) -> tuple[int, int]:
    """Return a batch size of at most ``fits``, and the number of batches over which to accumulate gradients.

    They keep the effective batch size, exactly if at most twice the minimum number of parts divides it.
    """
    min_parts = math.ceil(batch_size / fits)
    parts = next((parts for parts in range(min_parts, 2 * min_parts + 1) if batch_size % parts == 0), min_parts)
    return math.ceil(batch_size / parts), parts * accumulate
