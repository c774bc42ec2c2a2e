"""The cost of the package for a training on a GPU, in numbers that no busy machine changes."""

import ctypes
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger
from trainer.test_a_step import FROM, STEPS
from trainings import Model, Samples, loader, quiet_trainer

from lightning_gpu_tools import GPUUtilizationAdvisor, GPUUtilizationMonitor


def host_waits() -> dict[str, int]:
    """Return the number of times this process has waited for the simulated GPU, by kind; raise on a real one."""
    counts = (ctypes.c_long * 4).in_dll(ctypes.CDLL(None), "simulated_cuda_waits")
    return dict(zip(("device", "stream", "event", "copy"), counts, strict=True))


class Waits(Callback):
    """Counts the host's waits for the GPU between the first training step and the last."""

    def on_train_start(self, *args: Any) -> None:
        self.before = host_waits()

    def on_train_end(self, *args: Any) -> None:
        self.added = {name: number - self.before[name] for name, number in host_waits().items()}


def test_the_package_makes_the_host_wait_no_more_often(tmp_path: Path) -> None:
    try:
        host_waits()
    except ValueError:
        pytest.skip("only the simulated GPU counts waits; on hardware, the test of the sync debug mode asks for them")
    without, with_ours = Waits(), Waits()
    ours = GPUUtilizationMonitor(), GPUUtilizationAdvisor(min_seconds=0.1)
    both: dict[str, list[Callback]] = {"without": [without], "with": [with_ours, *ours]}
    for name, callbacks in both.items():
        logger = CSVLogger(tmp_path / name)
        trainer = quiet_trainer(tmp_path, accelerator="gpu", callbacks=callbacks, logger=logger, log_every_n_steps=10)
        trainer.fit(Model(), loader(Samples(FROM + STEPS + 1)))
    assert sum(without.added.values()) >= STEPS / 10  # for each logged loss; batches of pageable memory come on top
    assert with_ours.added == without.added
