"""A run on more GPUs compared with one on fewer: how efficient it is, and what it loses."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from sample_report import REPORT

from lightning_gpu_tools.reports.comparison import compare, render_comparison
from lightning_gpu_tools.reports.report import Report
from lightning_gpu_tools.reports.scaling import Scaling
from lightning_gpu_tools.training.run_measurements import RankStep
from lightning_gpu_tools.training.stopwatch import PhaseSpan


def on(
    ranks: int, step_s: float, *, data_s: float = 0.001, late_s: float = 0.0, sends_s: float = 0.0, **more: object
) -> Report:
    """Return a run whose ranks wait for data, for each other and to send, within a step."""
    noise = random.Random(ranks)
    settings = {**REPORT.settings, "gpu": ["NVIDIA L4"], "batch_size": 64, "world_size": ranks, **more}
    waits = (
        RankStep(rank=i, node=0, own_step_s=0.01, wait_s=late_s + sends_s, others_late_s=late_s) for i in range(ranks)
    )
    phase_s = {"data_loading": 100 * data_s, "training_step": 100 * (step_s - data_s)}
    spans = (PhaseSpan(0.0, 100 * step_s, phase_s, 100),) * 2
    return replace(
        REPORT,
        step_s_blocks=tuple(step_s * noise.gauss(1, 0.02) for _ in range(40)),
        settings=settings,
        spans=spans,
        ranks=tuple(waits) if ranks > 1 else (),
    )


def scaled(new: Report, old: Report) -> Scaling:
    found = compare(new, old).scaling
    assert found is not None
    return found


def test_the_same_batch_on_each_gpu_is_weak_scaling() -> None:
    found = scaled(on(2, 0.060, late_s=0.006, sends_s=0.004), on(1, 0.050))
    assert (found.kind, found.ranks, found.of_ranks) == ("weak", 2, 1)
    assert found.speedup == pytest.approx(2 * 50 / 60, rel=0.01)
    assert found.efficiency == pytest.approx(50 / 60, rel=0.01)
    assert found.speedup_low < found.speedup < found.speedup_high
    assert [loss.what for loss in found.losses] == ["waiting for late ranks", "sending between ranks"]
    assert found.losses[0].seconds == pytest.approx(0.006)


def test_the_same_batch_of_the_job_is_strong_scaling() -> None:
    found = scaled(on(4, 0.020, data_s=0.00025, batch_size=16), on(1, 0.050))
    assert found.kind == "strong"
    assert found.speedup == pytest.approx(2.5, rel=0.01)
    assert [loss.what for loss in found.losses] == ["a slower training step"]
    assert found.losses[0].seconds == pytest.approx(0.020 - 0.050 / 4, rel=0.05)


def test_loading_that_shares_the_cores_is_told() -> None:
    found = scaled(on(2, 0.072, data_s=0.021), on(1, 0.050))
    assert found.losses[0].what == "more waiting for data (the ranks share the cores)"
    assert found.losses[0].seconds == pytest.approx(0.020)


def test_the_order_of_the_runs_does_not_matter() -> None:
    two, one = on(2, 0.060, late_s=0.006), on(1, 0.050)
    there, back = scaled(two, one), scaled(one, two)
    assert there.speedup == pytest.approx(back.speedup)
    assert (there.speedup_low, there.speedup_high) == pytest.approx((back.speedup_low, back.speedup_high))
    assert there.losses == back.losses


def test_the_words_say_how_far_from_linear() -> None:
    text = render_comparison(compare(on(2, 0.060, late_s=0.006), on(1, 0.050)))
    assert "2 ranks: 1.68x the samples per second of 1, 84 % of linear" in text
    assert "weak scaling: the same batch per rank" in " ".join(text.split())
    assert "waiting for late ranks 6 ms (10 %)" in " ".join(text.split())
    assert compare(on(2, 0.060), on(1, 0.050)).verdict == "faster"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"batch_size": 48}, "batch_size differs"),
        ({"precision": "bf16-mixed"}, "precision differs"),
        ({"model": "Other"}, "world_size differs"),
    ],
)
def test_runs_that_differ_in_more_are_not_scaled(change: dict[str, object], says: str) -> None:
    comparison = compare(on(2, 0.060, **change), on(1, 0.050))
    assert comparison.verdict == "not_comparable"
    assert comparison.scaling is None
    assert says in " ".join(comparison.reasons)
