"""Real trainings on a GPU of which some facts cannot be read: the report has all others."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from trainings import Model, Samples, quiet_trainer

from lightning_gpu_tools import GPUUtilizationAdvisor, GPUUtilizationMonitor, load_report
from lightning_gpu_tools.gpus.watch import GpuWatch
from lightning_gpu_tools.runs import run_recorder
from lightning_gpu_tools.training import compat, memory_counters
from lightning_gpu_tools.types import Report

STEPS = 80
# Where a fact comes from: what the report calls it.
SOURCES = {
    (run_recorder, "device_facts"): "the GPU's properties",
    (run_recorder, "left_on_cpu"): "tensors on the CPU",
    (GpuWatch, "trained_on"): "the GPU's utilization",
    (memory_counters, "count_holdings"): "torch's memory counters",
    (compat, "has_context"): "CUDA contexts",
}


def refuse(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("as a new driver may")


def trained(folder: Path, model: Model, data: DataLoader[Any]) -> Report:
    callbacks = [GPUUtilizationMonitor(), GPUUtilizationAdvisor(min_seconds=0.001)]
    quiet_trainer(folder, accelerator="gpu", callbacks=callbacks).fit(model, data)
    return load_report(folder)


def test_each_fact_about_a_gpu_is_left_out_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name in SOURCES:
        monkeypatch.setattr(owner, name, refuse)
    report = trained(tmp_path, Model(), DataLoader(Samples(2 * STEPS), batch_size=2))
    assert (report.outcome, report.steps) == ("completed", STEPS)
    assert sum(report.phase_s.values()) == pytest.approx(report.wall_s)
    assert {one.partition(" (")[0] for one in report.unseen} == {*SOURCES.values()}
    assert report.memory == ()
    assert report.gpu_step_s  # by events, which need none of these


class OfTexts(Model):
    """A model of texts of different lengths."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return torch.stack([self.layer(text).square().mean() for text in batch.unbind()]).mean()


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_batch_without_a_shape_is_measured_as_any_other(tmp_path: Path, layout: torch.layout) -> None:
    def collate(texts: list[torch.Tensor]) -> torch.Tensor:
        return torch.nested.nested_tensor(texts, layout=layout)

    texts = [torch.full((1 + index % 3, 4), float(index)) for index in range(2 * STEPS)]
    report = trained(tmp_path, OfTexts(), DataLoader(texts, batch_size=2, collate_fn=collate))
    assert (report.outcome, report.steps) == ("completed", STEPS)
    assert report.unseen == ()
    assert report.memory
    assert report.samples_per_s is not None
