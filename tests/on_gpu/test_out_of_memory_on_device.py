"""A real error of torch's allocator on a real GPU: what it says, what is counted when it comes, and that it goes on."""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule
from trainings import Samples, loader, quiet_trainer

from lightning_gpu_tools import GPUUtilizationMonitor
from lightning_gpu_tools.reports.report import load_report

pytestmark = pytest.mark.gpu

GIB = 2**30


@pytest.fixture(autouse=True)
def _two_gib() -> Iterator[None]:
    torch.cuda.set_per_process_memory_fraction(2 * GIB / torch.cuda.get_device_properties(0).total_memory)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    gc.collect()
    torch.cuda.empty_cache()


class RunsOut(LightningModule):
    """Keeps 256 MiB more in each step, in forward or in backward."""

    def __init__(self, part: str) -> None:
        super().__init__()
        self.layer, self.part = torch.nn.Linear(4, 1), part
        self.kept: list[torch.Tensor] = []

    def keep(self, *args: object) -> None:
        self.kept.append(torch.empty(GIB // 4, dtype=torch.uint8, device=self.device))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.layer(batch).square().mean()
        if self.part == "forward":
            self.keep()
        else:
            loss.register_hook(self.keep)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-6)


@pytest.mark.parametrize("part", ["forward", "backward"])
def test_a_real_error_is_explained_by_what_torch_counted(tmp_path: Path, part: str) -> None:
    monitor = GPUUtilizationMonitor(memory_history=True)
    trainer = quiet_trainer(tmp_path, accelerator="gpu", callbacks=[monitor])
    with pytest.raises(torch.OutOfMemoryError):
        trainer.fit(RunsOut(part), loader(Samples(60)))
    report = load_report(tmp_path)
    assert report.outcome.startswith(f"out of memory in {part} at step ")
    first = report.diagnosis.findings[0]
    assert first.cause == "memory_growth"
    assert first.evidence["bytes_per_step"] == pytest.approx(GIB / 4, rel=0.05)
    assert first.evidence["requested_bytes"] == GIB // 4
    assert first.evidence["allowed_bytes"] == pytest.approx(2 * GIB, rel=0.01)
    assert (tmp_path / "gpu_report" / "cuda_memory_snapshot.pickle").stat().st_size > 1000
