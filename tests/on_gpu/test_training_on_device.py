"""A real training on a real GPU: the metrics that the monitor logs, the report, and the advisor's findings."""

import math
from pathlib import Path

import torch
from lightning.pytorch.loggers import CSVLogger
from trainings import Model, Samples, loader, logged, quiet_trainer

from lightning_gpu_tools import GPUUtilizationAdvisor, GPUUtilizationMonitor, load_report

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


def test_a_busy_gpu_is_logged_as_busy_and_found_healthy(tmp_path: Path) -> None:
    callbacks = [GPUUtilizationMonitor(), GPUUtilizationAdvisor(min_seconds=2.0)]
    logger = CSVLogger(tmp_path, name="", version="")
    trainer = quiet_trainer(tmp_path, accelerator="gpu", callbacks=callbacks, logger=logger, log_every_n_steps=50)
    trainer.fit(Busy(40), loader(Samples(200)))
    report = load_report(tmp_path)
    (gpu,) = report.gpus
    metrics = {name: [*values.values()] for name, values in logged(tmp_path).items()}
    assert max(metrics[f"gpu/{gpu.index}/utilization_percent/mean"]) > 80  # a busy host starves it now and then
    assert metrics[f"gpu/{gpu.index}/memory_used_bytes"][-1] >= BUFFER_BYTES
    assert metrics[f"gpu/{gpu.index}/power_watts"][-1] > 0
    assert metrics[f"gpu/{gpu.index}/energy_joules"][-1] > metrics[f"gpu/{gpu.index}/energy_joules"][0]
    assert gpu.uuid == f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    assert report.diagnosis.verdict == "healthy", report.diagnosis.why
