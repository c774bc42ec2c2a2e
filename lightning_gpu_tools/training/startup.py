"""The time until the first step of a run is done: from the start of the process, or of a later run."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from lightning_gpu_tools.processes import process_age_s
from lightning_gpu_tools.training.phases import DATA_LOADING, EPOCH_START, TRAINING_STEP, base_phase

if TYPE_CHECKING:
    from lightning_gpu_tools.training.step_clock import StepClock

# The parts, in their order, and their labels in the report.
STARTUP_PARTS = {
    "own_code": "imports and own code",  # before the setup of the run; includes Lightning's prepare_data
    "setup": "setup",
    "sanity_check": "sanity check",
    "first_batch": "first batch",
    "compilation": "compiling",
    "first_step": "the step itself",
    "other": "other",
}
_runs = itertools.count()  # of this process


class Startup:
    """A record of that time, which begins with the setup of a run and reads the run's clock."""

    def __init__(self, clock: StepClock) -> None:
        self.parts_s: Mapping[str, float] = {}  # adds up to the whole; empty until the first step is done
        self._clock = clock
        self._began_s = self._checked_s = clock.now_s
        self._check_s = 0.0
        is_prompt = "ipykernel" in sys.modules or hasattr(sys, "ps1")  # where a person thinks between two cells
        self._own_code_s = None if next(_runs) or is_prompt else process_age_s()

    def begin_sanity_check(self) -> None:
        """Begin Lightning's validation before training."""
        self._checked_s = self._clock.now_s

    def end_sanity_check(self) -> None:
        """End it."""
        self._check_s = self._clock.now_s - self._checked_s

    def end(self, compilation_s: float) -> None:
        """Record the parts at the end of the first step, of which torch.compile took so long."""
        phase_s, total_s = self._clock.so_far(), self._clock.now_s - self._began_s
        step_s = sum(seconds for phase, seconds in phase_s.items() if base_phase(phase) == TRAINING_STEP)
        compilation_s = min(compilation_s, step_s)
        parts_s = {
            "setup": max(0.0, total_s - self._clock.wall_s - self._check_s),
            "sanity_check": self._check_s,
            "first_batch": phase_s.get(EPOCH_START, 0.0) + phase_s.get(DATA_LOADING, 0.0),
            "compilation": compilation_s,
            "first_step": step_s - compilation_s,
        }
        parts_s["other"] = max(0.0, total_s - sum(parts_s.values()))
        known = {"own_code": self._own_code_s or 0.0, **parts_s}
        self.parts_s = {name: seconds for name, seconds in known.items() if seconds}
