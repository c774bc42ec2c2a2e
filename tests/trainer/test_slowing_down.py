"""Trainings whose lists, files and graphs really grow, on a clock that moves by hand as these are gone through."""

from __future__ import annotations

import re
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch import loggers as lightning_loggers
from trainings import HandClock, Model, Samples, loader, quiet_trainer

from lightning_gpu_tools import GPUUtilizationAdvisor, GPUUtilizationMonitor, load_report, watch
from lightning_gpu_tools.reports.text import render_text
from lightning_gpu_tools.runs import session
from lightning_gpu_tools.training import drift
from lightning_gpu_tools.training.drift import Drift
from lightning_gpu_tools.training.stacks import io_counters
from lightning_gpu_tools.training.step_clock import StepClock
from lightning_gpu_tools.types import Finding, Report

pytestmark = pytest.mark.filterwarnings("ignore::lightning_gpu_tools.errors.LowGPUUtilizationWarning")
STEPS, STEP_S = 300, 0.005
READ_EVERY = 15  # steps
TIMEOUT_S = 30.0
needs_io = pytest.mark.skipif("wchar" not in io_counters("self"), reason="the kernel does not count what is written")

clock = HandClock()


@pytest.fixture(autouse=True)
def hand_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "StepClock", lambda: StepClock(clock))
    monkeypatch.setattr(drift, "_INTERVAL_S", 0.001)
    monkeypatch.setattr(drift, "_COST", 1)


def wait_for_a_reading(read: Drift) -> None:
    """Wait until the background thread has read what grows, as often as it would in a run that takes minutes."""
    before, end_s = len(read._readings), time.monotonic() + TIMEOUT_S
    while len(read._readings) == before and time.monotonic() < end_s:
        time.sleep(0.001)


class Reading(Callback):
    def __init__(self, advisor: GPUUtilizationAdvisor) -> None:
        self.advisor = advisor

    def on_train_batch_end(self, trainer: Trainer, model: LightningModule, out: Any, batch: Any, index: int) -> None:
        own = self.advisor._session
        assert own is not None
        assert own.recorder is not None
        if index % READ_EVERY == 0 and index > own.clock.warm_up_steps:
            wait_for_a_reading(own.recorder.drift)


def fit(folder: Path, model: Model, *callbacks: Callback, **options: Any) -> Report:
    advisor = GPUUtilizationAdvisor(min_seconds=0.001)
    watching = [GPUUtilizationMonitor(), advisor, Reading(advisor)]
    quiet_trainer(folder, callbacks=[*callbacks, *watching], **options).fit(model, loader(Samples(STEPS)))
    return load_report(folder)


def slowing_down(report: Report) -> Finding | None:
    return next((one for one in report.diagnosis.findings if one.cause == "slowing_down"), None)


class Median(Callback):
    """Goes through the losses of all samples, or of the latest ones, for 0.1 µs each."""

    def __init__(self, latest: int | None = None) -> None:
        self.losses: deque[float] = deque(maxlen=latest)

    def on_train_batch_end(self, *args: Any) -> None:
        self.losses.extend(len(self.losses) + number / 7 for number in range(300))
        clock.spend(1e-7 * len(self.losses))


class Steady(Model):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        clock.spend(STEP_S)
        loss: torch.Tensor = self.layer(batch).square().mean() / 1e9
        return loss


class Summed(Steady):
    """Adds up its losses, with their graphs or without, and trains on the sum. Each loss takes backward 50 µs."""

    total_loss: torch.Tensor | float = 0.0

    def __init__(self, *, keeps_graph: bool) -> None:
        super().__init__()
        self.keeps_graph = keeps_graph

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.total_loss + super().training_step(batch, batch_idx)
        self.total_loss = loss if self.keeps_graph else loss.detach()
        loss.register_hook(lambda gradient: clock.spend(5e-5))  # type: ignore[no-untyped-call]
        return loss

    def backward(self, loss: torch.Tensor) -> None:  # type: ignore[override]
        loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]


class Named(Steady):
    """Logs its loss in each step, under a name for this step."""

    def __init__(self, name: Callable[[int], str]) -> None:
        super().__init__()
        self.name = name

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log(self.name(batch_idx), loss)
        return loss


def written_bytes() -> int:
    return io_counters(f"self/task/{threading.get_native_id()}")["wchar"]


class CSVLogger(lightning_loggers.CSVLogger):
    """Lightning's, on a disk that takes 1 MB/s."""

    def save(self) -> None:
        before = written_bytes()
        super().save()
        clock.spend(1e-6 * (written_bytes() - before))


