"""launch_bound: the host launches kernels more slowly than the GPU runs them.

Takes the GPU's idle time inside the step, by CUDA events and the driver's utilization, if no line waits for the GPU and
the host needs little time per operation. A short step that hardly uses the GPU counts as well.
"""

from lightning_gpu_tools.advice.findings import Basis, Cause, Findings
from lightning_gpu_tools.advice.lost_time import idle_in_step, idle_in_step_share, is_tiny, larger_batch, lost_time
from lightning_gpu_tools.training.run_measurements import TRAINING_STEP, RunMeasurements

_MIN_SHARE = 0.15  # our default: even a well-fed GPU has some gaps


def find(run: RunMeasurements) -> Findings:
    if not run.on_gpu:
        return
    tiny = is_tiny(run)
    share = (idle_in_step_share(run) or 0.0) if tiny else idle_in_step(run)[1]
    if share < _MIN_SHARE:
        return
    larger = larger_batch(run)
    or_larger = f", or {larger}" if larger else "."
    if tiny:
        advice = f"The model is too small for this GPU. Use the CPU{or_larger}"
    else:
        fewer = "torch.compile(model, mode='reduce-overhead') (CUDA graphs)"
        if run.recompiled is not None:
            fewer = "mode='reduce-overhead' (CUDA graphs) in your torch.compile call"
        fused = ", a fused optimizer (AdamW(..., fused=True))" if run.stage == "fit" else ""
        advice = f"The host launches kernels more slowly than the GPU runs them. Use {fewer}{fused}{or_larger}"
    basis: Basis = "heuristic" if run.watched is None else "measured"
    begins = "Launching many small kernels takes"
    yield lost_time(run, share, begins, advice, phase=TRAINING_STEP, has_lines=True, basis=basis)


CAUSE = Cause(
    says="Launching many small kernels takes ...",
    change="`torch.compile`, a fused optimizer, a larger batch; train a very small model on the CPU",
    find=find,
    ignores_min_cost=True,  # a larger batch makes launches rarer
    settings=("batch_size",),
    verified_on="hardware",
)
