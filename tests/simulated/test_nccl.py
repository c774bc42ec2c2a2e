"""NCCL between simulated GPUs, under torch's process groups, DDP, FSDP and Lightning."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning_gpu_tools.simulated import Machine

MakeMachine = Callable[..., Machine]
Ranks = Callable[..., list[Any]]
HERE = Path(__file__).parent


def test_collectives_move_what_they_say(make_machine: MakeMachine, answer_of_ranks: Ranks) -> None:
    ranks = 3
    answers = answer_of_ranks(make_machine(["h100-80gb"] * ranks), ranks, HERE / "rank_collectives.py")
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
