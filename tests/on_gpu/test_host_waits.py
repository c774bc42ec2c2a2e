"""How often the host waits for its GPU, with the package and without it, as one number."""

from pathlib import Path

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from trainings import Model, Samples, loader, quiet_trainer

from lightning_gpu_tools import GPUUtilizationAdvisor, GPUUtilizationMonitor
from lightning_gpu_tools.simulated import SimulatedCudaError, host_waits

pytestmark = pytest.mark.gpu
STEPS = 120


class Count(Callback):
    """Counts the waits of the host between the first training step and the last."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.before = host_waits()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        after = host_waits()
        self.waits = {name: after[name] - self.before[name] for name in after}


def waits(folder: Path, *callbacks: Callback) -> dict[str, int]:
    count = Count()
    trainer = quiet_trainer(
        folder, accelerator="gpu", callbacks=[count, *callbacks], logger=CSVLogger(folder), log_every_n_steps=10
    )
    trainer.fit(Model(), loader(Samples(STEPS)))
    return count.waits


def test_the_package_makes_the_host_wait_no_more_often(tmp_path: Path) -> None:
    try:
        host_waits()
    except SimulatedCudaError:
        pytest.skip("only the simulated GPU counts waits; on hardware, the test of the sync debug mode asks for them")
    without = waits(tmp_path / "without")
    assert sum(without.values()) >= STEPS / 10  # for each logged loss; batches of pageable memory come on top
    assert waits(tmp_path / "with", GPUUtilizationMonitor(), GPUUtilizationAdvisor(min_seconds=0.1)) == without
