"""logging: loggers, or ``self.log``, take up the training thread.

Times each logger by class, and collecting the metrics of self.log. On a GPU, only time during which the GPU was idle
counts.
"""

from lightning_gpu_tools.advice.findings import Cause, Findings
from lightning_gpu_tools.advice.lost_time import lost_in, name_of, phases_of, times_rarer
from lightning_gpu_tools.training.phases import LOGGING, SELF_LOG
from lightning_gpu_tools.training.run_measurements import RunMeasurements

_MAX_STEPS = 1000  # our default, the most in the advice: less frequent metrics show too little


def find(run: RunMeasurements) -> Findings:
    for phase in phases_of(run, LOGGING):
        yield lost_in(run, phase, f"{name_of(phase)} takes", _advice(run, phase))


def _advice(run: RunMeasurements, phase: str) -> str:
    name, times = name_of(phase), times_rarer(run, phase)
    if not run.has_trainer:
        return f"Log {times} times less often. Training waits while it logs."
    if phase == f"{LOGGING}/{SELF_LOG}" or run.stage != "fit":  # where Lightning logs in each step
        return "Pass fewer metrics to self.log, with on_step=False and without prog_bar=True, which syncs in each."
    now = max(1, run.log_every_n_steps)
    steps = min(times * now, max(_MAX_STEPS, 2 * now))
    return f"Log less often: Trainer(log_every_n_steps={steps}). Training waits while {name} writes."


CAUSE = Cause(
    says="`CSVLogger` takes ..., `self.log` takes ...",
    change="`log_every_n_steps`; fewer metrics in `self.log`",
    find=find,
    verified_on="cpu",
)
