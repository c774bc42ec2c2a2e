"""Steps that take longer and longer, and quantities that grow with them, in synthetic measurements."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from measured_runs import run_of

from lightning_gpu_tools.advice.causes import CAUSES
from lightning_gpu_tools.advice.causes.slowing_down import slowing_down
from lightning_gpu_tools.advice.diagnosis import diagnose
from lightning_gpu_tools.advice.examples import a_block, cpu_run, gpu_run
from lightning_gpu_tools.advice.findings import Diagnosis, Finding
from lightning_gpu_tools.training.phases import TRAINING_STEP, base_phase
from lightning_gpu_tools.training.run_measurements import GpuFacts, LogFile, RunMeasurements, SourceLine, StepBlock

WINDOWS = 40
UP = [i / (WINDOWS - 1) for i in range(WINDOWS)]  # from 0 to 1
FORWARD, BACKWARD, CALLBACK = "training_step/forward", "training_step/backward", "callback/Recorder"


def run(slower: Mapping[str, float], usual: Mapping[str, float] | None = None, **options: Any) -> RunMeasurements:
    """Return steps of 20 ms that get longer, up to these milliseconds in each phase at the end."""
    usual = usual or {FORWARD: 15.0, BACKWARD: 5.0}
    phases = {**usual, **slower}
    steps = [{one: usual.get(one, 0.0) + part * slower.get(one, 0.0) for one in phases} for part in UP]
    return of(steps, **options)


def of(steps: list[dict[str, float]], utilization: float | None = None, **options: Any) -> RunMeasurements:
    """Return a run with these milliseconds by phase in each window of ten steps."""
    phase_s = {phase: sum(one[phase] for one in steps) / 100 for phase in steps[0]}
    measured = {"steps": 10 * len(steps), "blocks": [a_block(one) for one in steps], "phase_s": phase_s}
    make = cpu_run({}) if utilization is None else gpu_run({}, utilization)
    return replace(make, **{"wall_s": sum(phase_s.values()), **measured, **options})


def rising(first: float, last: float) -> list[tuple[float, float]]:
    return [(10.0 * i, first + part * (last - first)) for i, part in enumerate(UP)]


def slowdown_of(measured: RunMeasurements) -> Finding:
    finding = slowing_down(measured)
    assert finding is not None
    return finding


def found(diagnosis: Diagnosis) -> dict[str, Finding]:
    return {one.cause: one for one in diagnosis.findings}


SIGNS: list[tuple[str, str, str, tuple[float, float], str]] = [
    ("kept_graph", BACKWARD, "graph_nodes", (10, 4000), "graph of the loss has grown from"),
    ("kept_objects", CALLBACK, "python_objects", (1.5e6, 1.6e6), "69,231 more Python objects are kept"),
    ("kept_memory", CALLBACK, "resident_bytes", (1e9, 3e9), "memory has grown by 1.29 GiB"),
    ("rewritten_file", CALLBACK, "written_bytes_per_step", (1e3, 1e6), "are written per step instead of"),
    ("larger_batches", FORWARD, "batch_items", (1000, 3000), "batches have 2.1 times as many elements"),
    ("storage_reads", "data_loading", "storage_bytes_per_step", (0, 1e7), "are read from storage per step"),
    ("lower_clock", FORWARD, "lost_clock_percent", (0, 30), "the GPU's clock has lost 21 % of its maximum"),
]


@pytest.mark.parametrize(("kind", "phase", "quantity", "ends", "words"), SIGNS)
def test_a_quantity_that_grows_with_the_steps_is_named(
    kind: str, phase: str, quantity: str, ends: tuple[float, float], words: str
) -> None:
    noise = random.Random(0)
    others: dict[str, Any] = {name: [(0.0, noise.random()) for _ in range(WINDOWS)] for _, _, name, _, _ in SIGNS}
    diagnosis = diagnose(run({phase: 20.0}, readings={**others, quantity: rising(*ends)}))
    first = diagnosis.findings[0]
    assert (first.cause, first.evidence["kind"], first.evidence["phase"]) == ("slowing_down", kind, phase)
    assert float(first.evidence[f"{quantity}_first"]) < float(first.evidence[f"{quantity}_last"])
    assert words in diagnosis.why


@pytest.mark.parametrize(("phase", "quantity", "ends"), [sign[1:4] for sign in SIGNS])
def test_a_quantity_is_not_blamed_for_a_phase_that_it_cannot_slow_down(
    phase: str, quantity: str, ends: tuple[float, float]
) -> None:
    other = "training_step/optimizer" if base_phase(phase) != TRAINING_STEP else "garbage_collection"
    finding = slowdown_of(run({other: 20.0}, readings={quantity: rising(*ends)}))
    assert finding.evidence["kind"] == "unknown"


def test_a_few_more_objects_or_bytes_are_not_blamed_for_long_steps() -> None:
    few: Any = {"python_objects": rising(1.5e6, 1.5e6 + 1200), "resident_bytes": rising(1e9, 1.03e9)}
    for readings in (few, {"resident_bytes": rising(1e9, 3e9)}):
        finding = slowdown_of(run({CALLBACK: 1000.0}, readings=readings))
        assert finding.evidence["kind"] == ("unknown" if readings is few else "kept_memory")


def test_the_share_is_what_was_added_and_the_rest_stays_with_the_logger() -> None:
    logger, logs = "logging/CSVLogger", {"CSVLogger": LogFile(name="metrics.csv", size_bytes=10**6, rows=41_000)}
    written: Any = {"written_bytes_per_step": rising(1e3, 1e6)}
    slower = run({logger: 20.0}, {FORWARD: 20.0, logger: 20.0}, readings=written, log_files=logs)
    named = found(diagnose(slower))
    assert named["slowing_down"].share == pytest.approx(10 / 50)
    assert named["logging"].share == pytest.approx(20 / 50)
    assert named["slowing_down"].evidence["what_grew"] == "whose file metrics.csv has grown to 41,000 rows"
    assert "the same names" in named["slowing_down"].advice
    without_rows = replace(slower, log_files={"CSVLogger": replace(logs["CSVLogger"], rows=None)})
    assert "has grown to 977 KiB" in str(found(diagnose(without_rows))["slowing_down"].evidence["what_grew"])


def test_the_report_says_how_much_longer_and_in_what() -> None:
    diagnosis = diagnose(run({CALLBACK: 12.0}))
    assert diagnosis.why == (
        'Steps became 1.6 times as long (95 % interval 1.6 to 1.6), all of it in "Recorder". The added time is 23 % '
        "of the wall time."
    )
    assert diagnosis.verdict == "low"
    partly = diagnose(run({CALLBACK: 12.0, BACKWARD: 6.0}))
    assert '67 % of it in "Recorder"' in partly.why


def test_noise_widens_the_interval_and_lowers_the_bound_of_the_speedup() -> None:
    rng = random.Random(0)
    steps = [{FORWARD: 20.0 * rng.lognormvariate(0, 0.03), CALLBACK: 12 * part} for part in UP]
    finding = slowdown_of(of(steps))
    assert finding.evidence["times_lower"] < 1.6 < finding.evidence["times_upper"]  # type: ignore[operator]
    assert 1.0 < finding.ceiling_lower < finding.ceiling


def test_every_part_that_slows_down_alike_is_the_machine() -> None:
    parts = {FORWARD: 8.0, BACKWARD: 6.0, "data_loading": 6.0}
    slower = run(parts, {one: 2 * ms for one, ms in parts.items()}, readings={"python_objects": rising(1e6, 2e6)})
    finding = found(diagnose(slower))["slowing_down"]
    assert finding.evidence["kind"] == "whole_step"
    begins = CAUSES["slowing_down"].begins
    assert callable(begins)
    assert "1.5 times as long (95 % interval 1.5 to 1.5), in all parts." in begins(finding.evidence, True)


def test_a_line_replaces_the_advice_to_find_one() -> None:
    line = SourceLine(phase=CALLBACK, file="train.py", line=7, function="on_train_batch_end", samples=100)
    (first, *_) = diagnose(run({CALLBACK: 20.0}, lines=(line,))).findings
    assert first.advice == (
        "No measured quantity grows with it. 100 % of this time is at train.py:7 in on_train_batch_end."
    )
    assert "py-spy" in diagnose(run({CALLBACK: 20.0})).findings[0].advice


@pytest.mark.parametrize(
    ("slower", "usual"),
    [
        ({"rank_wait": 20.0}, None),
        ({"monitoring": 20.0}, None),
        ({"validation": 20.0}, None),
        ({CALLBACK: 20.0}, {FORWARD: 200.0}),
        ({}, None),
    ],
)
def test_other_waits_and_small_changes_are_no_slowing_down(
    slower: dict[str, float], usual: dict[str, float] | None
) -> None:
    assert slowing_down(run(slower, usual)) is None


def test_waiting_for_a_core_is_left_out() -> None:
    slower = run({FORWARD: 20.0})
    assert slowing_down(slower) is not None
    waits = [replace(one, core_wait_s=10 * 0.02 * part) for one, part in zip(slower.blocks, UP, strict=True)]
    assert slowing_down(replace(slower, blocks=waits)) is None


def test_a_short_run_and_one_without_phases_say_nothing() -> None:
    slower = run({CALLBACK: 20.0})
    assert slowing_down(replace(slower, blocks=slower.blocks[:23])) is None
    assert slowing_down(replace(slower, blocks=slower.blocks[:24])) is not None
    assert slowing_down(replace(slower, blocks=[])) is None
    assert slowing_down(replace(slower, blocks=[StepBlock(steps=10, wall_s=1.0)] * 40)) is None


def test_a_jump_and_a_slow_beginning_are_left_to_other_causes() -> None:
    jump = [{FORWARD: 20.0, CALLBACK: 20.0 * (i > 15)} for i in range(WINDOWS)]
    assert [*found(diagnose(of(jump)))] == ["callback"]
    beginning = [{FORWARD: 20.0, CALLBACK: 20.0 * (i < 10)} for i in range(WINDOWS)]
    assert slowing_down(of(beginning)) is None


def test_a_long_run_is_judged_in_fewer_windows() -> None:
    steps = [{FORWARD: 20.0, CALLBACK: 12.0 * i / 126} for i in range(127)]
    finding = slowdown_of(of(steps))
    assert finding.evidence["times"] == pytest.approx(1.6, rel=0.02)
    assert finding.evidence["phase_ms_per_1000_steps"] == pytest.approx(12.0 / 1.26, rel=0.01)


def test_steps_that_get_longer_under_a_busy_gpu_make_no_run_healthy() -> None:
    diagnosis = diagnose(run({BACKWARD: 20.0}, utilization=99.0, readings={"graph_nodes": rising(10, 4000)}))
    assert (diagnosis.verdict, diagnosis.findings[0].cause) == ("low", "slowing_down")
    assert diagnosis.findings[0].share == pytest.approx(1 / 3)
    assert {*found(diagnosis)} == {"slowing_down"}


def test_time_that_a_busy_gpu_hides_is_no_loss() -> None:
    hidden = run({CALLBACK: 12.0}, utilization=100.0)
    assert slowing_down(hidden) is None
    half = slowdown_of(run({CALLBACK: 12.0}, utilization=90.0))
    assert half.share == pytest.approx(0.1)


def test_heat_that_grows_is_not_counted_twice() -> None:
    hot = GpuFacts(thermal_throttled_percent=60.0, held_clock_percent=70.0)
    slower = run({FORWARD: 12.0}, utilization=100.0, gpu=hot)
    assert {*found(diagnose(slower))} == {"slowing_down", "thermal_throttling"}
    clock: Any = {"lost_clock_percent": rising(0, 40)}
    assert {*found(diagnose(replace(slower, readings=clock)))} == {"slowing_down"}


@pytest.mark.parametrize("phase", ["trainer", "unexplained", "training_step"])
def test_a_long_line_without_a_name_keeps_only_what_it_had_at_the_beginning(phase: str) -> None:
    named = found(diagnose(run({phase: 20.0}, {FORWARD: 20.0})))
    assert {*named} == {"slowing_down"}
    named = found(diagnose(run({phase: 20.0}, {FORWARD: 20.0, phase: 20.0})))
    assert {*named} == {"slowing_down", "unexplained"}
    assert named["unexplained"].share == pytest.approx(0.4)


def test_the_gpu_does_not_idle_without_a_cause_in_what_was_added_to_the_step() -> None:
    diagnosis = diagnose(run({FORWARD: 20.0}, utilization=60.0))
    assert {*found(diagnosis)} == {"slowing_down"}


def test_the_longest_steps_of_a_steady_rise_are_no_slow_steps_besides() -> None:
    steps = [{"training_step": 0.01 * (1 + (number / 60) ** 3)} for number in range(400)]
    measured = run_of(steps)
    assert measured.step_times is not None
    assert measured.step_times.slow
    diagnosis = diagnose(measured)
    assert {*found(diagnosis)} == {"slowing_down"}
    assert "esides" not in diagnosis.why
