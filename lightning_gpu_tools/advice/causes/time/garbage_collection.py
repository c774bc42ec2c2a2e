"""garbage_collection: Python's garbage collector scans all objects again and again.

Times collections beyond the youngest generation, with Python's gc.callbacks.
"""

from lightning_gpu_tools.advice.findings import Cause, Findings
from lightning_gpu_tools.advice.lost_time import lost_in, phases_of, times_rarer
from lightning_gpu_tools.training.phases import GARBAGE_COLLECTION
from lightning_gpu_tools.training.run_measurements import RunMeasurements


def find(run: RunMeasurements) -> Findings:
    for phase in phases_of(run, GARBAGE_COLLECTION):
        advice = (
            f"Call gc.collect() and gc.freeze() once before {run.activity}, so that later collections skip existing "
            "objects. "
            f"If the program calls gc.collect() itself, call it {times_rarer(run, phase)} times less often."
        )
        yield lost_in(run, phase, "Garbage collection takes", advice)


CAUSE = Cause(
    says="Garbage collection takes ...",
    change="call `gc.collect()` and `gc.freeze()` once before training; call `gc.collect()` less often",
    find=find,
    verified_on="cpu",
)
