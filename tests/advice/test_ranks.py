"""Which rank is blamed, for what, and when none can be."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from measured_runs import cpu_run, waiting_ranks

from lightning_gpu_tools.advice.diagnosis import diagnose
from lightning_gpu_tools.advice.ranks import straggler
from lightning_gpu_tools.training.run_measurements import RankStep, RunMeasurements


def in_lockstep(own_s: Sequence[float], phase: str = "backward", hidden: float = 0.0) -> RunMeasurements:
    """Return a run whose ranks wait for the slowest one.

    Args:
        own_s: Own work of each rank on a step.
        phase: Where they do it.
        hidden: The share of a wait that is taken for own work.
    """
    step_s = max(own_s)
    ranks = []
    for rank, seconds in enumerate(own_s):
        wait_s = step_s - seconds
        seems_s = seconds + hidden * wait_s
        ranks.append(
            RankStep(rank=rank, node=0, own_step_s=seems_s, phase_s={phase: seems_s}, wait_s=(1 - hidden) * wait_s)
        )
    return cpu_run({"training_step": 1e3 * step_s}, ranks=tuple(ranks))


@given(st.lists(st.floats(0.001, 1.0), min_size=2, max_size=6, unique=True), st.floats(0, 0.99))
def test_only_the_slowest_rank_is_ever_blamed(own_s: list[float], hidden: float) -> None:
    finding = straggler(in_lockstep(own_s, hidden=hidden))
    if finding is not None:
        assert finding.evidence["rank"] == own_s.index(max(own_s))
        assert max(own_s) > 1.1 * min(own_s)


def test_a_rank_that_nobody_waits_for_is_not_blamed() -> None:
    run = in_lockstep([0.010, 0.010, 0.030, 0.010])
    assert straggler(run) is not None
    patient = tuple(dataclasses.replace(one, wait_s=0.0) for one in run.ranks)
    assert straggler(dataclasses.replace(run, ranks=patient)) is None


def test_what_one_rank_does_not_know_of_itself_does_not_count() -> None:
    run = in_lockstep([0.010, 0.030])
    ranks = (dataclasses.replace(run.ranks[0], own_step_s=0.0, phase_s={}), run.ranks[1])
    assert straggler(dataclasses.replace(run, ranks=ranks)) is None


def test_a_rank_whose_own_steps_vary_as_much_is_not_blamed() -> None:
    run = in_lockstep([0.010, 0.010, 0.030, 0.010])
    for iqr_s, is_blamed in ((0.019, True), (0.021, False)):
        ranks = tuple(dataclasses.replace(one, phase_iqr_s={"backward": iqr_s}) for one in run.ranks)
        assert (straggler(dataclasses.replace(run, ranks=ranks)) is not None) is is_blamed


@pytest.mark.parametrize(
    ("phase", "words"),
    [
        ("data_loading", "It loses the time in waiting for data: compare its storage"),
        ("backward", "It loses the time in its backward pass: compare its clocks"),
        ("callback/Probe", "It loses the time in Probe: make it cheaper"),
        ("checkpoint", "It loses the time in writing checkpoints: save less often"),
    ],
)
def test_the_advice_fits_the_phase(phase: str, words: str) -> None:
    diagnosis = diagnose(in_lockstep([0.010, 0.030], phase))
    assert diagnosis.next_step.startswith("All ranks wait for rank 1 (node 0), which takes 20 ms per step longer")
    assert words in diagnosis.next_step


@pytest.mark.parametrize(
    ("phase", "words"),
    [("backward", "No rank always works longer"), ("data_loading", "Which rank is slow")],
)
def test_a_wait_without_a_slow_rank_is_communication(phase: str, words: str) -> None:
    diagnosis = diagnose(waiting_ranks(phase))
    assert [finding.cause for finding in diagnosis.findings] == ["communication"]
    assert diagnosis.findings[0].share == pytest.approx(2 / 3)
    assert diagnosis.why == "Waiting for other ranks takes 67 % of the wall time (20 ms per step)."
    assert words in diagnosis.next_step
