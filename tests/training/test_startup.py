"""The time until the first step is done, of real runs in processes of their own."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import run_ranks
from sample_report import REPORT
from trainings import Model, Samples, loader, quiet_trainer

from lightning_gpu_tools import GPUUtilizationMonitor, load_report
from lightning_gpu_tools.reports.text import render_text

S = 0.3  # of each part


def compiling(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
    time.sleep(S)
    return graph.forward


class SlowToStart(Model):
    def __init__(self) -> None:
        super().__init__()
        self.compiled = torch.compile(torch.sin, backend=compiling)

    def setup(self, stage: str) -> None:
        time.sleep(S)

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        time.sleep(S)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return super().training_step(self.compiled(batch), batch_idx)


class SlowFirst(Samples):
    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(S if index == 0 else 0)
        return super().__getitem__(index)


def fit(folder: Path) -> None:
    trainer = quiet_trainer(folder, callbacks=[GPUUtilizationMonitor()], num_sanity_val_steps=1)
    trainer.fit(SlowToStart(), loader(SlowFirst(5)), loader(Samples(1)))


def fit_twice(folder: Path, rank: int) -> None:
    time.sleep(S)
    fit(folder / "first")
    fit(folder / "second")


def test_each_part_is_measured(tmp_path: Path) -> None:
    before_s = time.monotonic()
    (ended,) = run_ranks(tmp_path, fit_twice, ranks=1)
    took_s = time.monotonic() - before_s
    assert ended.returncode == 0, ended.stderr
    first, second = (load_report(tmp_path / name).startup_s for name in ("first", "second"))
    slow = ["own_code", "setup", "sanity_check", "first_batch", "compilation"]
    assert [*first] == [*slow, "first_step", "other"]
    assert all(first[part] >= S for part in slow)
    assert "own_code" not in second
    assert second["setup"] >= S  # the time between the two runs is no part of it
    assert sum(first.values()) + sum(second.values()) < took_s


@pytest.mark.parametrize(
    ("wall_s", "parts_s", "line"),
    [
        (4000.0, {"own_code": 9.0}, None),
        (41.4, {"own_code": 9.0, "other": 0.01}, "9.01 s until the first step was done: imports and own code 9 s."),
        (
            4000.0,
            {"own_code": 12.0, "sanity_check": 41.0, "first_batch": 96.0, "x\x1b": 4.0, "first_step": 0.9},
            "2 min 34 s until the first step was done: imports and own code 12 s, sanity check 41 s, first batch "
            r"96 s, x\x1b 4 s.",
        ),
    ],
)
def test_the_line_is_shown_where_it_matters(wall_s: float, parts_s: dict[str, float], line: str | None) -> None:
    report = replace(REPORT, wall_s=wall_s, phase_s={"training_step": wall_s}, startup_s=parts_s)
    text = " ".join(render_text(report).split())
    assert line in text if line is not None else "until the first step" not in text
