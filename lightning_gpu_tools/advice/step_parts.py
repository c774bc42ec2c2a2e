"""The parts of a step on the CPU. Pure."""

from __future__ import annotations

from statistics import median
from typing import NamedTuple

from lightning_gpu_tools.training.phases import RANK_WAIT, base_phase
from lightning_gpu_tools.training.run_measurements import RunMeasurements


class StepParts(NamedTuple):
    """Median seconds of a steady step."""

    forward_s: float
    backward_s: float
    optimizer_s: float
    step_s: float


def step_parts(run: RunMeasurements) -> StepParts | None:
    """Return the parts of a step, if they can be compared with each other.

    They cannot with several ranks, which wait for each other in backward, or on a GPU, which runs asynchronously.
    """
    if run.on_gpu or not run.optimizers or any(base_phase(phase) == RANK_WAIT for phase in run.phase_s):
        return None
    names = ("forward_s", "backward_s", "optimizer_s", "wall_s")
    return StepParts(*(median(getattr(block, name) / block.steps for block in run.blocks) for name in names))
