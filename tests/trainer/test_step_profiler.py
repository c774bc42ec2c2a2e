"""Profiled steps of real trainings on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.profilers import PyTorchProfiler
from trainings import Boom, Model, Raise, Samples, hide, loader, quiet_trainer

from lightning_gpu_tools.trainer import compat
from lightning_gpu_tools.training import compat as torch_compat
from lightning_gpu_tools.training.run_measurements import ProfiledSteps
from lightning_gpu_tools.training.step_profiler import StepProfiler


class Curious(Model):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        if loss.item() > 1e9:  # THE LINE
            raise Boom
        return loss


THE_LINE = next(i for i, line in enumerate(Path(__file__).read_text().splitlines(), 1) if line.endswith("# THE LINE"))


class Profiling(Callback):
    """Profiles from the third step on."""

    def __init__(self) -> None:
        self.found: list[ProfiledSteps] = []
        self.wrapped_at: list[int] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if trainer.global_step == 2 and torch_compat.is_profiling() is False:
            self.profiler = StepProfiler(
                compat.step_runner(trainer), pl_module, lambda function, *args: function(*args), self.found.append
            )
        loop = trainer.fit_loop.epoch_loop.automatic_optimization
        if "run" in vars(loop):
            self.wrapped_at.append(trainer.global_step)


def train(folder: Path, model: LightningModule, *others: Callback, **options: Any) -> Profiling:
    profiling = Profiling()
    quiet_trainer(folder, callbacks=[profiling, *others], **options).fit(model, loader(Samples(12)))
    return profiling


def test_the_line_that_asks_for_a_value_is_found_once(tmp_path: Path) -> None:
    profiling = train(tmp_path, Curious())
    (facts,) = profiling.found
    assert facts.steps == 3
    assert facts.syncs_per_step == 1
    (line,) = facts.sync_lines
    assert line.endswith(f"test_step_profiler.py:{THE_LINE}")
    assert profiling.wrapped_at == [2, 3, 4, 5]  # three steps under the profiler, one followed, and none after


@pytest.mark.parametrize("gone", ["TorchDispatchMode", "_local_scalar_dense"])
def test_without_the_names_that_see_operations_no_line_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gone: str
) -> None:
    if gone == "TorchDispatchMode":
        monkeypatch.delattr(f"torch.utils._python_dispatch.{gone}")
    else:
        hide(monkeypatch, torch_compat, gone)
    (facts,) = train(tmp_path, Curious()).found
    assert (facts.syncs_per_step, facts.sync_lines) == (1, ())


def test_a_step_that_asks_for_nothing_is_followed_no_further(tmp_path: Path) -> None:
    profiling = train(tmp_path, Model())
    (facts,) = profiling.found
    assert (facts.syncs_per_step, facts.sync_lines) == (0, ())
    assert profiling.wrapped_at == [2, 3, 4]


def test_a_training_that_fails_meanwhile_leaves_the_profiler_free(tmp_path: Path) -> None:
    profiling = Profiling()
    trainer = quiet_trainer(tmp_path, callbacks=[profiling, Raise(at_step=4)])
    with pytest.raises(Boom):
        trainer.fit(Curious(), loader(Samples(12)))
    profiling.profiler.close()
    profiling.profiler.close()
    assert "run" not in vars(trainer.fit_loop.epoch_loop.automatic_optimization)
    assert len(train(tmp_path, Curious()).found) == 1


def test_a_users_own_profiler_is_left_alone(tmp_path: Path) -> None:
    profiling = train(tmp_path, Curious(), profiler=PyTorchProfiler(dirpath=tmp_path, filename="own"))
    assert profiling.found == []


def test_a_trace_that_cannot_be_read_costs_only_the_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class FullDisk(Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            monkeypatch.setenv("TMPDIR", str(tmp_path / "gone"))
            monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))

    profiling = train(tmp_path, Curious(), FullDisk())
    assert profiling.found == []
    assert max(profiling.wrapped_at) < 6


def test_manual_optimization_is_profiled_too(tmp_path: Path) -> None:
    class Manual(Model):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            loss = self.layer(batch).square().mean()
            self.manual_backward(loss)
            self.optimizers().step()
            float(loss)

    (facts,) = train(tmp_path, Manual()).found
    assert facts.syncs_per_step == 1
