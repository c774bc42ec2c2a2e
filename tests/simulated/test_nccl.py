"""NCCL between simulated GPUs, under torch's process groups, DDP, FSDP and Lightning."""

from __future__ import annotations

import json
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest

from lightning_gpu_tools.simulated import Machine

MakeMachine = Callable[..., Machine]
Ranks = Callable[..., list[Any]]
HERE = Path(__file__).parent


@pytest.mark.parametrize("joining", ["eager", "late"])
def test_collectives_move_what_they_say(make_machine: MakeMachine, answer_of_ranks: Ranks, joining: str) -> None:
    ranks = 3
    answers = answer_of_ranks(make_machine(["h100-80gb"] * ranks), ranks, HERE / "rank_collectives.py", joining)
    for rank, result in enumerate(answers):
        assert result["all_reduce"] == [6, 6]
        assert result["average"] == [2, 2]
        assert result["broadcast"] == [10]
        assert result["all_gather"] == [0, 1, 2]
        assert result["reduce_scatter"] == [3 * rank + 3]
        assert result["all_to_all"] == [rank, 10 + rank, 20 + rank]
        assert result["ring"] == [(rank - 1) % ranks]
        assert result["large"] == [0, 3, 3 * 2_999_999]
        assert result["objects"] == [2, "", "y", "yy"]
    assert answers[1]["received"]


@pytest.mark.parametrize(("strategy", "ranks"), [("ddp", 8), ("fsdp", 2), ("fsdp2", 2)])
def test_lightning_trains_on_several_gpus_as_it_starts_by_itself(
    make_machine: MakeMachine, start_ranks: Callable[..., list[Any]], strategy: str, ranks: int
) -> None:
    # The first rank forks the others, so that Lightning is imported once for all.
    machine, script = make_machine(["h100-80gb"] * ranks), HERE / "rank_lightning.py"
    (first,) = start_ranks(machine, 1, script, strategy, WORLD_SIZE=str(ranks))
    output, errors = first.communicate(timeout=150)
    assert first.returncode == 0, errors
    answers = sorted((json.loads(line) for line in output.splitlines() if line.startswith("[")), key=itemgetter(1))
    assert [one[:4] for one in answers] == [[3, rank, ranks, "of rank 0"] for rank in range(ranks)]
    assert all(one[4] == answers[0][4] for one in answers)
