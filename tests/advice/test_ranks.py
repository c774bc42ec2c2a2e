"""Slow ranks and nodes: who is blamed, for what, and when none can be."""

import dataclasses
import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic import cpu_run, gpu_run

from lightning_gpu_tools.advice.causes.time import straggler
from lightning_gpu_tools.advice.diagnosis import diagnose
from lightning_gpu_tools.advice.findings import Finding
from lightning_gpu_tools.training.run_measurements import RankStep, RunMeasurements, SourceLine


def blamed(run: RunMeasurements) -> Finding | None:
    return next(straggler.find(run), None)


def in_lockstep(own_s: Sequence[float], hidden: float = 0.0) -> RunMeasurements:
    """Return a run whose ranks do this work in backward, and wait for the slowest; a part of the waits is hidden."""
    step_s, ranks = max(own_s), []
    for rank, seconds in enumerate(own_s):
        wait_s = (1 - hidden) * (step_s - seconds)
        own = {"own_step_s": step_s - wait_s, "phase_s": {"backward": step_s - wait_s}}
        ranks.append(RankStep(rank=rank, node=0, wait_s=wait_s, **own))
    return cpu_run({"training_step": 1e3 * step_s}, ranks=tuple(ranks))


@given(st.lists(st.floats(0.001, 1.0), min_size=2, max_size=6, unique=True), st.floats(0, 0.99))
def test_only_the_slowest_rank_is_ever_blamed(own_s: list[float], hidden: float) -> None:
    finding = blamed(in_lockstep(own_s, hidden=hidden))
    if finding is not None:
        assert finding.evidence["rank"] == own_s.index(max(own_s))
        assert max(own_s) > 1.1 * min(own_s)


def test_the_slow_rank_s_own_lines_are_named() -> None:
    line = SourceLine(phase="training_step/forward", file="train.py", line=57, function="augment", samples=40)
    quick, slow = (RankStep(rank=i, node=0, own_step_s=s, phase_s={"forward": s}) for i, s in enumerate((0.01, 0.03)))
    finding = blamed(gpu_run({"training_step": 30}, 99.0, ranks=(quick, dataclasses.replace(slow, lines=(line,)))))
    assert finding.evidence["source_lines"] == "train.py:57 in augment (100%)"
    assert "100% of this time is at train.py:57 in augment" in finding.advice


def test_a_rank_that_nobody_waits_for_is_not_blamed() -> None:
    run = in_lockstep([0.010, 0.010, 0.030, 0.010])
    assert blamed(run) is not None
    patient = tuple(dataclasses.replace(one, wait_s=0.0) for one in run.ranks)
    assert blamed(dataclasses.replace(run, ranks=patient)) is None


def a_job(more_s: Callable[[int], float]) -> RunMeasurements:
    """Return a run on 1024 GPUs: of 100 ms, 60 ms and more are each rank's own work, give or take 0.25 ms."""
    chance, ranks = random.Random(0), []
    for rank in range(1024):
        own_s = 0.06 + chance.gauss(0, 0.00025) + more_s(rank)
        phase_s = {"forward": own_s}
        ranks.append(RankStep(rank=rank, node=rank // 8, own_step_s=own_s, phase_s=phase_s, gpu=rank % 8))
    return gpu_run({"training_step": 100}, 99.0, ranks=tuple(ranks))


@pytest.mark.parametrize("slow", [{17}, {*range(24, 32)}])
def test_slow_ranks_are_named(slow: set[int]) -> None:
    finding = blamed(a_job(lambda rank: 0.03 * (rank in slow)))
    rank = int(finding.evidence["rank"])
    assert rank in slow
    assert f"for rank {rank} (node {rank // 8}, GPU {rank % 8}), which takes" in finding.advice
    assert finding.share == pytest.approx(0.30, abs=0.03)  # of the job: 30 of 100 ms


def test_among_ranks_that_vary_as_much_none_is_named() -> None:
    chance = random.Random(1)
    own = [chance.gauss(0, 0.01) for _ in range(1024)]
    assert blamed(a_job(lambda rank: own[rank])) is None
    assert blamed(a_job(lambda rank: own[rank] + 0.08 * (rank == 9))) is not None


def test_waits_for_a_slow_rank_are_not_blamed_on_the_network() -> None:
    found = diagnose(in_lockstep([0.01, 0.01, 0.01, 0.03])).findings
    assert [finding.cause for finding in found] == ["straggler"]
