"""Trainings on a clock that moves by hand."""

from collections.abc import Sequence
from typing import Any

from synthetic import cpu_run
from trainings import HandClock

from lightning_gpu_tools.training.run_measurements import RunMeasurements
from lightning_gpu_tools.training.step_clock import StepClock


def timed_steps(steps: Sequence[dict[str, float]]) -> StepClock:
    """Return the stopped clock of steps with these seconds by phase; ``items`` is the size of a step's batch."""
    time = HandClock()
    clock = StepClock(time)
    clock.start()
    for step in steps:
        clock.begin_fetch()
        time.spend(step.get("data_loading", 0.0))
        clock.end_fetch()
        clock.times.batch_items = int(step["items"]) if "items" in step else None
        for phase, seconds in step.items():
            if phase not in ("data_loading", "items"):
                clock.timed(phase, time.spend)(seconds)
    clock.stop()
    return clock


def run_of(steps: Sequence[dict[str, float]], **options: Any) -> RunMeasurements:
    """Return a training on the CPU of steps with these seconds by phase, the first 20 of which are the warm-up."""
    clock = timed_steps(steps)
    measured = {
        "wall_s": clock.wall_s,
        "steps": len(steps),
        "phase_s": clock.seconds,
        "blocks": clock.blocks,
        "step_times": clock.times.facts(),
        "spans": clock.timeline.spans(),
    }
    return cpu_run({}, **{**measured, **options})