def with_csv_logger(folder: Path) -> dict[str, Any]:
    return {"logger": CSVLogger(folder, flush_logs_every_n_steps=5), "log_every_n_steps": 1}


def test_a_list_that_a_callback_goes_through_is_named(tmp_path: Path) -> None:
    report = fit(tmp_path, Steady(), Median())
    first = report.diagnosis.findings[0]
    assert (first.cause, first.evidence["kind"]) == ("slowing_down", "kept_objects")
    assert (first.evidence["phase"], report.diagnosis.verdict) == ("callback/Median", "low")
    assert float(first.evidence["times"]) == pytest.approx(
        13.5 / 5.8, rel=0.03
    )  # ms, of the windows around steps 26 and 285
    assert float(first.evidence["python_objects_last"]) - float(first.evidence["python_objects_first"]) > 10_000
    assert sum(one.share for one in report.diagnosis.findings) < 1.0  # nothing is counted twice
    (line,) = [one for one in render_text(report).splitlines() if "◀ cause" in one]
    assert "Median" in line


@pytest.mark.follows("collections.deque(maxlen=1000)")
def test_a_list_of_the_latest_losses_is_healthy(tmp_path: Path) -> None:
    found = slowing_down(fit(tmp_path / "all", Steady(), Median()))
    assert found is not None
    maxlen = re.search(r"deque\(maxlen=(\d+)\)", found.advice)
    assert maxlen is not None
    assert slowing_down(fit(tmp_path / "latest", Steady(), Median(latest=int(maxlen[1])))) is None


@needs_io
def test_a_csv_file_that_is_written_again_and_again_is_named_with_its_rows(tmp_path: Path) -> None:
    report = fit(tmp_path, Named(lambda step: f"loss of batches from {step // 5 * 5} on"), **with_csv_logger(tmp_path))
    found = slowing_down(report)
    assert found is not None
    assert (found.evidence["kind"], found.evidence["phase"]) == ("rewritten_file", "logging/CSVLogger")
    assert STEPS / 2 < int(found.evidence["log_rows"]) <= STEPS + 1
    assert f"whose file metrics.csv has grown to {found.evidence['log_rows']:,} rows" in report.diagnosis.why
    assert "Log the same names throughout" in found.advice


@needs_io
def test_a_csv_file_that_rows_are_added_to_is_healthy(tmp_path: Path) -> None:
    assert slowing_down(fit(tmp_path, Named(lambda step: "loss"), **with_csv_logger(tmp_path))) is None


def test_a_graph_that_is_kept_is_named_with_its_size(tmp_path: Path) -> None:
    found = slowing_down(fit(tmp_path, Summed(keeps_graph=True)))
    assert found is not None
    assert (found.evidence["kind"], found.evidence["phase"]) == ("kept_graph", "training_step/Summed.backward")
    assert float(found.evidence["graph_nodes_last"]) > 2 * float(found.evidence["graph_nodes_first"])
    assert "loss.detach()" in found.advice


@pytest.mark.follows("Keep loss.detach() or loss.item() in sums and lists")
def test_a_sum_of_detached_losses_is_healthy(tmp_path: Path) -> None:
    assert slowing_down(fit(tmp_path, Summed(keeps_graph=False))) is None


def test_a_graph_that_is_kept_is_named_in_a_loop_of_ones_own(tmp_path: Path) -> None:
    net, total = torch.nn.Linear(4, 1), torch.zeros(())
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-9)
    with watch(folder=str(tmp_path), min_seconds=0.001) as run:
        for batch in run.batches(loader(Samples(STEPS))):
            clock.spend(STEP_S)
            total = total + net(batch).square().mean()
            total.register_hook(lambda gradient: clock.spend(5e-5))  # type: ignore[no-untyped-call]
            total.backward(retain_graph=True)  # type: ignore[no-untyped-call]
            optimizer.step()
    found = slowing_down(load_report(tmp_path))
    assert found is not None
    assert (found.evidence["kind"], found.evidence["phase"]) == ("kept_graph", "training_step/backward")


def test_a_slow_beginning_is_no_slowing_down(tmp_path: Path) -> None:
    class Slow(Steady):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            clock.spend(0.1 if batch_idx < STEPS / 3 else 0.0)
            return super().training_step(batch, batch_idx)

    assert slowing_down(fit(tmp_path, Slow())) is None
