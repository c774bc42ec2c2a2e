"""loading_checkpoint: a checkpoint was loaded onto the GPU, in addition to the model.

Memory ran out in the call that loads it.
"""

from __future__ import annotations

from collections.abc import Iterator

from lightning_gpu_tools.advice.examples import failed
from lightning_gpu_tools.advice.findings import Cause, Finding, new_finding
from lightning_gpu_tools.advice.out_of_memory import MemoryFacts, more_room
from lightning_gpu_tools.memory.readings import LOADING_CHECKPOINT, SETUP
from lightning_gpu_tools.units import format_bytes


def find(facts: MemoryFacts) -> Iterator[Finding]:
    run, oom = facts
    if oom.phase != LOADING_CHECKPOINT:
        return
    allocated, model = None if oom.reading is None else oom.reading.allocated_bytes, oom.model.parameters_bytes
    more = f" in addition to the model's {format_bytes(model)}" if model else ""
    held = f"{format_bytes(allocated)} were in tensors{more}" if allocated else "the model already was"
    load = "plugins=[PortableCheckpointIO()]" if run.has_trainer else "load_weights(model, path)"
    yield new_finding(
        f"The checkpoint was loaded onto the GPU, where {held}.",
        [f"Load it into host memory: torch.load(path, map_location='cpu', mmap=True), or {load}.", more_room(oom)],
    )


CAUSE = Cause(
    says="The checkpoint was loaded onto the GPU, where the model already was",
    change='`map_location="cpu"`, `PortableCheckpointIO`, `load_weights`',
    find=find,
    verified_on="hardware",
    sick=failed(phase=LOADING_CHECKPOINT),
    healthy=failed(phase=SETUP),
)
