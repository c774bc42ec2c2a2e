"""Real trainings on a simulated GPU: how long it ran dry, and because of what, by its own events."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_driver import Driver, gpu
from lightning.pytorch import Callback, Trainer
from simulated_gpu import STEPS, SimulatedGpu, train_on_simulated_gpu
from trainings import Spending

from lightning_gpu_tools.advice.diagnosis import diagnose
from lightning_gpu_tools.training.run_measurements import RunMeasurements
from lightning_gpu_tools.training.step_clock import StepClock

Train = Callable[..., tuple[StepClock, SimulatedGpu, RunMeasurements]]


@pytest.fixture
def train(driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Train:
    driver.gpus = [gpu()]
    return functools.partial(train_on_simulated_gpu, tmp_path, monkeypatch.setattr)


def idle_percent(measured: RunMeasurements) -> dict[str, float]:
    """Return the idle time by phase, as far as it is half a percent."""
    shares = {**measured.idle_by_phase(), "in the step": measured.idle_in_step_share or 0.0}
    return {phase: 100 * share for phase, share in shares.items() if share >= 0.005}


def test_a_pageable_copy_costs_what_the_gpu_copies(train: Train) -> None:
    """Host timers see the host in the copy for most of the time, because there it waits for the GPU."""
    clock, _, measured = train(copy_s=0.0002, pageable=True)
    assert clock.seconds["host_to_device_copy"] / clock.wall_s > 0.85
    assert idle_percent(measured).get("host_to_device_copy", 0.0) < 2
    assert diagnose(measured).verdict == "healthy"


def test_a_wait_for_data_behind_gpu_work_costs_nothing(train: Train) -> None:
    clock, _, measured = train(data_s=0.0098, host_s=0.010)
    assert clock.seconds["data_loading"] / clock.wall_s > 0.40
    assert idle_percent(measured).get("data_loading", 0.0) < 1


def test_a_wait_that_the_gpu_feels_is_measured(train: Train) -> None:
    """20 ms of kernels in a step of 30 ms, 28.9 of which the host waits for data."""
    clock, _, measured = train(data_s=0.029)
    assert clock.seconds["data_loading"] / clock.wall_s > 0.95
    idle = idle_percent(measured)
    assert idle.keys() == {"data_loading"}
    assert idle["data_loading"] == pytest.approx(100 - measured.utilization_percent, abs=1)
    finding = diagnose(measured).findings[0]
    assert finding.cause == "data_loading"
    assert finding.ceiling == pytest.approx(1.47, abs=0.03)  # 1.5, less what it takes to receive a batch


def test_idle_time_between_kernels_is_inside_the_step(train: Train) -> None:
    clock, _, measured = train(host_s=0.030, kernel_s=0.010)
    assert clock.seconds["training_step/forward"] / clock.wall_s > 0.95
    assert idle_percent(measured) == pytest.approx({"in the step": 66.7}, abs=1)


@pytest.mark.parametrize(
    ("hooks", "data_s", "phase", "percent"),
    [
        (["on_train_batch_end"], 0.0, "callback/Spending", 100 * 15 / 36),
        (["on_train_batch_start"], 0.0, "callback/Spending", 100 * 15 / 36),
        ([], 0.010, "data_loading", 100 * 10 / 31),
    ],
)
def test_what_comes_behind_a_sync_is_told_from_the_step(
    train: Train, hooks: list[str], data_s: float, phase: str, percent: float
) -> None:
    _, _, measured = train(*[Spending(print, hook, 0.015) for hook in hooks], item=True, data_s=data_s)
    assert idle_percent(measured)[phase] == pytest.approx(percent, abs=1.5)
    finding = diagnose(measured).findings[0]
    assert (finding.evidence["name"] if hooks else finding.cause) == phase.removeprefix("callback/")


def test_pinned_copies_are_seen_on_the_gpu(train: Train) -> None:
    clock, _, measured = train(copy_s=0.010)
    assert clock.seconds["host_to_device_copy"] / clock.wall_s < 0.1  # now and then the queue is full there
    assert idle_percent(measured)["host_to_device_copy"] == pytest.approx(100 / 3, abs=1)
    assert diagnose(measured).findings[0].cause == "host_to_device_copy"


@pytest.mark.parametrize(
    ("host_s", "forward_ms"),
    [
        (0.001, 10.0),
        (0.050, 26.0),  # the host needs 50 ms to launch forward; in half of them the GPU does the step before
    ],
)
def test_the_parts_of_a_step_are_measured_on_the_gpu(train: Train, host_s: float, forward_ms: float) -> None:
    _, _, measured = train(host_s=host_s, kernel_s=0.010, backward_s=0.020, optimizer_s=0.004)
    idle = measured.gpu_idle
    assert idle is not None
    ms = {phase: 1e3 * seconds / idle.samples for phase, seconds in idle.step_s.items() if seconds > 1e-9}
    assert ms == pytest.approx(
        {"training_step/forward": forward_ms, "training_step/backward": 20.0, "training_step/optimizer": 4.0}, rel=0.02
    )


def test_one_step_in_eight_is_sampled_by_random_numbers_of_its_own(train: Train) -> None:
    random.seed(3)
    expected = random.Random(3).random()
    _, _, measured = train()
    assert random.random() == expected
    assert measured.gpu_idle is not None
    assert STEPS / 16 < measured.gpu_idle.samples < STEPS / 4


def test_a_cuda_error_ends_the_sampling_and_not_the_training(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    class Break(Callback):
        def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
            if trainer.global_step == 100:

                def fail(*args: object) -> None:
                    raise RuntimeError("CUDA error: device-side assert triggered")

                monkeypatch.setattr(torch.cuda.Event, "record", fail)

    clock, _, measured = train(Break())
    assert clock.steps == STEPS
    assert measured.gpu_idle is not None
    assert 0 < measured.gpu_idle.samples < 100
