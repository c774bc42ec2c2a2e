"""The step clock, driven by hand as a loop would drive it."""

from collections.abc import Iterator

import pytest
from trainings import HandClock

from lightning_gpu_tools.training.phases import TRAINER, TRAINING_STEP, VALIDATION
from lightning_gpu_tools.training.step_clock import WARM_UP_STEPS, StepClock


class Loop:
    """A training whose fetch takes 1 s and whose step takes 2 s."""

    def __init__(self) -> None:
        self.time = HandClock()
        self.clock = StepClock(self.time)
        self.step = self.clock.timed(TRAINING_STEP, self.time.spend)
        self.clock.start()

    def epoch(self, steps: int) -> None:
        self.clock.begin_epoch()
        for _ in range(steps):
            self.fetch()
            self.step(2.0)

    def fetch(self, seconds: float = 1.0) -> None:
        self.clock.begin_fetch()
        self.time.spend(seconds)
        self.clock.end_fetch()


@pytest.fixture
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.clock.stop()


def test_phases_add_up_to_the_wall_time(loop: Loop) -> None:
    loop.epoch(3)
    loop.time.spend(4.0)
    loop.clock.stop()
    loop.time.spend(99.0)
    assert loop.clock.seconds == {"epoch_start": 1.0, "data_loading": 2.0, "training_step": 6.0, "unexplained": 4.0}
    assert loop.clock.wall_s == 13.0
    assert (loop.clock.steps, loop.clock.epochs) == (3, 1)


def test_steady_steps_leave_out_warm_up_and_first_batches(loop: Loop) -> None:
    loop.epoch(50)
    loop.epoch(50)
    blocks = loop.clock.blocks
    # 100 steps less 20 of warm-up, less the first of the second epoch, less the one that nothing comes after.
    assert sum(block.steps for block in blocks) == (100 - WARM_UP_STEPS - 1 - 1) // 10 * 10
    assert {(block.step_s, block.data_loading_s) for block in blocks} == {(3.0, 10.0)}


def test_validation_inside_a_step_is_a_pause_of_it(loop: Loop) -> None:
    validate = loop.clock.timed(VALIDATION, loop.time.spend)
    loop.clock.begin_epoch()
    for step in range(1, 53):
        loop.fetch(0.0)
        loop.step(1.0)
        if step % 10 == 0:
            validate(5.0)
    assert [(b.steps, b.wall_s, b.step_s) for b in loop.clock.blocks] == [(10, 15.0, 1.0)] * 3


def test_own_work_within_a_fetch_is_no_wait_for_data(loop: Loop) -> None:
    loop.epoch(9)
    loop.clock.begin_fetch()
    loop.time.spend(3.0)
    loop.clock.as_own_work(loop.time.spend, 5.0, part="Search")
    loop.clock.end_fetch()
    assert loop.clock.last_fetch_s == 3.0
    loop.clock.stop()
    booked = dict(loop.clock.seconds)
    assert (booked["monitoring/Search"], booked["data_loading"]) == (5.0, 8 * 1.0 + 3.0)
    loop.clock.as_own_work(loop.time.spend, 5.0, part="Search")
    assert loop.clock.seconds == booked  # training is over


def test_steady_steps_begin_anew_after_a_change(loop: Loop) -> None:
    loop.epoch(60)
    loop.clock.begin_anew()
    loop.clock.timed(TRAINER, lambda: [(loop.fetch(), loop.step(2.0)) for _ in range(40)])()
    # Of the 40 steps after it 20 are warm-up, and nothing comes after the last one.
    assert [(block.steps, block.wall_s) for block in loop.clock.blocks] == [(10, 30.0)]
    assert loop.clock.seconds["training_step"] == 200.0


def test_memory_is_bounded_and_nothing_is_lost(loop: Loop) -> None:
    loop.epoch(WARM_UP_STEPS + 2 * 128 * 10 + 1)
    assert len(loop.clock.blocks) <= 128
    assert sum(block.steps for block in loop.clock.blocks) == 2 * 128 * 10
    assert sum(block.wall_s for block in loop.clock.blocks) == 3 * 2 * 128 * 10
