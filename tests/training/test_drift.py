"""Quantities that may grow along with the steps, read from this process, real files and real graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from trainings import HandClock

from lightning_gpu_tools.training import drift
from lightning_gpu_tools.training.drift import Drift, GraphSizes
from lightning_gpu_tools.training.run_measurements import LogFile
from lightning_gpu_tools.training.step_clock import WARM_UP_STEPS, StepClock

READINGS = 1000


@pytest.fixture
def clock() -> StepClock:
    clock = StepClock(HandClock())
    clock.start()
    clock.steps = WARM_UP_STEPS + 1
    return clock


def reader(clock: StepClock, lost_clock_percent: float | None = None, **logs: str) -> Drift:
    return Drift(clock, GraphSizes(clock), logs, "gpu_report", lambda: lost_clock_percent)


def summed(count: int) -> torch.Tensor:
    weight = torch.ones(1, requires_grad=True)
    total = weight * 2
    for _ in range(count):
        total = total + 1
    return total


def test_a_graph_is_counted_in_ever_fewer_steps(clock: StepClock) -> None:
    graph, ran = GraphSizes(clock), []
    backward = graph.around(lambda loss, *args, **kwargs: ran.append((loss, args, kwargs)))
    loss = summed(0)
    for clock.steps in range(1, 1001):
        backward(loss, clock.steps, option=1)
    assert ran == [(loss, (step,), {"option": 1}) for step in range(1, 1001)]
    assert [step for step, _ in graph.points][:6] == [23, 34, 45, 56, 70, 87]
    assert len(graph.points) == 17
    assert {nodes for _, nodes in graph.points} == {2}  # the product, and the weight
    assert clock.times.left_out == set()
    assert "monitoring" in clock.seconds or clock.seconds == {}


def test_its_size_is_that_of_what_backward_runs_through(clock: StepClock) -> None:
    graph = GraphSizes(clock)
    for number, loss in enumerate((summed(0), summed(500), [summed(3), summed(9)], (), None, torch.ones(1), object())):
        clock.steps = 100 * (number + 1)
        graph.record(loss)
    doubled = summed(0)
    for _ in range(100):  # more ways through it than could ever be followed
        doubled = doubled + doubled
    graph.record(doubled)
    assert [nodes for _, nodes in graph.points] == [2, 502, 5, 102]


def test_a_huge_graph_is_walked_through_up_to_a_bound(clock: StepClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drift, "_MAX_NODES", 100)
    graph = GraphSizes(clock)
    graph.record(summed(10_000))
    assert clock.times.left_out == set()
    monkeypatch.setattr(drift, "_MANY_NODES", 99)
    graph.points.clear()
    graph.record(summed(10_000))
    assert clock.times.left_out == {clock.steps}  # a step that such a walk makes long
    assert graph.points == [(clock.steps, 100)]


def test_the_graph_of_a_loss_that_raises_is_not_counted_again(clock: StepClock) -> None:
    class Odd(torch.Tensor):
        @property
        def grad_fn(self) -> Any:
            raise RuntimeError("no graph of mine")

    graph = GraphSizes(clock)
    graph.record(torch.ones(1).as_subclass(Odd))
    assert graph.points == []
    assert graph.next_step == float("inf")


def test_readings_begin_after_the_warm_up_and_follow_the_process(clock: StepClock, tmp_path: Path) -> None:
    one = reader(clock, lost_clock_percent=7.0)
    clock.steps = WARM_UP_STEPS
    one.poll()
    assert one.facts() == {}
    kept, file = [], (tmp_path / "log").open("wb", buffering=0)
    for clock.steps in range(WARM_UP_STEPS + 10, WARM_UP_STEPS + 60, 10):
        one.poll()
        kept.append([float(number) + 0.5 for number in range(30_000)])
        file.write(bytes(50_000))
        clock.times.batch_items = clock.steps
    file.close()
    facts = one.facts(storage=[(10, 0), (30, 5), (30, 5), (40, 1005)])
    objects = [value for _, value in facts["python_objects"]]
    assert objects[-1] - objects[0] == pytest.approx(4 * 30_000, abs=20_000)
    assert [step for step, _ in facts["resident_bytes"]] == [30, 40, 50, 60, 70]
    assert facts["batch_items"] == [(40, 30), (50, 40), (60, 50), (70, 60)]
    assert facts["lost_clock_percent"] == [(step, 7.0) for step in (30, 40, 50, 60, 70)]
    assert facts["storage_bytes_per_step"] == [(35.0, 100.0)]
    assert "graph_nodes" not in facts
    if "written_bytes_per_step" in facts:  # the kernel counts them
        assert [step for step, _ in facts["written_bytes_per_step"]] == [35.0, 45.0, 55.0, 65.0]
        assert all(5000 <= rate < 20_000 for _, rate in facts["written_bytes_per_step"])


def test_what_is_written_every_100_steps_is_spread_over_them(clock: StepClock) -> None:
    written = [(float(step), step // 100 * step) for step in range(100, 2500, 7)]
    rates = [rate for _, rate in reader(clock).facts(storage=written)["storage_bytes_per_step"]]
    assert len(rates) == 11
    assert rates == sorted(rates)
    assert 0 < 3 * rates[0] < rates[-1]


def test_memory_is_bounded_and_the_whole_run_stays(clock: StepClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drift, "resident_memory_bytes", lambda: 1)
    monkeypatch.setattr(drift, "io_counters", lambda pid: {})
    one, waits = reader(clock), []
    for clock.steps in range(WARM_UP_STEPS + 1, WARM_UP_STEPS + 1 + READINGS):
        waits.append(one.poll())
    facts = one.facts()
    steps = [step for step, _ in facts["resident_bytes"]]
    assert len(steps) <= 200
    assert steps[0] == WARM_UP_STEPS + 1
    assert steps[-1] > 0.9 * READINGS
    assert steps == sorted(steps)
    assert waits[-1] > waits[0] >= 0.25
    assert "written_bytes_per_step" not in facts


def test_the_file_of_a_logger_that_grows_is_found(clock: StepClock, tmp_path: Path) -> None:
    (tmp_path / "hparams.yaml").write_text("a: 1\n" * 100)
    one = reader(clock, CSVLogger=str(tmp_path), Other=str(tmp_path / "not there yet"))
    for rows in (1, 20, 300):
        (tmp_path / "metrics.csv").write_text("step,loss\n" * rows)
        (tmp_path / "gpu_report.json").write_text("x" * 100_000 * rows)
        one.poll()
    assert one.log_files == {"CSVLogger": LogFile(name="metrics.csv", size_bytes=3000, rows=300)}
    (tmp_path / "metrics.csv").write_text("step,loss\n")  # it is just being written again
    one.poll()
    assert one.log_files["CSVLogger"].rows == 300


def test_rows_are_counted_only_where_there_are_some(
    clock: StepClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "events.out").write_text("x\n" * 10)
    one = reader(clock, Logger=str(tmp_path))
    one.poll()
    assert one.log_files == {"Logger": LogFile(name="events.out", size_bytes=20, rows=None)}
    monkeypatch.setattr(drift, "_MAX_COUNTED_BYTES", 1000)
    (tmp_path / "large.jsonl").write_text("x\n" * 1000)
    one.poll()
    assert one.log_files == {"Logger": LogFile(name="large.jsonl", size_bytes=2000, rows=None)}
