"""model_too_large: parameters, gradients and optimizer states leave no room for a batch.

Adds up parameters, gradients and optimizer states, or takes the memory in use before the first batch. An error during
the setup of the model counts as well.
"""

from __future__ import annotations

from collections.abc import Iterator

from lightning_gpu_tools.advice.cause import SMALLER_STEP, Cause
from lightning_gpu_tools.advice.examples import FLAT, GIB, failed
from lightning_gpu_tools.advice.findings import Finding, new_finding
from lightning_gpu_tools.advice.memory_remedies import another_gpu, is_32, needed, raised_limit, sharded
from lightning_gpu_tools.advice.out_of_memory import SETUP, MemoryFacts, ModelSize
from lightning_gpu_tools.units import format_bytes

_MIN_SHARE = 0.85  # our default: the share of the memory that the model takes before any batch


def find(facts: MemoryFacts) -> Iterator[Finding]:
    run, oom = facts
    room, model = oom.room_bytes, oom.model
    if room is None:
        return
    fixed = model.total_bytes or oom.begin_bytes or (oom.allocated_bytes or 0)
    if (fixed < _MIN_SHARE * room or oom.begin_bytes is None) and oom.phase != SETUP:
        return
    half = ""
    # The optimizer's step takes as much as the parameters again, unless it is fused.
    if is_32(run) and model.total_bytes and (model.total_bytes + model.parameters_bytes) / 2 <= room:
        half = f", or precision='bf16-true', which needs half as much ({format_bytes(model.total_bytes / 2)})"
    parts = {
        "parameters": model.parameters_bytes,
        "gradients": model.gradients_bytes,
        "optimizer states": model.optimizer_bytes,
    }
    known = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items() if size)
    yield new_finding(
        "model_too_large",
        f"The model takes {format_bytes(fixed)} before any batch, and torch can use {format_bytes(room)}: "
        f"{known or 'its parts are unknown'}.",
        [
            raised_limit(oom) or sharded(oom) or f"Use a GPU with more than {needed(oom)}{half}.",
            "Adapters or frozen layers need fewer gradients and optimizer states." if run.stage == "fit" else "",
            "" if raised_limit(oom) else another_gpu(oom),
        ],
        {"fixed_bytes": fixed, "largest_batch_size": 0},
    )


CAUSE = Cause(
    says="The model takes ... before any batch, with parameters, gradients and optimizer states",
    change="FSDP over the GPUs of this machine, with the memory needed on each; adapters; `bf16-true`",
    find=find,
    settings=SMALLER_STEP,
    verified_on="hardware",
    sick=failed(phase=SETUP, model=ModelSize(parameters_bytes=24 * GIB)),
    healthy=failed(begins=FLAT[:1]),
)
