"""What a step costs the training thread on a GPU, in calls of Python functions, which no busy machine changes."""

from pathlib import Path

import pytest
from lightning.pytorch import Callback
from trainer.test_step_cost import FROM, STEPS, Counted, Empty
from trainings import Samples, loader, quiet_trainer

from lightning_gpu_tools import GPUUtilizationAdvisor, GPUUtilizationMonitor

pytestmark = pytest.mark.gpu


def calls(folder: Path, *callbacks: Callback) -> int:
    model = Counted()
    trainer = quiet_trainer(folder, accelerator="gpu", callbacks=[*callbacks])
    trainer.fit(model, loader(Samples(FROM + STEPS + 1)))
    return model.calls.all


def test_a_step_makes_fewer_calls_than_with_two_empty_callbacks(tmp_path: Path) -> None:
    ours = calls(tmp_path / "ours", GPUUtilizationMonitor(report=False), GPUUtilizationAdvisor())
    assert ours < calls(tmp_path / "empty", Empty(), Empty())
