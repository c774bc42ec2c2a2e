"""optimizer_too_large: forward and backward fit, but the optimizer's step does not.

Memory ran out in the optimizer's step.
"""

from __future__ import annotations

from collections.abc import Iterator

from lightning_gpu_tools.advice.cause import SMALLER_STEP, MemoryCause, Ruling
from lightning_gpu_tools.advice.memory_examples import FLAT, an_error
from lightning_gpu_tools.advice.memory_remedies import more_room, sharded
from lightning_gpu_tools.advice.out_of_memory import OutOfMemory
from lightning_gpu_tools.training.phases import BACKWARD, OPTIMIZER
from lightning_gpu_tools.training.run_measurements import RunMeasurements
from lightning_gpu_tools.units import format_bytes, printable


def find(run: RunMeasurements, oom: OutOfMemory) -> Iterator[Ruling]:
    if oom.phase != OPTIMIZER:
        return
    model, names = oom.model, " and ".join(map(printable, oom.model.fusible))
    states = f" Its states need {format_bytes(model.optimizer_bytes)}." if model.optimizer_bytes else ""
    first = "the optimizer" if oom.has_completed_steps else "the optimizer's first step, which creates its states,"
    fits = oom.room_bytes is None or oom.room_bytes > model.total_bytes + oom.kept_bytes
    fused = f"Set {names}(..., fused=True): its step needs up to {format_bytes(model.parameters_bytes)} less."
    yield Ruling(
        f"Forward and backward fit; {first} did not.{states}",
        [
            fused if names and fits else "",
            "An optimizer with 8-bit states, or without momentum, needs less.",
            sharded(oom),
            more_room(oom),
        ],
    )


CAUSE = MemoryCause(
    says="Forward and backward fit; the optimizer's first step, which creates its states, did not",
    change="`fused=True`, an optimizer with 8-bit states, FSDP",
    find=find,
    after=("fragmentation",),
    settings=SMALLER_STEP,
    verified_on="hardware",
    sick=an_error(phase=OPTIMIZER, begins=FLAT[:1]),
    healthy=an_error(phase=BACKWARD, begins=FLAT[:1]),
)
