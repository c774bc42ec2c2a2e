"""low_precision: the model computes in 32-bit, and the GPU's tensor cores are idle.

The driver's counter of active tensor cores (GPM, on Hopper and later) is near zero at 32-bit precision. A speedup of 2
for matrix products is a rule of thumb.
"""

from lightning_gpu_tools.advice.findings import Cause, Findings
from lightning_gpu_tools.advice.lost_time import is_tiny, lost_time
from lightning_gpu_tools.training.run_measurements import RunMeasurements

_IDLE_PERCENT = 1.0  # torch's TensorBoard plugin: 0
_SPEEDUP = 2.0  # our default: half the bytes, where memory is the limit


def find(run: RunMeasurements) -> Findings:
    active_percent, precision = run.gpu.tensor_active_percent, run.precision or ""
    if active_percent is None or active_percent >= _IDLE_PERCENT or not precision.startswith("32") or is_tiny(run):
        return
    # The precision of a plain loop is unknown, so without a Trainer it is Fabric's.
    driver = "Trainer" if run.has_trainer else "Fabric"
    advice = f"The tensor cores are idle at precision {precision!r}. Set {driver}(precision='bf16-mixed')"
    if run.matmul_precision == "highest":
        advice += ", or for a smaller change torch.set_float32_matmul_precision('high') (TF32)"
    share = (run.utilization_percent or 0.0) / 100 * (1 - 1 / _SPEEDUP)
    begins = "Computing in 32-bit leaves the tensor cores idle and costs"
    yield lost_time(run, share, begins, f"{advice}, and compare the validation metric.", basis="heuristic")


CAUSE = Cause(
    says="Computing in 32-bit leaves the tensor cores idle and costs ...",
    change='`precision="bf16-mixed"`, or `torch.set_float32_matmul_precision("high")`',
    find=find,
    kind="remark",
    settings=("precision",),
)
