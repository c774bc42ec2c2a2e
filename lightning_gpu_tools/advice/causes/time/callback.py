"""callback: callbacks, model hooks and schedulers take up the training thread.

Times each callback, hook and scheduler separately, by class or by class and method. On a GPU, only time during which
the GPU was idle counts.
"""

from lightning_gpu_tools.advice.findings import Cause, Findings
from lightning_gpu_tools.advice.lost_time import lost_in, name_of, phases_of, times_rarer
from lightning_gpu_tools.training.phases import CALLBACK
from lightning_gpu_tools.training.run_measurements import RunMeasurements


def find(run: RunMeasurements) -> Findings:
    for phase in phases_of(run, CALLBACK):
        name = name_of(phase)
        advice = f"Make {name} faster, or run it {times_rarer(run, phase)} times less often."
        yield lost_in(run, phase, f"{name} takes", advice)


CAUSE = Cause(
    says="`EarlyStopping` takes ..., `LitModel.on_train_batch_start` takes ..., `StepLR.step` takes ...",
    change="make it faster, or run it less often, by the factor in the advice",
    find=find,
    verified_on="hardware",
)
