"""callback: callbacks, model hooks and schedulers take up the training thread.

Times each callback, hook and scheduler separately, by class or by class and method. On a GPU, only time during which
the GPU was idle counts.
"""

from __future__ import annotations

from collections.abc import Iterator

from lightning_gpu_tools.advice.examples import STEP, cpu_run
from lightning_gpu_tools.advice.findings import Cause, Finding
from lightning_gpu_tools.advice.lost_time import lost_in, name_of, phases_of, times_rarer
from lightning_gpu_tools.training.phases import CALLBACK
from lightning_gpu_tools.training.run_measurements import RunMeasurements


def _advice(run: RunMeasurements, phase: str) -> str:
    (name, method), times = name_of(phase), times_rarer(run, phase)
    if not run.has_trainer:
        return f"Run {name} {times} times less often, or make it faster."
    if method == "step":  # of a scheduler
        return (
            f'Step it less often ("interval": "epoch", or "frequency": {times}, in the scheduler\'s configuration), or '
            "make it faster."
        )
    if "epoch" in method:
        return f"Make {name} faster: Lightning calls it in every epoch. Do less in it, or make epochs longer."
    if method:
        return f"Make {name} faster: Lightning calls it in every step."
    return f"Make {name} faster, or do its work only in every {times}th step."


def find(run: RunMeasurements) -> Iterator[Finding]:
    for phase in phases_of(run, CALLBACK):
        name, method = name_of(phase)
        what = name if method else f"The callback {name}"
        if not run.has_trainer:
            what = f'The phase "{name}"'
        yield lost_in(run, phase, begins=f"{what} takes", advice=_advice(run, phase))


CAUSE = Cause(
    says="The callback ... takes ..., `LitModel.on_train_batch_start` takes ..., `StepLR.step` takes ...",
    change="run it less often, by the factor in the advice; make a hook that runs in every step faster",
    find=find,
    verified_on="hardware",
    sick=cpu_run({"callback/A": 20, **STEP}),
    healthy=cpu_run({"callback/A": 0.4, **STEP}),
)
