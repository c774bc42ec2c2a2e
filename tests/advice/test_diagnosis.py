"""Verdicts on given measurements, their reasons, and the order of findings."""

import dataclasses
import itertools
import re
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from synthetic import a_block, cpu_run, gpu_run, sampled_idle

from lightning_gpu_tools.advice.diagnosis import diagnose
from lightning_gpu_tools.advice.findings import MIN_CEILING
from lightning_gpu_tools.advice.lost_time import idle_share, lost_share
from lightning_gpu_tools.training.run_measurements import LoaderSettings, PhaseSpan, RunMeasurements, StepBlock


def waiting(wait_ms: float, rest_ms: float = 10.0) -> dict[str, float]:
    return {"data_loading": wait_ms, "training_step": rest_ms}


@pytest.mark.parametrize(
    ("steps", "step_ms", "verdict", "options"),
    [
        (49, 200, "too_short", "lower min_steps or"),
        (50, 99, "too_short", "or min_seconds of GPUUtil"),
        (50, 101, "healthy", "No change"),
    ],
)
def test_too_few_steady_steps_or_seconds_are_not_judged(steps: int, step_ms: float, verdict: str, options: str) -> None:
    run = dataclasses.replace(cpu_run(waiting(0)), blocks=[a_block(waiting(0, step_ms), steps)])
    diagnosis = diagnose(run, min_steps=50, min_seconds=5)
    assert diagnosis.verdict == verdict
    assert options in diagnosis.next_step
    assert "So far" not in diagnosis.why


def test_a_run_too_short_to_judge_names_its_longest_wait() -> None:
    run = dataclasses.replace(cpu_run({**waiting(74, 20), "epoch_start": 90}), blocks=[a_block(waiting(74, 20), 38)])
    why = diagnose(run).why
    assert re.match(r"So far: waiting for data, 40% of the wall time; too short for a verdict. Measured 38 steady", why)


def test_a_gpu_that_has_not_reported_yet_is_not_called_silent() -> None:
    """The driver's first sample may come after the end of a short run, however little is asked for."""
    run = gpu_run(waiting(0), None)
    assert diagnose(run, min_seconds=0).verdict == "unknown"
    assert diagnose(dataclasses.replace(run, blocks=run.blocks[:10]), min_seconds=0).verdict == "too_short"


def spans(*seconds: float, phase: str) -> dict[str, Any]:
    """Return the timeline of a run of 20 s in which a phase takes these seconds, each time by itself."""
    parts = [{"training_step": (20 - sum(seconds)) / 40} for _ in range(40)]
    for number, one_s in enumerate(seconds):
        parts[number * 40 // len(seconds)][phase] = one_s
    ends = list(itertools.accumulate(sum(part.values()) for part in parts))
    return {"spans": [PhaseSpan(end_s, end_s, part, 10) for end_s, part in zip(ends, parts, strict=True)]}


@pytest.mark.parametrize(("events", "verdict"), [(3, "healthy"), (8, "low")])
def test_an_accident_decides_no_verdict(events: int, verdict: str) -> None:
    run = cpu_run({"training_step": 80, "callback": 20}, **spans(*[4 / events] * events, phase="callback"))
    diagnosis = diagnose(run)
    assert diagnosis.verdict == verdict
    assert ("too rarely" in diagnosis.why) == (verdict == "healthy")


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (cpu_run(waiting(0.9, 1.0)), "per steady step), but it is 900 µs per step, too little"),
        (cpu_run({"training_step": 20, "validation": 20}, validations=1), "but the run has only one."),
        (gpu_run({"callback/A": 10, "training_step": 40}, 80.0), "but a GPU that is busy 70% of the time is"),
        (cpu_run(waiting(0)), "Nothing on the host slows training down."),
    ],
)
def test_a_healthy_run_says_why_its_longest_line_is_no_cause(run: RunMeasurements, words: str) -> None:
    diagnosis = diagnose(run)
    assert diagnosis.verdict == "healthy"
    assert words in diagnosis.why


@pytest.mark.parametrize(("wait_ms", "rest_ms", "verdict"), [(1.1, 1, "low"), (4.8, 100, "healthy"), (5.2, 100, "low")])
def test_a_wait_below_a_millisecond_or_five_percent_is_no_finding(wait_ms: float, rest_ms: float, verdict: str) -> None:
    assert diagnose(cpu_run(waiting(wait_ms, rest_ms), loader=None)).verdict == verdict


@pytest.mark.parametrize(("threshold", "verdict"), [(69.9, "healthy"), (70.1, "low")])
def test_the_threshold_decides_what_is_low(threshold: float, verdict: str) -> None:
    run = gpu_run(waiting(0), 70.0)
    assert diagnose(run, min_utilization_percent=threshold).verdict == verdict


