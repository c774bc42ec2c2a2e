"""epoch_start: epochs are short, and starting one takes long.

Times the iterator, the start of the workers, and the first batch. It is judged even if epochs are too short for steady
steps.
"""

from lightning_gpu_tools.advice.findings import Cause, Findings
from lightning_gpu_tools.advice.lost_time import lost_in, phases_of
from lightning_gpu_tools.training.phases import EPOCH_START
from lightning_gpu_tools.training.run_measurements import RunMeasurements

MIN_EPOCHS = 5  # our default, without enough steady steps: in fewer epochs, only the first start may have been slow


def find(run: RunMeasurements) -> Findings:
    ends_workers = run.loader is not None and run.loader.num_workers > 0 and not run.loader.persistent_workers
    keep = ", or keep the loader's workers between epochs (persistent_workers=True)" if ends_workers else ""
    for phase in phases_of(run, EPOCH_START):
        yield lost_in(run, phase, "Starting epochs takes", f"Make epochs longer{keep}.")


CAUSE = Cause(
    says="Starting epochs takes ...",
    change="longer epochs; `persistent_workers=True`",
    find=find,
    ignores_min_cost=True,
    is_judged_early=lambda run: run.epochs >= MIN_EPOCHS,
    settings=("persistent_workers",),
    verified_on="cpu",
)
