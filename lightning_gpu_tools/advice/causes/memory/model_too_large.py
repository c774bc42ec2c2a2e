"""model_too_large: parameters, gradients and optimizer states leave no room for a batch.

Adds up parameters, gradients and optimizer states, or takes the memory in use before the first batch. An error during
the setup of the model counts as well.
"""

from lightning_gpu_tools.advice.findings import SMALLER_STEP, Cause, Findings, new_finding
from lightning_gpu_tools.advice.out_of_memory import ErrorFacts, another_gpu, is_32, sharded
from lightning_gpu_tools.memory.readings import SETUP
from lightning_gpu_tools.units import format_bytes

_MIN_SHARE = 0.85  # our default: the share of the memory that the model takes before any batch


def find(facts: ErrorFacts) -> Findings:
    run, oom = facts
    room, model = facts.room_bytes, oom.model
    if room is None:
        return
    fixed = model.model_bytes or oom.begin_bytes or facts.allocated_bytes
    if (fixed < _MIN_SHARE * room or oom.begin_bytes is None) and oom.phase != SETUP:
        return
    half = ""
    # The optimizer's step takes as much as the parameters again, unless it is fused.
    if is_32(run) and model.model_bytes and (model.model_bytes + model.parameters_bytes) / 2 <= room:
        half = f", or precision='bf16-true', which needs half as much ({format_bytes(model.model_bytes / 2)})"
    parts = {
        "parameters": model.parameters_bytes,
        "buffers": model.buffers_bytes,
        "gradients": model.gradients_bytes,
        "optimizer states": model.optimizer_bytes,
    }
    known = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items() if size)
    yield new_finding(
        f"The model takes {format_bytes(fixed)} before any batch, and torch can use {format_bytes(room)}: "
        f"{known or 'its parts are unknown'}.",
        sharded(oom) or f"It needs {facts.needed} of GPU memory{half}.",
        "Adapters or frozen layers need fewer gradients and optimizer states." if run.stage == "fit" else "",
        another_gpu(facts),
        largest_batch_size=0,
    )


CAUSE = Cause(
    says="The model takes ... before any batch, with parameters, gradients and optimizer states",
    change="FSDP over the GPUs of this machine, with the memory needed on each; adapters; `bf16-true`",
    find=find,
    settings=SMALLER_STEP,
    verified_on="hardware",
)
