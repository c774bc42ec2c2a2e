"""The largest batch that fits, from the record of a smaller one, and the model of torch's allocator."""

from hypothesis import assume, given
from hypothesis import strategies as st

from lightning_gpu_tools.advice.batch_size import CachingAllocator, block_size, largest_batch, split
from lightning_gpu_tools.memory.readings import Block, StepMemory

GIB, MIB = 2**30, 2**20
WEIGHT, STATE, GRADIENT = 1, 2, 3
OUTPUT, TEMPORARY = 10, 11


def recorded(batch_size: int = 8, sample_mib: int = 4, weights: int = 100 * MIB) -> list[StepMemory]:
    """Return two steps of a model with a gradient and a state as large as its weights.

    Forward keeps an output, and backward needs as much again, once the old gradient is gone.
    """
    output, held = batch_size * sample_mib * MIB, ((Block(WEIGHT, weights),),)

    def step(number: int, *, has_old: bool) -> StepMemory:
        events = [
            Block(OUTPUT, output, grows=True),
            *([Block(GRADIENT, -weights)] if has_old else []),
            Block(TEMPORARY, output, grows=True),
            Block(TEMPORARY, -output),
            Block(OUTPUT, -output),
            Block(GRADIENT, weights),
            *([] if has_old else [Block(STATE, weights)]),
        ]
        return StepMemory(step=number, batch_shape=(batch_size, 512), segments=held, events=tuple(events))

    return [step(1, has_old=False), step(2, has_old=True)]


def needed(size: int, *, sample_mib: int = 4, weights: int = 100 * MIB, keeps: bool = False) -> int:
    """Return what a batch of this size takes: weights and states, two outputs, or one and an old gradient."""
    output = size * sample_mib * MIB
    return 2 * weights + max(2 * output + (weights if keeps else 0), output + weights)


samples_mib, weights_mib = st.sampled_from([2, 4, 6, 10]), st.sampled_from([100, 400])


@given(st.integers(1, 64), samples_mib, weights_mib, st.integers(600, 20_000), st.booleans())
def test_the_largest_batch_fits_and_a_little_more_does_not(
    batch_size: int, sample_mib: int, weights_mib: int, room_mib: int, keeps: bool
) -> None:
    run = recorded(batch_size, sample_mib, weights_mib * MIB)
    fits = largest_batch(run, room_mib * MIB, keeps_gradients=keeps)
    assert fits is not None
    model = {"sample_mib": sample_mib, "weights": weights_mib * MIB}
    assert fits == 0 or needed(fits, keeps=keeps, **model) <= 0.98 * room_mib * MIB
    # The state may lie in a block from which an output could have been cut, and a search is exact to a percent.
    more = 1 + int(1.02 * fits)
    lost = more * sample_mib * MIB + 2 * weights_mib * MIB
    assert needed(more, keeps=keeps, **model) + lost > 0.97 * room_mib * MIB


@given(st.integers(1, 4096), st.integers(1, 4096), st.integers(1, 64))
def test_accumulation_keeps_the_effective_batch_size(batch_size: int, fits: int, accumulate: int) -> None:
    assume(fits < batch_size)
    smaller, batches = split(batch_size, fits, accumulate)
    assert 1 <= smaller <= fits
    effective = smaller * batches / (batch_size * accumulate)
    assert 1 <= effective < 1 + batches / accumulate / batch_size
    if batch_size % fits == 0:
        assert (smaller, effective) == (fits, 1)


# The model of torch's allocator: laws that any allocator keeps. Torch's own is compared with it on a GPU


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
