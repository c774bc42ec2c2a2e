"""Findings of the package in trainings that keep their GPU waiting in one known way each."""

import inspect
import re
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cause_examples import TIME_EXAMPLES
from synthetic import NO_WORKERS
from torch.utils.data import DataLoader
from toys import occupy
from trainings import Boom, Model, Raise, Samples, Watch, loader, quiet_trainer

from lightning_gpu_tools import GPUUtilizationAdvisor, GPUUtilizationMonitor, load_report
from lightning_gpu_tools.advice.causes.time import host_to_device_copy
from lightning_gpu_tools.reports.report import Report
from lightning_gpu_tools.training.phases import FORWARD

STEPS = 130


def train(folder: Path, model: Model, steps: int = STEPS) -> Report:
    own = [GPUUtilizationMonitor(interval_s=0.1), GPUUtilizationAdvisor(min_seconds=1)]
    quiet_trainer(folder, accelerator="gpu", callbacks=own).fit(model, loader(Samples(steps)))
    return load_report(folder)


class Waits(Model):
    """Gives its loss to a function of the test every so many steps."""

    def __init__(self, use: Callable[[Model, torch.Tensor], object], every: int = 1) -> None:
        super().__init__()
        self.use, self.every = use, every

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        occupy(0.020)
        loss = super().training_step(batch, batch_idx)
        if batch_idx % self.every == 0:
            self.use(self, loss)
        time.sleep(0.020)
        return loss


def item(model: Model, loss: torch.Tensor) -> None:
    loss.item()


@pytest.mark.follows(
    "Remove .item(), .cpu(), float(), print, nonzero and synchronize() there, or call them every 50",
    "Pass the tensor itself to self.log",
)
def test_a_line_that_waits_for_the_gpu_is_named(tmp_path: Path) -> None:
    report = train(tmp_path, Waits(item))
    first = report.diagnosis.findings[0]
    assert first.cause == "device_sync", report.diagnosis
    line = f"{Path(__file__).name}:{inspect.getsourcelines(item)[1] + 1} in item"
    assert line in str(first.evidence["source_lines"])
    assert line in first.advice
    assert 1.2 < first.ceiling < 2.3  # of 40 ms, the 20 of the GPU or of the host are left, and what a busy host adds
    every = re.search(r"or call them every (\d+) steps", first.advice)
    assert every is not None
    assert "Pass the tensor itself to self.log" in first.advice
    log = Waits(lambda model, loss: model.log("mine", loss.detach()))
    for model in (Waits(item, int(every[1])), log):
        assert "device_sync" not in [one.cause for one in train(tmp_path, model).diagnosis.findings]


@pytest.mark.follows("Set DataLoader(pin_memory=True) (now False)")
def test_batches_are_in_page_locked_memory_as_advised(tmp_path: Path) -> None:
    class Seen(Model):
        def on_before_batch_transfer(self, batch: torch.Tensor, dataloader_idx: int) -> torch.Tensor:
            pinned.append(batch.is_pinned())
            return batch

    run = replace(TIME_EXAMPLES["host_to_device_copy"].sick, loader=NO_WORKERS)
    (finding,) = host_to_device_copy.find(run)
    option = re.search(r"DataLoader\((\w+)=True\)", finding.advice)
    assert option is not None
    for options in ({}, {option[1]: True}):
        pinned: list[bool] = []
        trainer = quiet_trainer(tmp_path, accelerator="gpu")
        trainer.fit(Seen(), DataLoader(Samples(4), batch_size=2, **options))
        assert pinned == [bool(options)] * 2


# --- syncs: the settings of torch and of the program stay as they were --------------------------------------------


def settings() -> tuple[object, ...]:
    """Return everything that a record of syncs may change."""
    waits = torch.cuda.synchronize, torch._C._cuda_synchronize
    return tuple(warnings.filters), warnings.showwarning, waits, torch.cuda.get_sync_debug_mode()


class Warns(Model):
    """Warns in each step, and waits for the GPU in each."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        warnings.warn("mine", UserWarning, stacklevel=1)
        return super().training_step(batch, batch_idx).item() * self.layer.weight.sum()


@pytest.mark.parametrize("action", ["default", "ignore"])
def test_the_users_warnings_are_shown_as_without_it(tmp_path: Path, action: Any) -> None:
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter(action)
        before = settings()
        watched = Watch()
        quiet_trainer(tmp_path, accelerator="gpu", callbacks=[watched]).fit(Warns(), loader(Samples(STEPS)))
        assert settings() == before
    mine = [one for one in shown if str(one.message) == "mine"]
    assert len(mine) == {"default": 1, "ignore": 0}[action]
    assert not [one for one in shown if "ynchroniz" in str(one.message)]
    found = watched.clock.watched_steps()
    assert [one.function for one in found.syncs if one.phase == FORWARD] == ["training_step"]


def test_a_training_that_fails_anywhere_leaves_torch_as_it_was(tmp_path: Path) -> None:
    before = settings()
    for at_step in range(4, 16):
        trainer = quiet_trainer(tmp_path, accelerator="gpu", callbacks=[GPUUtilizationAdvisor(), Raise(at_step)])
        with pytest.raises(Boom):
            trainer.fit(Model(), loader(Samples(at_step)))
        assert settings() == before


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
