"""logging: loggers, or ``self.log``, take up the training thread.

Times each logger by class, and collecting the metrics of self.log. On a GPU, only time during which the GPU was idle
counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from lightning_gpu_tools.advice.examples import STEP, cpu_run
from lightning_gpu_tools.advice.findings import Cause, Finding
from lightning_gpu_tools.advice.lost_time import lost_in, name_of, phases_of, times_rarer
from lightning_gpu_tools.training.phases import LOGGING
from lightning_gpu_tools.training.run_measurements import RunMeasurements

_USUAL_STEPS = 50  # Lightning's default of log_every_n_steps; that in the advice is a multiple
_MAX_STEPS = 1000  # our default, the most in the advice: less frequent metrics show too little


def _advice(run: RunMeasurements, phase: str) -> str:
    (name, method), times = name_of(phase), times_rarer(run, phase)
    if not run.has_trainer:
        return f"Log {times} times less often. Training waits while it logs."
    if method == "log":
        return "Pass fewer metrics to self.log, without prog_bar=True, which syncs in every step."
    if run.stage != "fit":  # where Lightning logs metrics of steps in each of them
        return f"Pass on_step=False to self.log: {name} then writes once, at the end."
    now = max(1, run.log_every_n_steps)
    steps = min(_USUAL_STEPS * math.ceil(times * now / _USUAL_STEPS), max(_MAX_STEPS, 2 * now))
    return f"Log less often: Trainer(log_every_n_steps={steps}). Training waits while {name} writes."


def find(run: RunMeasurements) -> Iterator[Finding]:
    for phase in phases_of(run, LOGGING):
        name, method = name_of(phase)
        what = name if method else f"The logger {name}"
        if phase == LOGGING:
            what = "Logging"
        yield lost_in(run, phase, begins=f"{what} takes", advice=_advice(run, phase))


CAUSE = Cause(
    says="The logger ... takes ..., `self.log` takes ...",
    change="`log_every_n_steps`; fewer metrics in `self.log`",
    find=find,
    verified_on="cpu",
    sick=cpu_run({"logging/CSVLogger": 20, **STEP}),
    healthy=cpu_run({"logging/CSVLogger": 0.4, **STEP}),
)
