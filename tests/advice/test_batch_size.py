"""The largest batch that fits, by what was measured at a smaller one."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lightning_gpu_tools.advice.batch_size import FRAGMENTS, StepPeak, largest_batch, split, step_peak
from lightning_gpu_tools.training.memory_readings import MemoryHoldings, MemoryReading, RankMemory, StepMemory, StepNeed

GIB, MIB = 2**30, 2**20
sizes = st.integers(1, 100 * GIB)


@given(st.integers(1, 4096), sizes, sizes, st.integers(0, 100 * GIB), st.integers(0, 100 * GIB))
def test_what_is_said_to_fit_fits_and_one_more_does_not(
    batch_size: int, for_batch: int, total: int, fixed: int, others: int
) -> None:
    peak = StepPeak(batch_size=batch_size, begin_bytes=fixed, needs=(StepNeed(0, for_batch),))
    fits = largest_batch([peak], total - others).size
    assert fits is not None

    def needs(size: int) -> float:
        return fixed + size * for_batch / batch_size

    room = fixed + (1 - FRAGMENTS) * (total - others - fixed)
    assert fits == 0 or needs(fits) <= room + 1e-9 * total
    assert needs(fits + 1) > room - 1e-9 * total


@given(st.lists(st.tuples(st.integers(1, 256), st.integers(1, GIB)), min_size=1), st.integers(1, 256))
def test_nothing_fits_that_has_failed(measured: list[tuple[int, int]], failed: int) -> None:
    peaks = [StepPeak(batch_size=size, begin_bytes=GIB, needs=(StepNeed(0, peak),)) for size, peak in measured]
    error = StepPeak(batch_size=failed, begin_bytes=GIB, needs=(StepNeed(0, GIB),), is_complete=False)
    fits = largest_batch([*peaks, error], 80 * GIB)
    assert fits.size is not None
    assert fits.size < failed
    assert not fits.is_bound


def test_a_bound_is_told_from_a_prediction() -> None:
    failed = StepPeak(batch_size=64, begin_bytes=GIB, needs=(StepNeed(0, 10 * GIB),), is_complete=False)
    bound = largest_batch([failed], 11 * GIB)
    assert bound.is_bound
    assert bound.size == math.floor(64 * (1 - FRAGMENTS))
    unknown = largest_batch([], GIB)
    assert (unknown.size, unknown.why_not) == (None, "No step was recorded whose batch made the memory rise.")


@given(st.integers(1, 4096), st.integers(1, 4096), st.integers(1, 64))
def test_accumulation_keeps_the_effective_batch_size(batch_size: int, fits: int, accumulate: int) -> None:
    assume(fits < batch_size)
    smaller, batches = split(batch_size, fits, accumulate)
    assert 1 <= smaller <= fits
    effective = smaller * batches / (batch_size * accumulate)
    assert 1 <= effective < 1 + batches / accumulate / batch_size
    if batch_size % fits == 0:
        assert (smaller, effective) == (fits, 1)


def reading(allocated: int) -> MemoryReading:
    return MemoryReading(
        allocated_bytes=allocated, peak_allocated_bytes=900, reserved_bytes=900, peak_reserved_bytes=900
    )


HELD = MemoryHoldings(parameters_bytes=50, gradients_bytes=30, gradients_kept_bytes=30, optimizer_bytes=100)
# Forward needs 400 beside what was there, and backward 600, without 30 of old gradients.
NEEDS = (StepNeed(20, 0), StepNeed(0, 400), StepNeed(-30, 600))


def memory(number: int, shape: tuple[int, ...] | None = (8, 512), begin: int = 220) -> RankMemory:
    """Return what is known when a step was recorded that began with a batch of 40 bytes."""
    first = StepMemory(step=1, batch_shape=shape, begin=reading(90))
    step = StepMemory(step=number, batch_shape=shape, begin=reading(begin), needs=NEEDS)
    return RankMemory(latest=reading(900), holdings=HELD, first_step=first, last_step=step, traced_step=step)


def test_a_recorded_step_has_what_it_needs_beside_its_batch() -> None:
    found = step_peak(memory(2), batch_bytes=40)
    assert found == StepPeak(
        batch_size=8, begin_bytes=180, needs=(StepNeed(20, 40), StepNeed(0, 440), StepNeed(-30, 640))
    )
    assert step_peak(memory(2), batch_bytes=40, by_items=True) == replace(found, batch_size=8 * 512)


def test_the_first_step_is_still_to_get_states_and_old_gradients() -> None:
    found = step_peak(memory(1, begin=90), batch_bytes=40)
    assert found is not None
    assert found.begin_bytes == 90 - 40 + 100 + 30


def test_accumulated_gradients_stay_through_backward() -> None:
    found = step_peak(memory(2), accumulates=True)
    assert found is not None
    assert [need.fixed_bytes for need in found.needs] == [20, 0, 0]


@pytest.mark.parametrize(
    "unknown",
    [
        pytest.param(memory(2, shape=None), id="a batch of unknown size"),
        pytest.param(replace(memory(2), traced_step=None), id="no recorded step"),
        pytest.param(replace(memory(2), holdings=None), id="no step of the optimizer"),
    ],
)
def test_nothing_is_said_of_what_was_not_recorded(unknown: RankMemory) -> None:
    assert step_peak(unknown) is None


def test_what_does_not_depend_on_the_batch_may_not_fit() -> None:
    peak = StepPeak(batch_size=8, begin_bytes=500, needs=(StepNeed(600, 0), StepNeed(0, 80)))
    assert largest_batch([peak], 1090).size == 0
    assert largest_batch([peak], 1100).size == int(8 * (1 - FRAGMENTS) * 600 / 80)
