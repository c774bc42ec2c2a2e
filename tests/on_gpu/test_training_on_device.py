"""A real training on a real GPU: the metrics that the monitor logs, the report, and the advisor's findings."""

import importlib
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader
from trainings import Model, Samples, loader, logged, quiet_trainer

from lightning_gpu_tools import GPUUtilizationAdvisor, GPUUtilizationMonitor, watch
from lightning_gpu_tools.gpus.watch import GpuWatch
from lightning_gpu_tools.memory import counters
from lightning_gpu_tools.reports.report import Report
from lightning_gpu_tools.reports.report_file import load_report
from lightning_gpu_tools.training import compat

BUFFER_BYTES = 2**28


class Busy(Model):
    """Keeps the GPU busy for so many milliseconds a step, or a little longer, with matrix products."""

    def __init__(self, milliseconds: float) -> None:
        super().__init__()
        self.milliseconds = milliseconds

    def on_fit_start(self) -> None:
        self.kept = torch.empty(BUFFER_BYTES, dtype=torch.uint8, device=self.device)
        self.matrix = torch.rand(2048, 2048, device=self.device)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.matrix @ self.matrix  # the first product loads cuBLAS
        torch.cuda.synchronize()
        torch.cuda._sleep(50_000_000)  # some 30 to 50 ms, in which the host queues the others
        begin.record()
        for _ in range(20):
            self.matrix @ self.matrix
        end.record()
        torch.cuda.synchronize()
        self.products = math.ceil(self.milliseconds / (begin.elapsed_time(end) / 20))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        for _ in range(self.products):
            self.matrix @ self.matrix
        return super().training_step(batch, batch_idx)


def train(folder: Path, model: Model, data: DataLoader[Any], min_seconds: float = 2.0) -> Report:
    trainer = quiet_trainer(
        folder,
        accelerator="gpu",
        callbacks=[GPUUtilizationMonitor(), GPUUtilizationAdvisor(min_seconds=min_seconds)],
        logger=CSVLogger(folder, name="", version=""),
        log_every_n_steps=50,
    )
    trainer.fit(model, data)
    return load_report(folder)


def test_a_busy_gpu_is_logged_as_busy_and_found_healthy(tmp_path: Path) -> None:
    report = train(tmp_path, Busy(40), loader(Samples(200)))
    (gpu,) = report.gpus
    metrics = {name: [*values.values()] for name, values in logged(tmp_path).items()}
    assert max(metrics[f"gpu/{gpu.index}/utilization_percent/mean"]) > 80  # a busy host starves it now and then
    assert metrics[f"gpu/{gpu.index}/memory_used_bytes"][-1] >= BUFFER_BYTES
    assert metrics[f"gpu/{gpu.index}/power_watts"][-1] > 0
    assert metrics[f"gpu/{gpu.index}/energy_joules"][-1] > metrics[f"gpu/{gpu.index}/energy_joules"][0]
    assert gpu.uuid == f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    assert report.diagnosis.verdict == "healthy", report.diagnosis.why


def test_a_gpu_that_waits_for_data_is_found_low_and_why(tmp_path: Path) -> None:
    report = train(tmp_path, Busy(2), loader(Samples(200, time.sleep, 0.02), num_workers=0))
    assert report.diagnosis.verdict == "low"
    assert report.diagnosis.findings[0].cause == "data_loading"
    assert "pin_memory=True) (now 0, None, False, False)" in report.diagnosis.findings[0].advice


@pytest.mark.parametrize("family", ["lightning.fabric", "lightning_fabric"])
def test_a_loop_with_fabric_samples_and_logs_its_gpu(tmp_path: Path, family: str) -> None:
    """The GPU waits for data for some 30 ms of each step."""
    logger = importlib.import_module(f"{family}.loggers").CSVLogger(tmp_path)
    fabric = importlib.import_module(family).Fabric(accelerator="cuda", devices=1, loggers=[logger])
    layer = torch.nn.Linear(4, 1)
    model, optimizer = fabric.setup(layer, torch.optim.SGD(layer.parameters(), lr=1e-6))
    batches = fabric.setup_dataloaders(loader(Samples(100, time.sleep, 0.03)))
    with watch(fabric, min_seconds=1) as run:
        for batch in run.batches(batches):
            torch.cuda._sleep(10_000_000)
            fabric.backward(model(batch).square().mean())
            optimizer.step()
    report = load_report(logger.log_dir)
    assert report.diagnosis.verdict == "low"
    assert report.diagnosis.findings[0].cause == "data_loading"
    assert report.diagnosis.gpu_idle_percent["data_loading"] > 40
    assert 0 < report.gpus[0].utilization_percent_mean < 60
    assert logged(Path(logger.log_dir))["gpu/0/utilization_percent/mean"]


# --- facts that cannot be read

STEPS = 80
# Where a fact comes from: what the report calls it.
SOURCES = {
    (GpuWatch, "trained_on"): "the GPU's metrics",
    (counters, "count_holdings"): "torch's memory counters",
    (compat, "has_context"): "CUDA contexts",
}


def refuse(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("as a new driver may")


def test_each_fact_about_a_gpu_is_left_out_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name in SOURCES:
        monkeypatch.setattr(owner, name, refuse)
    report = train(tmp_path, Model(), loader(Samples(STEPS)), min_seconds=0.001)
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
    report = train(tmp_path, OfTexts(), DataLoader(texts, batch_size=2, collate_fn=collate), min_seconds=0.001)
    assert (report.outcome, report.steps) == ("completed", STEPS)
    assert report.unseen == ()
    assert report.memory
    assert report.samples_per_s is not None
