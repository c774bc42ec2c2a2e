"""The largest batch size that fits a GPU's memory, from the record of a smaller one. All sizes are in bytes.

The recorded steps are replayed on a model of torch's allocator with the sizes of another batch, so that memory lost in
fragments counts as it would in training.
"""

import math
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from functools import partial

from lightning_gpu_tools.memory.readings import Segment, StepMemory

# Our defaults.
_SPARE = 0.02  # share of the memory that a search leaves free
_PRECISION = 0.01  # of the batch size that a search returns
_MAX_TIMES = 2**20  # times the recorded batch size, where a search ends
_LOST = 0.16  # of the memory of a failed step, at most; measured with ten models

# The constants kMinBlockSize, kSmallSize, kSmallBuffer, kMinLargeAlloc, kLargeBuffer and kRoundLarge.
_MIN_BLOCK = 512
_SMALL = 2**20
_SMALL_SEGMENT = 2 * 2**20
_MIN_LARGE = 10 * 2**20
_LARGE_SEGMENT = 20 * 2**20
_ROUND_LARGE = 2 * 2**20

_NOBODY = None, 0


def block_size(size: int) -> int:
    """Return the size of the block for a tensor."""
    return max(_MIN_BLOCK, -(-size // _MIN_BLOCK) * _MIN_BLOCK)


class _Block:
    """A part of a segment, in use or free, between its neighbors there."""

    __slots__ = ("address", "after", "before", "is_free", "is_small", "size")

    def __init__(self, address: int, size: int, *, is_small: bool, is_free: bool) -> None:
        self.address, self.size = address, size
        self.is_small, self.is_free = is_small, is_free
        self.before: _Block | None = None
        self.after: _Block | None = None


_Free = list[tuple[int, int, _Block]]  # sorted by size and address, like torch's search for the best fit


class CachingAllocator:
    """A model of torch's caching allocator: its segments and blocks, and when memory runs out.

    It follows c10/cuda/CUDACachingAllocator.cpp of torch 2.6 to 2.15 with default settings and one stream, and reserves
    the same memory to the byte. It has ``room_bytes`` of memory, and the segments that are already reserved.
    """

    def __init__(self, room_bytes: float, segments: Iterable[Segment] = ()) -> None:
        self.reserved_bytes = 0
        self._room_bytes = room_bytes
        self._free: dict[bool, _Free] = {True: [], False: []}  # by whether blocks are small
        self._used: dict[Hashable, _Block] = {}
        self._next_address = 0
        for segment in segments:
            before = None
            address = self._new_address(sum(block.size for block in segment))
            for recorded in segment:
                block = _Block(address, recorded.size, is_small=recorded.is_small, is_free=recorded.is_free)
                address += block.size
                _join(before, block)
                before = block
                if block.is_free:
                    insort(self._free[block.is_small], (block.size, block.address, block))
                else:
                    self._used[recorded.address] = block

    def __contains__(self, key: Hashable) -> bool:
        return key in self._used

    def allocate(self, key: Hashable, size: int) -> bool:
        """Allocate a block under this key; return whether there was memory for it."""
        size = block_size(size)
        is_small = size <= _SMALL
        free = self._free[is_small]
        place = bisect_left(free, (size,))
        if place < len(free):
            block = free.pop(place)[2]
        else:
            whole = _SMALL_SEGMENT if is_small else _LARGE_SEGMENT
            if size >= _MIN_LARGE:
                whole = -(-size // _ROUND_LARGE) * _ROUND_LARGE
            if self.reserved_bytes + whole > self._room_bytes:
                self._empty_cache()
                if self.reserved_bytes + whole > self._room_bytes:
                    return False
            block = _Block(self._new_address(whole), whole, is_small=is_small, is_free=True)
        left = block.size - size
        if left >= _MIN_BLOCK if is_small else left > _SMALL:
            rest = _Block(block.address + size, left, is_small=is_small, is_free=True)
            _join(rest, block.after)
            _join(block, rest)
            block.size = size
            insort(free, (left, rest.address, rest))
        block.is_free = False
        self._used[key] = block
        return True

    def free(self, key: Hashable) -> None:
        """Free the block under this key, and merge it with free neighbors."""
        block = self._used.pop(key)
        free = self._free[block.is_small]
        before, after = block.before, block.after
        if before is not None and before.is_free:
            free.pop(bisect_left(free, (before.size, before.address)))
            block.address = before.address
            block.size += before.size
            block.before = None
            _join(before.before, block)
        if after is not None and after.is_free:
            free.pop(bisect_left(free, (after.size, after.address)))
            block.size += after.size
            block.after = None
            _join(block, after.after)
        block.is_free = True
        insort(free, (block.size, block.address, block))

    def _empty_cache(self) -> None:
        for free in self._free.values():
            kept = [one for one in free if one[2].before is not None or one[2].after is not None]
            self.reserved_bytes -= sum(size for size, _, _ in free) - sum(size for size, _, _ in kept)
            free[:] = kept

    def _new_address(self, size: int) -> int:
        address = self._next_address
        self._next_address += size
        self.reserved_bytes += size
        return address


def _join(before: _Block | None, after: _Block | None) -> None:
    if before is not None:
        before.after = after
    if after is not None:
        after.before = before


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

    def release(address: int, size: int) -> None:
        """Free the block that the recorded address stands for, or else one of its size left by the previous step."""
        key, own_size = owners.pop(address, (address, size))
        while own_size != size or key not in allocator:
            if not left[block_size(size)]:
                return
            key, own_size = left[block_size(size)].pop(), size
        allocator.free(key)

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
                release(event.address, -event.size)
        if extra > 0:
            allocator.free("batch")
        left.clear()
        for key, size_of_block in made.items():
            if key in allocator:
                left[size_of_block].append(key)
    return True


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
