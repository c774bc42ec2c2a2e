"""What the diagnosis is told of the training process."""

import pytest

from lightning_gpu_tools.trainer.run_recorder import busy_cores
from lightning_gpu_tools.training.run_measurements import StepBlock


def block(wait_s: float, wait_cpu_s: float) -> StepBlock:
    return StepBlock(steps=10, wall_s=3.0, data_loading_s=wait_s, data_loading_cpu_s=wait_cpu_s)


def test_cores_are_counted_outside_of_the_wait_for_data() -> None:
    # 40 of 60 s are spent loading, on one core; in the other 20 s four cores are busy.
    phases = {"data_loading": 38.0, "epoch_start": 2.0, "training_step": 20.0}
    assert busy_cores(120.0, 60.0, phases, [block(2.0, 2.0)]) == pytest.approx(4.0)
    # With workers the training process only waits.
    assert busy_cores(80.0, 60.0, phases, [block(2.0, 0.0)]) == pytest.approx(4.0)


def test_a_run_that_only_waits_counts_as_one_core() -> None:
    assert busy_cores(0.0, 40.0, {"data_loading": 40.0}, []) == 1.0