def test_epochs_too_short_for_a_steady_step_are_reported() -> None:
    starting = dataclasses.replace(cpu_run({"epoch_start": 30.0, "training_step": 5.0}), blocks=[], epochs=50)
    found = diagnose(starting)
    assert (found.verdict, [finding.cause for finding in found.findings]) == ("low", ["epoch_start"])
    assert diagnose(dataclasses.replace(starting, epochs=2)).verdict == "too_short"
    assert diagnose(starting, min_steps=201).verdict == "too_short"


@pytest.mark.parametrize(
    ("phases", "unnamed"),
    [
        ({"unexplained": 1.2}, "unexplained"),
        ({"unexplained": 1.0}, None),
        ({"trainer": 2.4}, "trainer"),  # 1 ms of it is usual
        ({"unexplained": 0.9, "callback/A": 3.0}, None),
    ],
)
def test_nothing_is_healthy_while_a_tenth_has_no_name(phases: dict[str, float], unnamed: str | None) -> None:
    diagnosis = diagnose(cpu_run({"training_step/forward": 9.0, **phases}))
    found = [finding.evidence["phase"] for finding in diagnosis.findings if finding.cause == "unexplained"]
    assert found == ([] if unnamed is None else [unnamed])
    assert diagnosis.verdict == ("healthy" if len(phases) == 1 and unnamed is None else "low")


# --- the GPU's own times -----------------------------------------------------------------------------------------


def test_a_wait_behind_gpu_work_is_no_cause() -> None:
    """The GPU is idle 40% of the time, but not while the host waits for data: that is hidden behind its work."""
    run = gpu_run(waiting(40, 60), 60.0, gpu_idle=sampled_idle(data_loading=(40.0, 0.5)))
    assert [finding.cause for finding in diagnose(run).findings] == ["unexplained"]
    assert "profiler='pytorch'" in diagnose(run).next_step
    assert diagnose(run).gpu_idle_percent == pytest.approx({"data_loading": 0.5, "training_step": 39.5})
    without = dataclasses.replace(run, gpu_idle=None)
    assert [finding.cause for finding in diagnose(without).findings] == ["data_loading"]


# --- laws --------------------------------------------------------------------------------------------------------


_MS = st.floats(0.01, 1e4)
_BLOCKS = st.lists(
    st.builds(a_block, st.builds(waiting, st.floats(0, 1e4), _MS), st.integers(1, 100)), min_size=1, max_size=128
)
_PHASES = st.sampled_from(
    [
        *("data_loading", "training_step", "callback/A", "checkpoint", "validation", "trainer", "unexplained"),
        *("training_step/forward", "training_step/backward", "training_step/optimizer"),
    ]
)


@given(
    st.dictionaries(_PHASES, _MS, min_size=1),
    st.one_of(st.none(), _BLOCKS),
    st.one_of(st.none(), st.floats(0, 100)),
    st.booleans(),
    st.integers(0, 16),
    st.dictionaries(_PHASES, st.tuples(st.floats(0, 100), st.floats(0, 100))),
)
@example({"callback/A": 5.0, "unexplained": 1.0}, None, 75.0, True, 0, {"data_loading": (0.0, 0.0)})
def test_the_laws_of_every_diagnosis(
    phase_ms: dict[str, float],
    blocks: list[StepBlock] | None,
    utilization: float | None,
    on_gpu: bool,
    workers: int,
    idle: dict[str, tuple[float, float]],
) -> None:
    loader = LoaderSettings(
        num_workers=workers, prefetch_factor=2 if workers else None, persistent_workers=False, pin_memory=False
    )
    run = gpu_run(phase_ms, utilization, loader=loader, gpu_idle=sampled_idle(**idle) if idle else None)
    run = dataclasses.replace(run, blocks=blocks or run.blocks)
    if not on_gpu:
        run = dataclasses.replace(run, on_gpu=False, utilization_percent=None, gpu_idle=None)
    diagnosis = diagnose(run, min_steps=1, min_seconds=0)
    assert len(diagnosis.findings) <= 4
    ceilings = [finding.ceiling for finding in diagnosis.findings]
    assert ceilings == sorted(ceilings, reverse=True)
    for finding in diagnosis.findings:
        assert 0 < finding.share <= 1
        assert finding.ceiling_lower <= finding.ceiling
        assert 1 - 1 / finding.ceiling <= finding.share + 1e-9  # without the cause at all
        assert finding.advice
        if on_gpu and utilization is not None and finding.cause != "validation":  # during which it is not measured
            assert finding.share <= 1 - utilization / 100 + 1e-9
        if finding.cause != "unexplained":
            assert finding.ceiling >= MIN_CEILING
    assert (diagnosis.verdict == "low") == bool(diagnosis.findings)
    if diagnosis.verdict == "healthy":
        assert min(lost_share(run, "unexplained"), idle_share(run)) <= 0.10
    later_first = dataclasses.replace(run, blocks=run.blocks[::-1])
    assert diagnose(later_first, min_steps=1, min_seconds=0).verdict == diagnosis.verdict
