"""gpu: the GPU is fully busy, but training makes no progress.

Reads the GPU's utilization from the driver during the stall.
"""

from __future__ import annotations

from lightning_gpu_tools.advice.cause import Explanation, StallCause
from lightning_gpu_tools.advice.stall_words import does_where
from lightning_gpu_tools.training.phases import FORWARD
from lightning_gpu_tools.training.stall_facts import StallFacts

_MIN_PERCENT = 90.0  # of utilization; our default


def find(facts: StallFacts) -> Explanation | None:
    busy_percent = facts.gpu_busy_percent
    if busy_percent is None or busy_percent < _MIN_PERCENT:
        return None
    return Explanation(
        f"The GPU is {busy_percent:.0f} % busy, and the training process {does_where(facts)}. "
        "A kernel does not finish, or a collective waits for another rank.",
        "Set CUDA_LAUNCH_BLOCKING=1 to see the operation in the stack. Check `dmesg` for Xid errors.",
    )


CAUSE = StallCause(
    says="the GPU is fully busy, but no step completes",
    change="set `CUDA_LAUNCH_BLOCKING=1` to see the operation; check `dmesg` for Xid errors",
    find=find,
    after=("communication", "dataset", "callback"),
    verified_on="measurements",
    sick=StallFacts(phase=FORWARD, gpu_busy_percent=100.0),
    healthy=StallFacts(phase=FORWARD, gpu_busy_percent=0.0),
)
