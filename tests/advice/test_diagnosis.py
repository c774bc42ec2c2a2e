"""Verdicts and findings on given measurements."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gpu_tools.advice.diagnosis import diagnose
from lightning_gpu_tools.advice.findings import MIN_CEILING, Finding
from lightning_gpu_tools.host import HostBudget
from lightning_gpu_tools.training.run_measurements import LoaderSettings, RunMeasurements, StepBlock, settled


def block(wait_ms: float, rest_ms: float = 10.0, steps: int = 10, **options: float) -> StepBlock:
    """Steps with this wait for data and this much time for the rest."""
    zero = dict.fromkeys(StepBlock.__dataclass_fields__, 0.0)
    data_s, rest_s = steps * wait_ms / 1e3, steps * rest_ms / 1e3
    paused_s = options.get("paused_s", 0.0)
    values = {"wall_s": data_s + rest_s + paused_s, "data_loading_s": data_s, "training_step_s": rest_s}
    return StepBlock(**{**zero, **values, **options, "steps": steps})


def workers(count: int) -> LoaderSettings:
    return LoaderSettings(num_workers=count, prefetch_factor=2, persistent_workers=True, pin_memory=False)


def a_host(cores: float = 64, **options: Any) -> HostBudget:
    return HostBudget(**{"cores": cores, "memory_available_bytes": 2**36, "shm_free_bytes": 2**35, **options})


def run(blocks: list[StepBlock], phases: dict[str, float] | None = None, **options: Any) -> RunMeasurements:
    wall_s = sum(b.wall_s for b in blocks)
    loader = LoaderSettings(num_workers=0, prefetch_factor=None, persistent_workers=False, pin_memory=False)
    return RunMeasurements(
        **{
            "wall_s": wall_s,
            "steps": sum(b.steps for b in blocks),
            "phase_s": phases or {"data_loading": sum(b.data_loading_s for b in blocks)},
            "blocks": blocks,
            "host": a_host(),
            "loader": loader,
            **options,
        }
    )


def only_finding(measured: RunMeasurements) -> Finding:
    (finding,) = diagnose(measured, min_seconds=0).findings
    return finding


def test_a_wait_for_data_has_share_ceiling_and_settings() -> None:
    finding = only_finding(run([block(wait_ms=30, rest_ms=10)] * 10))
    assert finding.cause == "data_loading"
    assert finding.share == pytest.approx(0.75)
    assert finding.ceiling == pytest.approx(4.0)
    assert finding.evidence["kind"] == "too_few_workers"
    assert finding.evidence["num_workers_needed"] == 4
    assert "num_workers=4 (now 0)" in finding.advice


@pytest.mark.parametrize(("busy_cores", "speedup"), [(1, 2.0), (2, 40 / 25)])
def test_a_step_on_the_cpu_takes_cores_away_from_loading(busy_cores: int, speedup: float) -> None:
    """Steps of 40 ms, 30 of them loading, on 2 cores: training keeps one of them busy, or both."""
    measured = run(
        [block(wait_ms=30, rest_ms=10, data_loading_cpu_s=0.30)] * 10,
        host=a_host(2),
        busy_cores=busy_cores,
    )
    assert only_finding(measured).evidence["predicted_speedup"] == pytest.approx(speedup)


@pytest.mark.parametrize(("cpu_s", "kind"), [(0.150, "cpu_bound"), (0.100, "too_few_workers")])
def test_workers_that_use_every_core_are_not_multiplied(cpu_s: float, kind: str) -> None:
    """Steps of 40 ms on 4 cores pay for 160 ms of CPU time: 10 for training, the rest for loading."""
    finding = only_finding(run([block(30)] * 10, loader=workers(4), host=a_host(4), worker_cpu_s_per_batch=cpu_s))
    assert finding.evidence["kind"] == kind
    assert finding.advice.startswith("More workers will not help") == (kind == "cpu_bound")
    assert "4 cores" in finding.advice


def test_workers_that_wait_for_storage_are_multiplied_beyond_the_cores() -> None:
    finding = only_finding(run([block(30)] * 10, loader=workers(3), host=a_host(2), worker_cpu_s_per_batch=0.002))
    assert finding.evidence["kind"] == "too_few_workers"
    assert "num_workers=14 (now 3)" in finding.advice


def test_cores_used_by_other_jobs_are_mentioned() -> None:
    finding = only_finding(
        run([block(30)] * 10, loader=workers(4), host=a_host(cores_in_reach=4.04), worker_cpu_s_per_batch=0.150)
    )
    assert finding.evidence["kind"] == "cpu_bound"
    assert "64 cores, of which other jobs leave it 4" in finding.advice


def test_a_full_shared_memory_is_to_be_enlarged() -> None:
    finding = only_finding(
        run([block(30)] * 10, loader=workers(2), host=a_host(shm_free_bytes=2**26), batch_bytes=2**24)
    )
    assert "--shm-size" in finding.advice
    assert "now 2" in finding.advice


def test_the_ranks_that_share_the_cores_are_mentioned() -> None:
    finding = only_finding(
        run([block(30)] * 10, loader=workers(3), host=a_host(8, local_ranks=4), worker_cpu_s_per_batch=0.080)
    )
    assert "8 cores for 4 ranks" in finding.advice


def test_a_loader_of_another_kind_gets_no_settings() -> None:
    finding = only_finding(run([block(30)] * 10, loader=None))
    assert "kind" not in finding.evidence
    assert "num_workers" not in finding.advice


def test_waits_in_bursts_count_by_their_sum() -> None:
    """With several workers every n-th batch waits for all: the median step waits for nothing."""
    steps = [block(0, steps=1)] * 7 + [block(80, steps=1)]
    burst = sum(steps[1:], steps[0])
    assert only_finding(run([burst] * 10)).share == pytest.approx(0.5)


def test_one_long_wait_is_no_finding() -> None:
    diagnosis = diagnose(run([block(0)] * 19 + [block(500)]), min_seconds=0)
    assert diagnosis.verdict == "healthy"


def test_a_wait_of_less_than_a_millisecond_is_no_finding() -> None:
    assert diagnose(run([block(0.9, rest_ms=1)] * 10), min_seconds=0).verdict == "healthy"
    assert diagnose(run([block(1.1, rest_ms=1)] * 10), min_seconds=0).verdict == "low"


@pytest.mark.parametrize(("wait_ms", "verdict"), [(0.52, "low"), (0.48, "healthy")])
def test_advice_begins_at_a_gain_of_five_percent(wait_ms: float, verdict: str) -> None:
    assert MIN_CEILING == 1.05
    measured = run([block(10 * wait_ms, rest_ms=100)] * 10)
    assert diagnose(measured, min_seconds=0).verdict == verdict


@pytest.mark.parametrize(("steps", "verdict"), [(49, "too_short"), (50, "healthy")])
def test_fewer_steady_steps_than_asked_for_are_not_judged(steps: int, verdict: str) -> None:
    assert diagnose(run([block(0, steps=steps)]), min_steps=50, min_seconds=0).verdict == verdict


@pytest.mark.parametrize(("min_seconds", "verdict"), [(1.01, "too_short"), (0.99, "healthy")])
def test_fewer_seconds_than_asked_for_are_not_judged(min_seconds: float, verdict: str) -> None:
    assert diagnose(run([block(0)] * 10), min_seconds=min_seconds).verdict == verdict


def test_a_wait_costs_at_most_the_gpus_idle_time() -> None:
    finding = only_finding(run([block(30)] * 10, on_gpu=True, utilization_percent=60.0))
    assert finding.share == pytest.approx(0.4)
    assert "pin_memory=True (now False)" in finding.advice


def test_a_busy_gpu_is_healthy_however_long_the_host_waits() -> None:
    diagnosis = diagnose(run([block(30)] * 10, on_gpu=True, utilization_percent=93.0), min_seconds=0)
    assert diagnosis.verdict == "healthy"
    assert diagnosis.findings == ()
    assert "93 %" in diagnosis.why


@pytest.mark.parametrize(("threshold", "verdict"), [(69.9, "healthy"), (70.1, "low")])
def test_the_threshold_decides_what_is_low(threshold: float, verdict: str) -> None:
    measured = run([block(0)] * 10, on_gpu=True, utilization_percent=70.0)
    assert diagnose(measured, min_utilization_percent=threshold, min_seconds=0).verdict == verdict


def test_an_idle_gpu_without_a_cause_is_unexplained() -> None:
    diagnosis = diagnose(run([block(0)] * 10, on_gpu=True, utilization_percent=30.0), min_seconds=0)
    assert [finding.cause for finding in diagnosis.findings] == ["unexplained"]
    assert "profile=True" in diagnosis.next_step


def test_unreported_utilization_is_unknown_and_never_idle() -> None:
    diagnosis = diagnose(run([block(0)] * 10, on_gpu=True), min_seconds=0)
    assert diagnosis.verdict == "unknown"
    assert diagnosis.utilization_percent is None


def test_causes_are_ordered_by_what_they_can_gain_and_named() -> None:
    measured = run(
        [block(1.5, rest_ms=8.5)] * 10,
        {"callback/Slow": 0.4, "callback/Quick": 0.001, "logging/CSVLogger": 0.2, "training_step": 0.4},
    )
    findings = diagnose(measured, min_seconds=0).findings
    assert [(f.cause, f.evidence.get("name")) for f in findings] == [
        ("callback", "Slow"),
        ("logging", "CSVLogger"),
        ("data_loading", None),
    ]
    assert "Slow" in findings[0].advice


def test_validation_makes_the_wait_a_smaller_share() -> None:
    blocks = [block(10, paused_s=0.2)] * 10
    findings = diagnose(run(blocks, {"validation": 2.0}), min_seconds=0).findings
    assert [finding.cause for finding in findings] == ["validation", "data_loading"]
    assert findings[1].share == pytest.approx(0.25)  # half of every step, and steps are half of the time


blocks_strategy = st.lists(
    st.builds(block, wait_ms=st.floats(0, 1e4), rest_ms=st.floats(0.01, 1e4), steps=st.integers(1, 100)),
    min_size=1,
    max_size=128,
)


@given(blocks_strategy, st.one_of(st.none(), st.floats(0, 100)), st.booleans(), st.integers(0, 16))
def test_the_laws_of_every_diagnosis(
    blocks: list[StepBlock], utilization: float | None, on_gpu: bool, workers: int
) -> None:
    loader = LoaderSettings(
        num_workers=workers, prefetch_factor=2 if workers else None, persistent_workers=False, pin_memory=False
    )
    measured = run(blocks, loader=loader, on_gpu=on_gpu, utilization_percent=utilization if on_gpu else None)
    diagnosis = diagnose(measured, min_steps=1, min_seconds=0)
    ceilings = [finding.ceiling for finding in diagnosis.findings]
    assert ceilings == sorted(ceilings, reverse=True)
    for finding in diagnosis.findings:
        assert 0 < finding.share <= 1
        assert finding.ceiling_lower <= finding.ceiling
        if on_gpu and utilization is not None:
            assert finding.share <= 1 - utilization / 100 + 1e-9
        if finding.cause != "unexplained":
            assert finding.ceiling >= MIN_CEILING
    assert (diagnosis.verdict == "low") == bool(diagnosis.findings)
    later_first = dataclasses.replace(measured, blocks=blocks[::-1])
    if settled(blocks) != blocks or settled(later_first.blocks) != later_first.blocks:
        return  # what counts as warm-up depends on the order
    assert diagnose(later_first, min_steps=1, min_seconds=0).verdict == diagnosis.verdict


def test_epochs_too_short_for_a_steady_step_are_reported() -> None:
    starting = run([], {"epoch_start": 30.0, "training_step": 5.0}, wall_s=35.0, steps=100, epochs=50)
    found = diagnose(starting)
    assert found.verdict == "low"
    assert [finding.cause for finding in found.findings] == ["epoch_start"]
    assert diagnose(dataclasses.replace(starting, epochs=2)).verdict == "too_short"
    assert diagnose(dataclasses.replace(starting, wall_s=9.0)).verdict == "too_short"
