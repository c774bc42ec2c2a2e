"""NCCL between simulated GPUs, under torch's process groups."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

from launched_jobs import free_port

from lightning_gpu_tools.simulated import Machine

SCRIPT = Path(__file__).parent / "rank_collectives.py"


def test_collectives_move_what_they_say(
    make_machine: Callable[..., Machine], start: Callable[..., subprocess.Popen[str]]
) -> None:
    ranks = 3
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": str(ranks)}
    machine = make_machine(["h100-80gb"] * ranks)
    programs = [start(machine, SCRIPT, RANK=str(rank), **job) for rank in range(ranks)]
    for rank, program in enumerate(programs):
        output, errors = program.communicate(timeout=150)
        assert program.returncode == 0, errors
        result = json.loads(output.splitlines()[-1])
        assert result["all_reduce"] == [6, 6]
        assert result["average"] == [2, 2]
        assert result["broadcast"] == [10]
        assert result["all_gather"] == [0, 1, 2]
        assert result["reduce_scatter"] == [3 * rank + 3]
        assert result["all_to_all"] == [rank, 10 + rank, 20 + rank]
        assert result["ring"] == [(rank - 1) % ranks]
        assert result["large"] == [0, 3, 3 * 2_999_999]
        assert result["objects"] == [2, "", "y", "yy"]
        assert result.get("received", rank != 1)
