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

Stalls = dict[Callable[..., None], Stall]
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


@pytest.fixture(scope="module")
def stalls(tmp_path_factory: pytest.TempPathFactory, two_gpus: None) -> Stalls:
    """Return the stall that each training reports; all of them hang at the same time."""
    folders = {train: tmp_path_factory.mktemp("hangs") for train in (killed, other_size)}
    started = [process for train, folder in folders.items() for process in start_ranks(folder, train)]
    found: Stalls = {}
    until_s = time.monotonic() + 90
    try:
        while time.monotonic() < until_s and len(found) < len(folders):
            time.sleep(0.2)
            for train, folder in folders.items():
                with suppress(ReportError):
                    found.update((train, stall) for stall in load_report(folder).stalls)
    finally:
        for process in started:
            process.kill()
            process.join()
    return found


def test_a_killed_rank_leaves_the_others_in_a_collective(stalls: Stalls) -> None:
    stall = stalls[killed]
    assert (stall.cause, stall.rank) == ("rank_behind", 1)
    assert re.search(r" Collective no\. \d+: rank 0 called all_reduce of 5 float32 numbers\.$", stall.why)


def test_calls_with_different_sizes_are_named(stalls: Stalls) -> None:
    """The stacks of both ranks show the same later call."""
    stall = stalls[other_size]
    assert (stall.cause, stall.rank) == ("collective", None)
    sizes = "rank 0 called all_reduce of 7 float32 numbers; rank 1 called all_reduce of 4 float32 numbers."
    assert re.search(rf" Collective no\. \d+: {re.escape(sizes)}$", stall.why)
