"""host_work: inside the training step, the GPU waits for Python code that gives it little to do.

Takes the GPU's idle time inside the step, by CUDA events and the driver's utilization, if no line waits for the GPU and
the host needs more time per operation than a launch takes. Operations are counted by their allocations of GPU memory;
lines come from sampled stacks.
"""

from typing import Any

from lightning_gpu_tools.advice.examples import STEP, gpu_run, watched
from lightning_gpu_tools.advice.findings import Cause, Findings
from lightning_gpu_tools.advice.lost_time import idle_in_step, is_tiny, lost_time
from lightning_gpu_tools.training.phases import FORWARD
from lightning_gpu_tools.training.run_measurements import TRAINING_STEP, RunMeasurements, SourceLine

_MIN_SHARE = 0.15  # our default: even a well-fed GPU has some gaps


def find(run: RunMeasurements) -> Findings:
    _, _, share = idle_in_step(run)
    if run.watched is None or share < _MIN_SHARE or is_tiny(run):
        return
    yield lost_time(
        run,
        share,
        begins=f"Host work inside the {run.activity} step takes",
        advice="Move this work to the dataset, where workers do it in advance, or to the GPU.",
        phase=TRAINING_STEP,
        lines=[TRAINING_STEP],
        has_function=True,
    )


_BUSY_HOST: dict[str, Any] = {
    **watched(operations=30),
    "lines": (
        SourceLine(phase=FORWARD, file="train.py", line=57, function="augment", samples=180),
        SourceLine(phase=FORWARD, file="train.py", line=61, function="training_step", samples=20),
    ),
}

CAUSE = Cause(
    says="Host work inside the training step takes ..., with the source line",
    change="move it to the dataset, where workers do it in advance, or to the GPU",
    find=find,
    verified_on="hardware",
    sick=gpu_run(STEP, 40.0, **_BUSY_HOST),
    healthy=gpu_run(STEP, 97.0, **_BUSY_HOST),
)
