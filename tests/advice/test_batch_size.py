"""The largest batch that fits, by what was measured at a smaller one."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lightning_gpu_tools.advice.batch_size import MARGIN, StepPeak, largest_batch, split, step_peak
from lightning_gpu_tools.training.memory_readings import MemoryHoldings, MemoryReading, RankMemory, StepMemory

GIB, MIB = 2**30, 2**20
sizes = st.integers(1, 100 * GIB)


@given(st.integers(1, 4096), sizes, sizes, st.integers(0, 100 * GIB), st.integers(0, 100 * GIB))
def test_what_is_said_to_fit_fits_and_one_more_does_not(
    batch_size: int, for_batch: int, total: int, fixed: int, others: int
) -> None:
    peak = StepPeak(batch_size=batch_size, begin_bytes=fixed, peak_bytes=fixed + for_batch)
    fits = largest_batch([peak], total - others).size
    assert fits is not None

    def needs(size: int) -> float:
        return fixed + size * for_batch / batch_size

    room = (1 - MARGIN) * (total - others)
    assert fits == 0 or needs(fits) <= room + 1e-9 * total
    assert needs(fits + 1) > room - 1e-9 * total


@given(st.lists(st.tuples(st.integers(1, 256), st.integers(1, GIB)), min_size=1), st.integers(1, 256))
def test_nothing_fits_that_has_failed(measured: list[tuple[int, int]], failed: int) -> None:
    peaks = [StepPeak(batch_size=size, begin_bytes=GIB, peak_bytes=GIB + peak) for size, peak in measured]
    error = StepPeak(batch_size=failed, begin_bytes=GIB, peak_bytes=2 * GIB, is_complete=False)
    fits = largest_batch([*peaks, error], 80 * GIB)
    assert fits.size is not None
    assert fits.size < failed
    assert not fits.is_bound


def test_a_bound_is_told_from_a_prediction() -> None:
    failed = StepPeak(batch_size=64, begin_bytes=GIB, peak_bytes=11 * GIB, is_complete=False)
    bound = largest_batch([failed], 11 * GIB)
    assert bound.is_bound
    assert bound.size == math.floor(64 * (10 - 11 * MARGIN) / 10)
    unknown = largest_batch([], GIB)
    assert (unknown.size, unknown.why_not) == (None, "No step was measured whose batch made the memory rise.")


@given(st.integers(1, 4096), st.integers(1, 4096), st.integers(1, 64))
def test_accumulation_keeps_the_effective_batch_size(batch_size: int, fits: int, accumulate: int) -> None:
    assume(fits < batch_size)
    smaller, batches = split(batch_size, fits, accumulate)
    assert 1 <= smaller <= fits
    effective = smaller * batches / (batch_size * accumulate)
    assert 1 <= effective < 1 + batches / accumulate / batch_size
    if batch_size % fits == 0:
        assert (smaller, effective) == (fits, 1)


def reading(allocated: int, peak: int) -> MemoryReading:
    return MemoryReading(
        allocated_bytes=allocated, peak_allocated_bytes=peak, reserved_bytes=peak, peak_reserved_bytes=peak
    )


def step(number: int, shape: tuple[int, ...] | None) -> StepMemory:
    return StepMemory(step=number, batch_shape=shape, begin=reading(100, 900), after_forward=reading(600, 900))


@pytest.mark.parametrize(
    ("last", "peaks", "expected"),
    [
        pytest.param(step(9, (8, 512)), {"forward": 700, "backward": 900}, (8, 900), id="a peak in a step"),
        pytest.param(step(9, (8, 512)), {"before_training": 900}, (8, 600), id="a higher one before training"),
        pytest.param(step(1, (8, 512)), {"backward": 900}, None, id="the first step alone"),
        pytest.param(step(9, None), {"backward": 900}, None, id="a batch of unknown size"),
        pytest.param(None, {}, None, id="no step"),
    ],
)
def test_the_peak_of_a_step_is_taken_where_one_is_known(
    last: StepMemory | None, peaks: dict[str, int], expected: tuple[int, int] | None
) -> None:
    first = StepMemory(step=1, begin=reading(50, 500))
    memory = RankMemory(latest=reading(100, 900), first_step=first, last_step=last, peaks_bytes=peaks)
    found = step_peak(memory)
    assert (None if found is None else (found.batch_size, found.peak_bytes)) == expected
    if found is not None:
        by_items = step_peak(memory, by_items=True)
        assert by_items is not None
        assert by_items.batch_size == 8 * 512


@pytest.mark.parametrize(
    ("phase", "backward_bytes"),
    [
        ("forward", 300 + 3 * 100),  # 300 are left by forward, which needed 100 more for a moment
        ("backward", 1000),
        ("optimizer", 1000),
    ],
)
def test_old_gradients_hide_what_backward_needs(phase: str, backward_bytes: int) -> None:
    """200 of parameters and states, 300 of gradients that go before backward, and a peak of 1200."""
    step = StepMemory(
        step=2,
        batch_shape=(10, 8),
        begin=reading(520, 1200),
        after_forward=reading(1100, 1200),
        before_backward=reading(500, 1200),
    )
    memory = RankMemory(
        latest=reading(500, 1200),
        holdings=MemoryHoldings(parameters_bytes=200, gradients_bytes=300, gradients_kept_bytes=300),
        first_step=StepMemory(step=1, begin=reading(200, 1200)),
        last_step=step,
        peaks_bytes={phase: 1200},
    )
    found = step_peak(memory, batch_bytes=20)
    assert found == StepPeak(
        batch_size=10, begin_bytes=500, peak_bytes=1200, freed_bytes=300, backward_bytes=backward_bytes
    )
    assert largest_batch([found], 10_000).size == min(10 * 7500 // 700, 10 * 7800 // backward_bytes)
