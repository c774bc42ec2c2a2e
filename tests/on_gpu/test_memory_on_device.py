"""The account of memory in a real training on a real GPU."""

from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule
from torch.utils.benchmark import Timer
from trainings import Samples, loader, quiet_trainer

from lightning_gpu_tools import GPUUtilizationMonitor
from lightning_gpu_tools.reports.report import load_report
from lightning_gpu_tools.training import memory_counters

pytestmark = pytest.mark.gpu
WIDTH, LAYERS = 4096, 8


class Deep(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layers(batch.repeat(1, WIDTH // 4)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def test_the_account_explains_what_the_driver_says(tmp_path: Path) -> None:
    torch.cuda.reset_peak_memory_stats()
    trainer = quiet_trainer(tmp_path, accelerator="gpu", callbacks=[GPUUtilizationMonitor(interval_s=0.2)])
    trainer.fit(Deep(), loader(Samples(512 * 1024), batch_size=1024))
    report = load_report(tmp_path)
    (account,) = report.memory
    parts, whole = account.parts_bytes, 4 * LAYERS * (WIDTH + 1) * WIDTH
    assert sum(parts.values()) == account.used_bytes
    assert account.explained_share is not None
    assert account.explained_share > 0.98, parts
    assert (parts["parameters"], parts["gradients"]) == (whole, whole)
    assert parts["optimizer_states"] == pytest.approx(2 * whole, rel=0.001)
    assert 100 * 2**20 < parts["context"] < 2**31
    sizes = account.moments_bytes
    assert sizes["after_forward"] - sizes["step_start"] == pytest.approx(4 * LAYERS * 1024 * WIDTH, rel=0.2)


def test_a_reading_costs_a_fraction_of_torchs_own() -> None:
    gpu = torch.device("cuda", torch.cuda.current_device())
    torch.zeros(1, device=gpu)
    names = {"ours": memory_counters.read_memory, "torchs": torch.cuda.memory_stats, "gpu": gpu}
    ours_s, torchs_s = (Timer(f"{who}(gpu)", globals=names).blocked_autorange().median for who in ("ours", "torchs"))
    assert ours_s < torchs_s / 2
