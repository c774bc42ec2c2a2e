"""Steps that take longer and longer, and what changes with them, in synthetic measurements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from lightning_gpu_tools.advice.diagnosis import diagnose
from lightning_gpu_tools.advice.examples import a_block, cpu_run, gpu_run
from lightning_gpu_tools.advice.findings import Diagnosis, Finding
from lightning_gpu_tools.training.run_measurements import RunMeasurements

BLOCKS = 30
UP = [i / (BLOCKS - 1) for i in range(BLOCKS)]  # from 0 to 1
FORWARD, CALLBACK = "training_step/forward", "callback/Recorder"
GROWING = {"resident_bytes": [1e9 + 2e9 * part for part in UP]}


def of(steps: list[dict[str, float]], utilization: float | None = None, **options: Any) -> RunMeasurements:
    """Return a run with these milliseconds by phase in each block of ten steps."""
    phase_s = {phase: sum(one[phase] for one in steps) / 100 for phase in steps[0]}
    measured = {"steps": 10 * len(steps), "blocks": [a_block(one) for one in steps], "phase_s": phase_s}
    make = cpu_run({}) if utilization is None else gpu_run({}, utilization)
    return replace(make, **{"wall_s": sum(phase_s.values()), **measured, **options})


def run(slower: Mapping[str, float], usual_ms: float = 20.0, **options: Any) -> RunMeasurements:
    """Return steps of 20 ms that get longer, up to these milliseconds in each phase at the end."""
    phases = {FORWARD: usual_ms, **dict.fromkeys(slower.keys() - {FORWARD}, 0.0)}
    return of([{one: ms + part * slower.get(one, 0.0) for one, ms in phases.items()} for part in UP], **options)


def found(diagnosis: Diagnosis) -> dict[str, Finding]:
    return {one.cause: one for one in diagnosis.findings}


def slowdown(measured: RunMeasurements) -> Finding | None:
    return found(diagnose(measured)).get("slowing_down")


@pytest.mark.parametrize(
    ("readings", "kind", "words"),
    [
        ({"batch_items": [1000 + 2000 * part for part in UP]}, "larger_batches", "batches have 2.1 times as many"),
        ({"lost_clock_percent": [30 * part for part in UP]}, "lower_clock", "clock has lost 21% of its maximum"),
        (GROWING, "kept_memory", "memory has grown by 1.28 GiB"),
        ({"lost_clock_percent": [30.0 - 30 * part for part in UP], "batch_items": [5.0] * 9}, "unknown", "of it in"),
    ],
)
def test_the_quantity_that_changed_with_the_steps_is_named(readings: dict[Any, Any], kind: str, words: str) -> None:
    diagnosis = diagnose(run({FORWARD: 20.0}, readings=readings))
    first = diagnosis.findings[0]
    assert (first.cause, first.evidence["kind"], first.evidence["phase"]) == ("slowing_down", kind, FORWARD)
    assert (first.basis == "measured") == (kind == "unknown")
    assert words in diagnosis.why


@pytest.mark.parametrize(
    "measured",
    [
        run({"rank_wait": 20.0}),
        run({"validation": 20.0}),
        run({CALLBACK: 20.0}, usual_ms=200.0),
        run({CALLBACK: 12.0}, utilization=100.0),
        of([{FORWARD: 20.0, CALLBACK: 20.0 * (i < 10)} for i in range(BLOCKS)]),
    ],
    ids=["ranks", "validation", "small", "hidden", "slow beginning"],
)
def test_other_waits_and_small_changes_are_no_slowing_down(measured: RunMeasurements) -> None:
    assert slowdown(measured) is None
