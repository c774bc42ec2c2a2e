"""host_work: inside the training step, the GPU waits for Python code that gives it little to do.

Takes the GPU's idle time inside the step, by CUDA events and the driver's utilization, if no line waits for the GPU and
the host needs more time per operation than a launch takes. Operations are counted by their allocations of GPU memory;
lines come from sampled stacks.
"""

from lightning_gpu_tools.advice.findings import Cause, Findings
from lightning_gpu_tools.advice.lost_time import idle_in_step, is_tiny, lost_time
from lightning_gpu_tools.training.run_measurements import TRAINING_STEP, RunMeasurements

_MIN_SHARE = 0.15  # our default: even a well-fed GPU has some gaps


def find(run: RunMeasurements) -> Findings:
    _, _, share = idle_in_step(run)
    if run.watched is None or share < _MIN_SHARE or is_tiny(run):
        return
    begins = f"Host work inside the {run.activity} step takes"
    advice = "Move this work to the dataset, where workers do it in advance, or to the GPU."
    yield lost_time(run, share, begins, advice, phase=TRAINING_STEP, has_lines=True, has_function=True)


CAUSE = Cause(
    says="Host work inside the training step takes ..., with the source line",
    change="move it to the dataset, where workers do it in advance, or to the GPU",
    find=find,
    verified_on="hardware",
)
