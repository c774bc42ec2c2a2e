"""CUDA contexts on GPUs that are not their rank's: found, named with their size, and none of them ours."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from rank_processes import run_ranks
from torch.utils.data import DataLoader
from trainings import Model, Samples, loader, quiet_trainer

from lightning_gpu_tools import GPUUtilizationMonitor, load_report, watch
from lightning_gpu_tools.gpus import nvml
from lightning_gpu_tools.reports.text import render_text
from lightning_gpu_tools.training import compat
from lightning_gpu_tools.types import Finding, Report

pytestmark = pytest.mark.usefixtures("two_gpus")

MIB = 2**20


def strays(report: Report) -> list[Finding]:
    return [finding for finding in report.diagnosis.findings if finding.cause == "stray_contexts"]


class Touches(Model):
    """Uses GPU 0 on rank 1, in a hook or at a step."""

    def __init__(self, when: str | int) -> None:
        super().__init__()
        self.when = when

    def touch(self, when: str | int) -> None:
        if self.global_rank == 1 and when == self.when:
            torch.zeros(1, device="cuda:0")

    def setup(self, stage: str) -> None:
        self.touch("setup")

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.touch(batch_idx)
        return super().training_step(batch, batch_idx)


def train_two(folder: Path, rank: int) -> None:
    """Train three times: without such a context, with one that appears in the run, and with one that was there."""
    for name, when in (("healthy", "never"), ("late", 20), ("early", "setup")):
        callbacks = [GPUUtilizationMonitor()]
        trainer = quiet_trainer(folder / name, accelerator="gpu", devices=2, strategy="ddp", callbacks=callbacks)
        trainer.fit(Touches(when), loader(Samples(80), batch_size=1))


def test_a_rank_on_the_gpu_of_another_is_named(tmp_path: Path) -> None:
    results = run_ranks(tmp_path, train_two)
    assert [result.returncode for result in results] == [0, 0], results[0].stderr + results[1].stderr
    healthy, late, early = (load_report(tmp_path / name) for name in ("healthy", "late", "early"))
    assert not strays(healthy)
    assert "contexts" not in " ".join(healthy.unseen)
    for report in (late, early):
        (finding,) = strays(report)
        assert report.diagnosis.verdict == healthy.diagnosis.verdict
        assert (finding.evidence["gpu"], finding.evidence["ranks"], finding.share) == (0, "1", 0)
        size = finding.evidence.get("held_bytes")
        assert (size is not None) == nvml.pids_are_ours()
        assert size is None or 50 * MIB < float(size) < 4096 * MIB
        text = " ".join(render_text(report).split())
        assert "Rank 1 holds " in text
        assert "on GPU 0, which is not its GPU." in text


def train_on_the_second(folder: Path, rank: int) -> None:
    """Train a loop on GPU 1 without making it the current one, then with a Trainer; write where contexts were made."""
    has_context = compat.has_context()
    layer = torch.nn.Linear(4, 1).to("cuda:1")
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-6)
    with watch(folder=str(folder / "loop"), min_seconds=0.01) as run:
        for batch in run.batches(DataLoader(Samples(400), batch_size=1, num_workers=1, pin_memory=True)):
            layer(batch.to("cuda:1")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    trainer = quiet_trainer(folder / "fit", accelerator="gpu", devices=[1], callbacks=[GPUUtilizationMonitor()])
    trainer.fit(Model(), loader(Samples(400), batch_size=1))
    (folder / "contexts.json").write_text(json.dumps([has_context(0), has_context(1)]))


def test_we_make_no_context_on_another_gpu(tmp_path: Path) -> None:
    (result,) = run_ranks(tmp_path, train_on_the_second, ranks=1)
    assert result.returncode == 0, result.stderr
    assert json.loads((tmp_path / "contexts.json").read_text()) == [False, True]
    for name in ("loop", "fit"):
        report = load_report(tmp_path / name)
        assert not strays(report)
        assert [gpu.index for gpu in report.gpus] == [1]
        assert report.gpu_step_s["training_step/forward"] > 0  # by events on that GPU
        assert not report.unseen
