"""Two runs compared: noise, real differences, runs that cannot be compared, and what following advice has gained."""

import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sample_report import FINDING, REPORT, with_finding

from lightning_gpu_tools.advice.findings import median_interval
from lightning_gpu_tools.reports.comparison import compare, confirm, earlier_report, headline, render_comparison
from lightning_gpu_tools.reports.report import Report, ReportFile
from lightning_gpu_tools.training.run_measurements import PhaseSpan


def a_run(step_s: float, spread: float = 0.02, blocks: int = 40, seed: int = 1, **settings: object) -> Report:
    noise = random.Random(seed)
    return replace(
        REPORT,
        step_s_blocks=tuple(step_s * noise.gauss(1, spread) for _ in range(blocks)),
        settings={**REPORT.settings, **settings},
    )


def test_equal_runs_are_hardly_ever_called_different() -> None:
    verdicts = [compare(a_run(0.05, 0.1, 30, seed), a_run(0.05, 0.1, 30, 1000 + seed)).verdict for seed in range(40)]
    assert verdicts.count("same") >= 0.95 * 40


@pytest.mark.parametrize(
    ("now_s", "limit", "verdict", "before", "after"),
    [
        (0.05 / 1.73, 0.0, "faster", "FASTER: 1.75x", "1.73x to 1.77x): 50.1 ms per"),
        (0.06, 0.0, "slower", "SLOWER: 0.84x", "0.83x to 0.85x): "),
        (0.06, 0.3, "same", "NO SLOWER: 0.84x", "0.83x to 0.85x); the limit is +30.0% per step: "),
    ],
)
def test_a_change_that_was_advised_is_what_the_runs_test(
    now_s: float, limit: float, verdict: str, before: str, after: str
) -> None:
    comparison = compare(a_run(now_s, seed=2, num_workers=4), a_run(0.05), limit)
    shown = headline(comparison)
    assert (comparison.verdict, comparison.reasons) == (verdict, ())
    assert limit or confirm(a_run(now_s, seed=2, num_workers=4), a_run(0.05)) == shown
    assert shown.startswith(f"{before} after num_workers None -> 4 (95% interval {after}")
    assert shown.count("num_workers") == 1


def advised(cause: Any, advice: str = FINDING.advice, *, seed: int = 1, **settings: object) -> Report:
    """A run with another finding."""
    return with_finding(a_run(0.05, seed=seed, **settings), cause=cause, advice=advice)


def test_a_change_that_was_not_advised_cannot_be_compared() -> None:
    new = a_run(0.03, seed=2, num_workers=4, batch_size=32)
    shown = render_comparison(compare(new, a_run(0.05))).splitlines()
    assert shown[0].startswith("NOT COMPARABLE: 50.1 ms per mean step before, 29.8 ms now: ")
    assert shown[1:] == [
        "Not comparable: batch_size differs: 64 before, 32 now.",
        "Changed as advised: num_workers None -> 4.",
    ]
    other_advice = advised("slow_steps"), advised("data_loading", "Later steps need no change.")
    for old in (advised("low_precision"), advised("data_loading", model="Another"), *other_advice):
        assert compare(a_run(0.03, num_workers=4), old).reasons == ("num_workers differs: None before, 4 now",)


def test_a_larger_batch_that_was_advised_is_compared_by_samples() -> None:
    old = advised("launch_bound", "Use a larger batch_size.")
    comparison = compare(a_run(0.08, seed=2, batch_size=128), old)
    assert render_comparison(comparison).startswith("FASTER: 1.26x after batch_size 64 -> 128 (95% interval ")
    assert "per mean sample before" in headline(comparison)


def test_the_interval_matches_published_tables() -> None:
    # W. J. Conover, Practical Nonparametric Statistics, table of the binomial distribution, p = 1/2
    assert median_interval(range(1, 7)) == (1, 6)
    assert median_interval(range(1, 11)) == (2, 9)
    assert median_interval(range(1, 21)) == (6, 15)
    assert median_interval(range(1, 6)) is None


def test_a_few_steps_that_became_slow_are_seen_in_the_mean() -> None:
    old = a_run(0.05)
    slow_ones = tuple(block * (3 if i % 4 == 0 else 1) for i, block in enumerate(a_run(0.05, seed=2).step_s_blocks))
    comparison = compare(replace(old, step_s_blocks=slow_ones), old)
    assert (comparison.verdict, comparison.of) == ("slower", "mean")
    assert "50.1 ms per mean step before" in render_comparison(comparison)
    assert compare(old, replace(old, step_s_blocks=slow_ones)).verdict == "faster"


# The result of following the advice of the previous run


@pytest.mark.parametrize(
    "new",
    [
        a_run(0.03, num_workers=4, accelerator="CUDAAccelerator"),  # not comparable
        a_run(0.03, num_workers=4, model="Another"),  # another program, not this one with a change
        a_run(0.03, num_workers=4, batch_size=16),  # advised, and not advised
        a_run(0.03),  # nothing that was advised has changed
        a_run(0.03, blocks=0, num_workers=4),  # too short
    ],
)
def test_what_was_not_followed_or_measured_has_no_result(new: Report) -> None:
    assert confirm(new, a_run(0.05)) is None


def in_phases(*, data_s: float, step_s: float, num_workers: int) -> Report:
    """Return a run of 400 steps with so much of each phase a step, on one rank."""
    run = a_run(data_s + step_s, spread=0.01, world_size=1, num_workers=num_workers)
    phase_s = {"data_loading": 400 * data_s, "training_step": 400 * step_s}
    return replace(run, spans=(PhaseSpan(0.0, 400 * (data_s + step_s), phase_s, 400),))


def test_a_gain_outside_the_change_is_not_credited_to_it() -> None:
    new = in_phases(data_s=0.029, step_s=0.0099, num_workers=1)
    old = in_phases(data_s=0.0432, step_s=0.075, num_workers=0)
    assert str(confirm(new, old)).startswith(
        "FASTER, but the machine was not the same: 82% of the gain is in phases that this change cannot speed up, "
        'mostly in "training step" (75 ms -> 9.9 ms per step). 3.0x after num_workers 0 -> 1 (95% interval '
    )


def test_the_previous_run_is_in_the_folder_or_newest_version(tmp_path: Path) -> None:
    assert earlier_report(tmp_path) is None
    ReportFile(tmp_path).save(REPORT)
    assert earlier_report(tmp_path) is not None
    for version, steps in enumerate((20, 30)):
        file = ReportFile(tmp_path / f"version_{version}").save(replace(REPORT, steps=steps))
        os.utime(file, (version, version))
    found = earlier_report(tmp_path / "version_2")
    assert found is not None
    assert found.steps == 30
    (tmp_path / "version_7").mkdir()
    (tmp_path / "version_7" / "gpu_report.json").symlink_to("nothing")
    assert earlier_report(tmp_path / "version_2") == found
    (tmp_path / "gpu_report.json").write_text("something else")
    assert earlier_report(tmp_path) is None
