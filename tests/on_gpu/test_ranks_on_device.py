"""Ranks that wait for one of them over NCCL: its number, the line at which it is late, and the share of waiting."""

import os
import time
from pathlib import Path

import pytest
import torch
from rank_processes import run_ranks
from toys import occupy
from trainings import Model, Samples, loader, quiet_trainer

from lightning_gpu_tools import GPUUtilizationAdvisor, GPUUtilizationMonitor, load_report

pytestmark = pytest.mark.usefixtures("two_gpus")


def be_late() -> None:
    time.sleep(0.030)


class Late(Model):
    """A model whose second rank is late in one part of a step, on its host."""

    def __init__(self, part: str) -> None:
        super().__init__()
        self.part = part
        self.layer = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))

    def late_in(self, part: str) -> None:
        if part == self.part and self.global_rank == 1:
            be_late()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        occupy(0.002)
        self.late_in("forward")
        loss = self.layer(batch).square().mean()
        loss.register_hook(lambda _: self.late_in("backward"))
        return loss


CASES = [("forward", "ddp_find_unused_parameters_true"), ("backward", "ddp"), ("forward", "fsdp")]


def train(folder: Path, rank: int) -> None:
    for part, strategy in CASES:
        trainer = quiet_trainer(
            folder / f"{part} {strategy}",
            accelerator="cuda",
            devices=int(os.environ["WORLD_SIZE"]),
            strategy=strategy,
            max_steps=80,
            callbacks=[GPUUtilizationMonitor(interval_s=0.1), GPUUtilizationAdvisor(min_seconds=0.5, min_steps=20)],
        )
        trainer.fit(Late(part), loader(Samples(10_000), batch_size=2))


def test_the_late_rank_is_named_with_its_line(tmp_path: Path) -> None:
    results = run_ranks(tmp_path, train)
    assert [result.returncode for result in results] == [0, 0], results[0].stderr
    for part, strategy in CASES:
        report = load_report(tmp_path / f"{part} {strategy}")
        causes = {finding.cause: finding.evidence for finding in report.diagnosis.findings}
        assert (causes["straggler"]["rank"], causes["straggler"]["phase"]) == (1, part), report.diagnosis
        if part == "forward":  # autograd's own thread, which runs backward on a GPU, is not sampled
            assert "in be_late" in str(causes["straggler"]["source_lines"])
        assert "unexplained" not in causes
        assert "device_sync" not in causes  # Lightning's check of signals
        waits = {gpu.index: gpu.rank_wait_percent or 0.0 for gpu in report.gpus}
        assert waits[0] > 10 + waits[1]
