"""What the package says of trainings that keep their GPU waiting in one known way each."""

from __future__ import annotations

import inspect
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from trainings import Boom, Model, Raise, Samples, Watch, burn, loader, quiet_trainer

from lightning_gpu_tools import GPUUtilizationAdvisor, GPUUtilizationMonitor, load_report
from lightning_gpu_tools.reports.report import Report
from lightning_gpu_tools.training.phases import FORWARD

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from toys import occupy

pytestmark = pytest.mark.gpu
STEPS = 130


def line_of(function: Callable[..., object], text: str) -> str:
    """Return the place of a line of a function, as findings name it."""
    lines, first = inspect.getsourcelines(function)
    (number,) = [first + index for index, line in enumerate(lines) if text in line]
    return f"{Path(__file__).name}:{number} in {function.__name__}"


def state_of_warnings() -> tuple[object, ...]:
    waits = torch.cuda.synchronize, torch._C._cuda_synchronize  # type: ignore[attr-defined]
    return tuple(warnings.filters), warnings.showwarning, waits, torch.cuda.get_sync_debug_mode()


def train(folder: Path, model: Model, steps: int = STEPS) -> Report:
    own = [GPUUtilizationMonitor(interval_s=0.1), GPUUtilizationAdvisor(min_seconds=1)]
    quiet_trainer(folder, accelerator="gpu", callbacks=own).fit(model, loader(Samples(steps)))
    return load_report(folder)


class Item(Model):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        occupy(0.020)
        loss = super().training_step(batch, batch_idx)
        loss.item()
        time.sleep(0.020)
        return loss


class Cpu(Model):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        occupy(0.020)
        loss = super().training_step(batch, batch_idx)
        loss.detach().cpu()
        time.sleep(0.020)
        return loss


class Nonzero(Model):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        occupy(0.020)
        torch.nonzero(batch)
        time.sleep(0.020)
        return super().training_step(batch, batch_idx)


class Synchronize(Model):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        occupy(0.020)
        loss = super().training_step(batch, batch_idx)
        torch.cuda.synchronize()
        time.sleep(0.020)
        return loss


@pytest.mark.parametrize(
    ("model", "text"),
    [(Item, "loss.item()"), (Cpu, ".cpu()"), (Nonzero, "torch.nonzero"), (Synchronize, "torch.cuda.synchronize()")],
)
def test_a_line_that_waits_for_the_gpu_is_named(tmp_path: Path, model: type[Model], text: str) -> None:
    report = train(tmp_path, model())
    first = report.diagnosis.findings[0]
    assert first.cause == "device_sync", report.diagnosis
    assert line_of(model.training_step, text) in str(first.evidence["source_lines"])
    assert line_of(model.training_step, text) in first.advice
    assert 1.2 < first.ceiling < 2.3  # of 40 ms, the 20 of the GPU or of the host are left, and what a busy host adds


class SmallKernels(Model):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        small = batch
        for _ in range(400):
            for _ in range(8):  # which takes the host longer than a kernel takes the GPU
                small = small.unsqueeze(0).squeeze(0)
            small = small * 1.0
        return super().training_step(batch, batch_idx)


def test_many_small_kernels_are_launched_too_slowly(tmp_path: Path) -> None:
    report = train(tmp_path, SmallKernels(), steps=400)
    first = report.diagnosis.findings[0]
    assert first.cause == "launch_bound", report.diagnosis
    assert float(first.evidence["operations_per_step"]) == pytest.approx(420, abs=20)


class PurePython(Model):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        burn(0.025)
        occupy(0.005)
        return super().training_step(batch, batch_idx)


def test_work_of_the_host_is_told_from_launching(tmp_path: Path) -> None:
    report = train(tmp_path, PurePython())
    first = report.diagnosis.findings[0]
    assert first.cause == "host_work", report.diagnosis
    assert first.share > 0.5


# --- syncs, and what noting them leaves as it was -----------------------------------------------------------------


class Warns(Model):
    """Warns in each step, and waits for the GPU in each."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        warnings.warn("mine", UserWarning, stacklevel=1)
        return super().training_step(batch, batch_idx).item() * self.layer.weight.sum()


@pytest.mark.parametrize("action", ["default", "always", "ignore"])
def test_the_users_warnings_are_shown_as_without_it(tmp_path: Path, action: Any) -> None:
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter(action)
        before = state_of_warnings()
        watched = Watch()
        quiet_trainer(tmp_path, accelerator="gpu", callbacks=[watched]).fit(Warns(), loader(Samples(STEPS)))
        assert state_of_warnings() == before
    mine = [one for one in shown if str(one.message) == "mine"]
    assert len(mine) == {"default": 1, "always": STEPS, "ignore": 0}[action]
    assert not [one for one in shown if "ynchroniz" in str(one.message)]
    found = watched.clock.watched_steps()
    assert found is not None
    assert [one.function for one in found.syncs if one.phase == FORWARD] == ["training_step"]


@pytest.mark.parametrize("fails", [False, True])
def test_a_training_that_ends_anywhere_leaves_torch_as_it_was(tmp_path: Path, fails: bool) -> None:
    before = state_of_warnings()
    for at_step in range(4, 16):
        callbacks = [GPUUtilizationAdvisor(), *([Raise(at_step)] if fails else [])]
        trainer = quiet_trainer(tmp_path, accelerator="gpu", callbacks=callbacks)
        with pytest.raises(Boom) if fails else nullcontext():
            trainer.fit(Model(), loader(Samples(at_step)))
        assert state_of_warnings() == before


def test_the_users_own_sync_debug_mode_is_left_alone(tmp_path: Path) -> None:
    watched = Watch()
    trainer = quiet_trainer(tmp_path, accelerator="gpu", callbacks=[watched])
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with pytest.warns(UserWarning, match="synchronizing CUDA operation"):
            trainer.fit(Warns(), loader(Samples(STEPS)))
        assert torch.cuda.get_sync_debug_mode() == 1
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert watched.clock.watched_steps() is None


# --- settings that cannot be read ---------------------------------------------------------------------------------


def test_a_precision_that_torch_refuses_to_tell_costs_nothing_else(tmp_path: Path) -> None:
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        report = train(tmp_path, Item())
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert report.steps == STEPS
    assert report.diagnosis.verdict == "low"
