"""communication: ranks wait for each other, and no slow rank is the reason.

Averages the time that ranks spend in collectives per step. On a GPU, CUDA events in sampled steps separate waiting for
a late rank from sending.
"""

from statistics import fmean

from lightning_gpu_tools.advice.findings import Cause, Finding, Findings
from lightning_gpu_tools.advice.lost_time import lost_time
from lightning_gpu_tools.gpus.readings import not_none
from lightning_gpu_tools.training.phases import RANK_WAIT, RANK_WAIT_IN_STEP
from lightning_gpu_tools.training.run_measurements import RunMeasurements

_MIN_SHARE = 0.10  # of the step: torch's TensorBoard plugin


def find(run: RunMeasurements) -> Findings:
    waits_s = not_none(rank.wait_s for rank in run.ranks)
    if len(waits_s) < max(1, len(run.ranks)):  # not all ranks know theirs
        sampled = run.gpu_idle.steps_s if run.on_gpu and run.gpu_idle is not None else ()
        waits_s = [step.get(RANK_WAIT_IN_STEP, 0.0) for step in sampled]
    if not waits_s:
        return
    seldom, half = "Trainer(accumulate_grad_batches=4)", "DDPStrategy(ddp_comm_hook=...bf16_compress_hook)"
    if not run.has_trainer:
        seldom, half = "no_sync() in 3 of 4 batches", "register_comm_hook(None, bf16_compress_hook)"
    # With other strategies than DDP, the waits in backward are unknown, and there is no such hook.
    halves = f", or send half the bytes ({half})" if all("backward" in rank.phase_s for rank in run.ranks) else ""
    change = f"Average gradients less often ({seldom}){halves}."
    if run.stage != "fit":
        change = "Pass on_step=False to self.log, so that ranks exchange metrics once, at the end."
    share = min(fmean(waits_s) / run.step_s, 1.0)
    advice = f"The network is slow, or a different rank is late each time. {change}"
    yield lost_time(run, share, "Waiting for other ranks takes", advice, phase=RANK_WAIT)


def why_not(run: RunMeasurements, finding: Finding) -> str:
    return "" if finding.share >= _MIN_SHARE else "less than 10% of a step is usual"


CAUSE = Cause(
    says="Waiting for other ranks takes ..., and no single rank is the reason",
    change="`accumulate_grad_batches`, compressed gradients",
    find=find,
    why_not=why_not,
    silences=("small_batch",),
    kind="busy",  # a GPU that waits for another one is busy
    verified_on="simulated GPU",
)
