"""The model of torch's allocator: laws that any allocator keeps. Torch's own is compared with it on a GPU."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lightning_gpu_tools.advice.batch_size import CachingAllocator, block_size
from lightning_gpu_tools.memory.readings import Block

MIB = 2**20
sizes = st.one_of(st.integers(1, 2048), st.integers(1, 2 * MIB), st.integers(1, 64 * MIB))


@given(st.lists(st.tuples(sizes, st.integers(0, 10))), st.sampled_from([64 * MIB, 2**40]))
def test_memory_is_counted_and_all_of_it_comes_back(wanted: list[tuple[int, int]], room: int) -> None:
    allocator, live = CachingAllocator(room), dict[int, int]()
    for number, (size, freed) in enumerate(wanted):
        if allocator.allocate(number, size):
            live[number] = block_size(size)
        else:
            assert number not in allocator
            assert allocator.reserved_bytes + 2 * MIB > room or size > MIB
        assert sum(live.values()) <= allocator.reserved_bytes <= room
        if freed < len(live):
            gone = sorted(live)[freed]
            allocator.free(gone)
            del live[gone]
    for number in live:
        allocator.free(number)
    assert not allocator.allocate("more than there is", room + 1)
    assert allocator.reserved_bytes == 0  # all segments were whole again, and given back


def test_segments_that_were_there_are_used_first() -> None:
    allocator = CachingAllocator(100 * MIB, [(Block(7, 10 * MIB), Block(8, 30 * MIB, is_free=True))])
    assert 7 in allocator
    assert 8 not in allocator
    assert allocator.allocate("a", 29 * MIB)
    assert allocator.reserved_bytes == 40 * MIB
    allocator.free(7)
    assert allocator.allocate("b", 9 * MIB)
    assert allocator.reserved_bytes == 40 * MIB
    assert allocator.allocate("c", 9 * MIB)
    assert allocator.reserved_bytes == 60 * MIB
    assert not allocator.allocate("d", 41 * MIB)
