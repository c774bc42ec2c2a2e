"""optimizer_too_large: forward and backward fit, but the optimizer's step does not.

Memory ran out in the optimizer's step.
"""

import math

from lightning_gpu_tools.advice.findings import SMALLER_STEP, Cause, Findings, new_finding
from lightning_gpu_tools.advice.out_of_memory import ErrorFacts, another_gpu, sharded
from lightning_gpu_tools.training.phases import OPTIMIZER
from lightning_gpu_tools.units import format_bytes, printable

_SAVED_BY_8_BITS = 0.75  # of states in 32 bits: bitsandbytes
_WORKSPACES_BYTES = 2 * 32 * 2**20  # of cuBLAS and cuBLASLt, on Hopper


def find(facts: ErrorFacts) -> Findings:
    oom = facts.oom
    if oom.phase != OPTIMIZER:
        return
    model, names, room = oom.model, " and ".join(map(printable, oom.fusible)), facts.room_bytes
    states = f" Its states need {format_bytes(model.optimizer_bytes)}." if model.optimizer_bytes else ""
    # What cannot suffice is not advised: the weights, their gradients, and what else is kept stay.
    kept = facts.kept_bytes
    if not facts.has_completed_step:  # the first step begins without gradients, states, and workspaces
        kept = max(0, (oom.begin_bytes or 0) - model.parameters_bytes - model.buffers_bytes) + _WORKSPACES_BYTES
    left = math.inf if room is None else room - kept - model.model_bytes
    less = format_bytes(model.parameters_bytes)
    fits_in_8_bits = left + _SAVED_BY_8_BITS * model.optimizer_bytes >= 0
    smaller = "with 8-bit states, or without momentum," if fits_in_8_bits else "without momentum"
    yield new_finding(
        f"Forward and backward fit; the optimizer's step, the first of which creates its states, did not.{states}",
        f"Set {names}(..., fused=True): its step needs up to {less} less." if names and left > 0 else "",
        f"An optimizer {smaller} needs less.",
        sharded(oom),
        another_gpu(facts),
    )


CAUSE = Cause(
    says="Forward and backward fit; the optimizer's step, the first of which creates its states, did not",
    change="`fused=True`, an optimizer with 8-bit states, FSDP",
    find=find,
    settings=SMALLER_STEP,
    verified_on="hardware",
)
