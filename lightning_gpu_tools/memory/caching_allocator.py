"""A model of torch's caching allocator: its segments and blocks, and when memory runs out. Pure.

It follows c10/cuda/CUDACachingAllocator.cpp of torch 2.6 to 2.15 with default settings and one stream, and reserves the
same memory to the byte. All sizes are in bytes.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterable

from lightning_gpu_tools.memory.readings import Segment

# The constants kMinBlockSize, kSmallSize, kSmallBuffer, kMinLargeAlloc, kLargeBuffer and kRoundLarge.
_MIN_BLOCK = 512
_SMALL = 2**20
_SMALL_SEGMENT = 2 * 2**20
_MIN_LARGE = 10 * 2**20
_LARGE_SEGMENT = 20 * 2**20
_ROUND_LARGE = 2 * 2**20


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
    """An allocator with ``room_bytes`` of memory, and the segments that it has already reserved."""

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
