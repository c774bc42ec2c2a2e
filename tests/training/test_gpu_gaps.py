"""Gaps on the GPU and what the host did meanwhile, on data."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gpu_tools.training.gpu_work import Gap, HostTime, idle_by_phase, without_work

PHASES = [("callback/A", 2.0), ("trainer", 1.0), ("data_loading", 3.0), ("host_to_device_copy", 1.0)]  # from 3 to 10


@pytest.mark.parametrize(
    ("begin_s", "end_s", "idle"),
    [
        (3.0, 10.0, {"callback/A": 2.0, "trainer": 1.0, "data_loading": 3.0, "host_to_device_copy": 1.0}),
        (7.0, 10.0, {"data_loading": 2.0, "host_to_device_copy": 1.0}),  # the GPU was busy up to 7
        (9.5, 10.5, {"host_to_device_copy": 1.0}),  # and copies until 10.5
        (12.0, 12.0, {}),  # all of it was hidden
        (12.0, 12.5, {"host_to_device_copy": 0.5}),  # but for the copy, which the GPU does after its kernels
    ],
)
def test_the_gpu_is_idle_between_two_kernels(begin_s: float, end_s: float, idle: dict[str, float]) -> None:
    assert idle_by_phase(Gap(begin_s, end_s, 10.0, PHASES)) == pytest.approx(idle)


@pytest.mark.parametrize("busy", ["validation", "rank_wait/signal check"])
def test_a_gpu_that_validates_or_waits_for_other_ranks_is_busy(busy: str) -> None:
    spent = [("callback/A", 1.0), (busy, 5.0), ("data_loading", 1.0)]
    assert idle_by_phase(Gap(3.0, 10.0, 10.0, spent)) == {"callback/A": 1.0, "data_loading": 1.0}


@given(
    st.lists(st.tuples(st.sampled_from(["a", "b", "c"]), st.floats(0, 10)), max_size=6),
    st.floats(0, 50),
    st.floats(0, 50),
)
def test_the_parts_never_exceed_the_gap_or_the_phase(
    spent: list[tuple[str, float]], begin_s: float, length_s: float
) -> None:
    idle = idle_by_phase(Gap(begin_s, begin_s + length_s, 30.0, spent))
    assert sum(idle.values()) <= length_s + 1e-9
    for phase in {"a", "b", "c"} & idle.keys():
        assert idle[phase] <= sum(seconds for name, seconds in spent if name == phase) + 1e-9


@given(*[st.floats(0, 50)] * 4)
def test_work_in_a_gap_is_no_idle_time(begin_s: float, length_s: float, first_s: float, last_s: float) -> None:
    spent = [("a", 20.0), ("b", 10.0)]
    gap = Gap(begin_s, begin_s + length_s, 30.0, spent)
    left_s = max(0.0, length_s - first_s - last_s)
    left = without_work(gap, first_s, last_s)
    assert left.gpu_end_s - left.gpu_begin_s == pytest.approx(left_s, abs=1e-9)
    assert begin_s <= left.gpu_begin_s <= left.gpu_end_s <= begin_s + length_s
    assert sum(idle_by_phase(left).values()) <= sum(idle_by_phase(gap).values()) + 1e-9


def test_the_clocks_are_tied_where_the_gpu_was_idle() -> None:
    time = HostTime()
    time.learn(100.0, 5.0)  # behind other work: it came to this 0.3 s after it was asked for
    assert time.at(5.0) == pytest.approx(100.0)
    time.learn(101.0, 5.7)  # idle: at once
    assert time.at(5.7) == pytest.approx(101.0)
    assert time.at(5.0) == pytest.approx(100.3)
    time.learn(102.0, 7.0)  # behind other work again
    assert time.at(7.0) == pytest.approx(102.3, abs=1e-3)
