"""communication: ranks wait for each other, and no slow rank is the reason.

Averages the time that ranks spend in collectives per step. On a GPU, CUDA events in sampled steps separate waiting for
a late rank from sending.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean

from lightning_gpu_tools.advice.examples import STEP, cpu_run, ranks
from lightning_gpu_tools.advice.findings import Cause, Finding
from lightning_gpu_tools.advice.lost_time import lost_time, mean_wait_s
from lightning_gpu_tools.training.phases import RANK_WAIT, RANK_WAIT_IN_STEP
from lightning_gpu_tools.training.run_measurements import RunMeasurements

_MIN_SHARE = 0.10  # of the step: torch's TensorBoard plugin


def find(run: RunMeasurements) -> Iterator[Finding]:
    mean_s, idle = mean_wait_s(run.ranks), run.gpu_idle
    if mean_s is None:
        if run.on_gpu and idle is not None:
            yield _sending(run, fmean(step.get(RANK_WAIT_IN_STEP, 0.0) for step in idle.steps_s or [{}]))
        return
    late_s = fmean(rank.others_late_s or 0.0 for rank in run.ranks)
    if run.on_gpu and late_s < mean_s / 2:
        yield _sending(run, mean_s)
        return
    if all("backward" in rank.phase_s for rank in run.ranks):
        why = "No rank is always slower than the others: the network is slow, or a different rank is late each time."
    else:
        why = "The slow rank is unknown: with this strategy, ranks also wait in forward, backward and optimizer."
    change = "Set Trainer(accumulate_grad_batches=...)"
    if run.stage != "fit":
        change = "Pass on_step=False to self.log"
    elif not run.has_trainer:
        change = "Accumulate gradients over several batches (no_sync)"
    yield _waiting(run, mean_s, f"{why} {change} to synchronize less often, or use fewer ranks.")


def why_not(run: RunMeasurements, finding: Finding) -> str:
    """Return why these waits need no change; empty if they do."""
    return "" if finding.share >= _MIN_SHARE else "less than 10% of a step is usual"


def _sending(run: RunMeasurements, wait_s: float) -> Finding:
    if run.has_trainer:
        seldom = "Trainer(accumulate_grad_batches=4)"
        half = "DDPStrategy(ddp_comm_hook=...bf16_compress_hook)"
    else:
        seldom = "no_sync() in 3 of 4 batches"
        half = "register_comm_hook(None, bf16_compress_hook)"
    advice = f"Average gradients less often ({seldom}) or send half the bytes ({half})."
    if run.stage != "fit":
        advice = "Pass on_step=False to self.log, so that ranks exchange metrics once, at the end."
    return _waiting(run, wait_s, f"The GPU waits for other GPUs. {advice}")


def _waiting(run: RunMeasurements, wait_s: float, advice: str) -> Finding:
    return lost_time(
        run,
        min(wait_s / run.step_s, 1.0),
        begins="Waiting for other ranks takes",
        advice=advice,
        phase=RANK_WAIT,
        evidence={"ranks": max(1, len(run.ranks))},
    )


CAUSE = Cause(
    says="Waiting for other ranks takes ..., and no single rank is the reason",
    change="`accumulate_grad_batches`, compressed gradients",
    find=find,
    why_not=why_not,
    silences=("small_batch",),
    kind="busy",  # a GPU that waits for another one is busy
    verified_on="simulated GPU",
    sick=cpu_run(STEP, **ranks({"backward": 0.01}, {"backward": 0.01}, wait_s=0.02)),
    healthy=cpu_run(STEP, **ranks({"backward": 0.01}, {"backward": 0.01}, wait_s=0.001)),
)
