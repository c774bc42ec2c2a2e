"""Steps on a GPU that get longer and longer, because of the host or of the GPU itself."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from trainings import Model, Samples, loader, quiet_trainer

from lightning_gpu_tools import GPUUtilizationAdvisor, GPUUtilizationMonitor, load_report
from lightning_gpu_tools.training import drift
from lightning_gpu_tools.types import Finding, Report

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from toys import occupy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::lightning_gpu_tools.errors.LowGPUUtilizationWarning"),
]
STEPS = 300


def train(folder: Path, model: Model, monkeypatch: pytest.MonkeyPatch) -> tuple[Report, Finding | None]:
    monkeypatch.setattr(drift, "_INTERVAL_S", 0.01)
    own = [GPUUtilizationMonitor(interval_s=0.1), GPUUtilizationAdvisor(min_seconds=0.001)]
    quiet_trainer(folder, accelerator="gpu", callbacks=own).fit(model, loader(Samples(STEPS)))
    report = load_report(folder)
    return report, next((one for one in report.diagnosis.findings if one.cause == "slowing_down"), None)


class Summed(Model):
    """Adds up its losses with their graphs, and trains on the sum."""

    total_loss: torch.Tensor | float = 0.0

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.total_loss = self.total_loss + self.layer(batch).square().mean() / 1e9
        return self.total_loss

    def backward(self, loss: torch.Tensor) -> None:  # type: ignore[override]
        loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]


class Occupied(Model):
    """Has the GPU busy for some milliseconds, and for more in each step."""

    def __init__(self, more_s: float) -> None:
        super().__init__()
        self.more_s = more_s

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        occupy(0.004 + self.more_s * batch_idx)
        loss = super().training_step(batch, batch_idx)
        loss.item()
        return loss


def test_a_graph_that_is_kept_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report, found = train(tmp_path, Summed(), monkeypatch)
    assert found is not None, report.diagnosis
    assert (found.evidence["kind"], found.evidence["phase"]) == ("kept_graph", "training_step/Summed.backward")


def test_a_gpu_that_is_busy_for_longer_and_longer_is_not_healthy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report, found = train(tmp_path, Occupied(more_s=4e-5), monkeypatch)
    assert found is not None, report.diagnosis
    assert report.diagnosis.verdict == "low"
    assert str(found.evidence["phase"]).startswith("training_step")
    assert float(found.evidence["times"]) > 1.5


def test_a_gpu_that_is_always_as_busy_is_healthy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report, found = train(tmp_path, Occupied(more_s=0.0), monkeypatch)
    assert found is None, report.diagnosis
