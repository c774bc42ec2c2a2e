"""Ranks that hang in collectives of NCCL, in which the host does not wait, by torch's own record of collectives."""

import os
import re
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch
from rank_processes import start_ranks
from stall_cases import AT, Model, fit

from lightning_gpu_tools import load_report
from lightning_gpu_tools.advice.stalls import Stall
from lightning_gpu_tools.errors import ReportError

pytestmark = pytest.mark.usefixtures("two_gpus")
on_gpu = partial(fit, stall_after_s=2.0, accelerator="cuda")


def killed(folder: Path, rank: int) -> None:
    def act(model: Model, step: int) -> None:
        if step == AT and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    on_gpu(folder, model=Model(act))


def other_size(folder: Path, rank: int) -> None:
    def act(model: Model, step: int) -> None:
        if step == AT:
            torch.distributed.all_reduce(torch.ones(7 - 3 * rank, device=model.device))

    on_gpu(folder, model=Model(act))


def stall_of(train: Callable[..., None], folder: Path) -> Stall:
    """Return the stall that a training reports."""
    started = start_ranks(folder, train)
    until_s = time.monotonic() + 90
    try:
        while time.monotonic() < until_s:
            time.sleep(0.2)
            with suppress(ReportError, IndexError):
                return load_report(folder).stalls[0]
    finally:
        for process in started:
            process.kill()
            process.join()
    raise AssertionError((folder / "stderr0").read_text())


def test_a_killed_rank_leaves_the_others_in_a_collective(tmp_path: Path) -> None:
    stall = stall_of(killed, tmp_path)
    assert (stall.cause, stall.rank) == ("rank_behind", 1)
    assert re.search(r" Collective no\. \d+: rank 0 called all_reduce of 5 float32 numbers\.$", stall.why)


def test_calls_with_different_sizes_are_named(tmp_path: Path) -> None:
    """The stacks of both ranks show the same later call."""
    stall = stall_of(other_size, tmp_path)
    assert (stall.cause, stall.rank) == ("collective", None)
    sizes = "rank 0 called all_reduce of 7 float32 numbers; rank 1 called all_reduce of 4 float32 numbers."
    assert re.search(rf" Collective no\. \d+: {re.escape(sizes)}$", stall.why)
