"""From samples to windows, timelines and metrics: arithmetic that must not lose, double or invent anything."""

import dataclasses
from typing import get_args, get_type_hints

import pytest

from lightning_gpu_tools.gpus.metrics import (
    LOGGED,
    GpuSample,
    GpuSummary,
    GpuWindow,
    Timeline,
    gpu_metrics,
    mean_window,
    over_run,
    with_shares,
)
from lightning_gpu_tools.gpus.readings import GpuProcess, UtilizationSample, weights_s
from lightning_gpu_tools.gpus.windows import WindowBuilder
from lightning_gpu_tools.reports.text import COLUMNS


def utilization_samples(*pairs: tuple[float, float]) -> tuple[UtilizationSample, ...]:
    return tuple(UtilizationSample(time_s=time_s, percent=percent) for time_s, percent in pairs)


def at(time_s: float, *utilization: tuple[float, float], processes=None, **values) -> GpuSample:
    samples = utilization_samples(*utilization)
    return GpuSample(uuid="GPU-a", time_s=time_s, utilization=samples, values=values, processes=processes)


def every_second(begin_s: float, end_s: float) -> float:
    return max(0.0, end_s - begin_s)


def window_of(*seen: GpuSample):
    builder = WindowBuilder("GPU-a", every_second)
    for one in seen:
        builder.add(one)
    return builder.take()


# Weights


@pytest.mark.parametrize(
    ("times", "previous_s", "expected"),
    [
        ([5.0], None, [1.0]),
        ([5.0, 5.5, 5.75], 4.9, [0.1, 0.5, 0.25]),
        ([5.0, 9.0], 4.5, [0.5, 1.0]),  # a hole stands for nothing beyond the longest period
        ([5.0, 5.0], 4.5, [0.5, 0.0]),
        ([5.0], 6.0, [0.0]),  # the clock was set back
    ],
)
def test_a_sample_stands_for_the_time_since_the_one_before(times, previous_s, expected):
    assert weights_s(utilization_samples(*((time_s, 0) for time_s in times)), previous_s) == pytest.approx(expected)


# Windows


def test_gauges_are_of_the_last_poll_and_memory_peaks():
    first = at(1.0, memory_used_bytes=900, power_watts=50.0, temperature_celsius=60.0, processes=(GpuProcess(pid=1),))
    window = window_of(first, at(2.0, memory_used_bytes=300, power_watts=70.0, memory_total_bytes=1000))
    assert (window.memory_used_bytes, window.memory_used_bytes_max, window.memory_total_bytes) == (300, 900, 1000)
    assert window.power_watts == 70
    assert window.temperature_celsius is None  # not that of a poll before
    assert window.processes is None


def test_means_of_counters_are_weighted_by_time_and_sums_add_up():
    window = window_of(
        at(0.0),
        at(1.0, sm_active_percent=90.0, throttled_percent=110.0, energy_joules=5.0),
        at(4.0, sm_active_percent=10.0, throttled_percent=98.0, energy_joules=20.0, power_capped_percent=50.0),
    )
    assert window.sm_active_percent == pytest.approx((90 + 3 * 10) / 4)
    assert window.throttled_percent == 100  # never more, because counters go in steps
    assert window.power_capped_percent == 50  # over the three seconds in which it was there
    assert window.energy_joules == 25
    assert window.tensor_active_percent is None
    assert window_of(at(0.0), at(0.0, sm_active_percent=90.0)).sm_active_percent is None  # no time has passed


# Timelines


def test_a_full_timeline_halves_its_resolution():
    timeline = Timeline(4, width_s=1.0)
    for i in range(4):
        timeline.add(100.0 + i, float(i))
    assert timeline.points() == [(100.5, 0), (101.5, 1), (102.5, 2), (103.5, 3)]
    timeline.add(104.0, 4.0)
    assert timeline.points() == [(101.0, 0.5), (103.0, 2.5), (105.0, 4.0)]


# The table


def test_peaks_include_validation_but_means_do_not():
    training, validation = (
        window_of(
            at(0.0, sm_active_percent=percent),
            at(1.0, (1.0, percent), sm_active_percent=percent, memory_used_bytes=used),
        )
        for percent, used in ((90.0, 5), (10.0, 7))
    )
    found = over_run(training, validation)
    assert found["memory_used_bytes_max"] == 7
    assert found["utilization_percent_mean"] == found["sm_active_percent"] == 90.0
    assert found["temperature_celsius_max"] is None


# Where readers look for a metric: in the loggers and their documentation, and in the report


def test_a_lost_gpu_counts_for_as_long_as_it_was_observed() -> None:
    lost = GpuWindow(utilization_percent_mean=10.0, utilization_observed_s=1.0, power_watts=100.0)
    whole = GpuWindow(utilization_percent_mean=90.0, utilization_observed_s=9.0, power_watts=300.0)
    mean = mean_window([lost, whole])
    assert (mean.utilization_percent_mean, mean.power_watts) == (82.0, 200.0)
    assert mean_window([]).utilization_percent_mean is None


def test_docs_list_the_logged_metrics() -> None:
    window = GpuWindow(**{field.name: 1 for field in dataclasses.fields(GpuWindow)})  # type: ignore[arg-type]
    logged = gpu_metrics(0, window, energy_joules=1.0)
    assert {f"gpu/0/{name}" for name in LOGGED} == {*logged}, "describe it in LOGGED of gpus/metrics.py"


def test_every_gpu_number_is_in_a_table_of_the_report() -> None:
    numbers = {name for name, hint in get_type_hints(GpuSummary).items() if {*get_args(hint)} & {int, float}}
    shown = {column.field for column in COLUMNS}
    assert numbers == shown, "add a line to COLUMNS of reports/text.py"


# Division of a GPU's use between this job and others

OURS = GpuProcess(pid=1, memory_used_bytes=5, utilization_percent=60.0)
MATE = GpuProcess(pid=2, memory_used_bytes=3, utilization_percent=10.0)
THEIRS = GpuProcess(pid=9, memory_used_bytes=7, utilization_percent=20.0)


def shares(processes: list[GpuProcess] | None, own_pids: set[int] | None) -> tuple[float | None, ...]:
    found = with_shares(GpuWindow(processes=None if processes is None else tuple(processes)), own_pids)
    return found.others_memory_bytes, found.own_utilization_percent, found.others_utilization_percent


def test_use_is_divided_as_far_as_the_driver_reports_it() -> None:
    assert shares([OURS, MATE, THEIRS], {1, 2}) == (7, 70.0, 20.0)
    assert shares([OURS, THEIRS, GpuProcess(pid=8)], {1}) == (None, 60.0, None)  # of one side alone
    assert shares([OURS, THEIRS], None) == shares(None, {1}) == shares([], {1}) == (None,) * 3
