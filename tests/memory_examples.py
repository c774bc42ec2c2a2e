"""Synthetic out-of-memory errors, and for each cause an error that it explains and a similar one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lightning_gpu_tools.advice.out_of_memory import (
    LOADING_CHECKPOINT,
    SETUP,
    ModelSize,
    OutOfMemory,
    OutOfMemoryMessage,
)
from lightning_gpu_tools.gpus.readings import GpuProcess, GpuReading
from lightning_gpu_tools.training.memory_readings import (
    BlockEvent,
    MemoryHoldings,
    MemoryReading,
    RankMemory,
    RecordedStep,
    RecordedSteps,
    Segment,
    StepMemory,
)
from lightning_gpu_tools.training.phases import BACKWARD, OPTIMIZER, VALIDATION
from lightning_gpu_tools.training.run_measurements import HeldContext

GIB, MIB = 2**30, 2**20
# (step, bytes in tensors when it began).
FLAT = [(step, 8.0 * GIB) for step in range(1, 100)]
GROWING = [(step, (8 + 0.1 * step) * GIB) for step in range(1, 100)]


def counted_steps(batch_size: int, begin: int, peak: int) -> RankMemory:
    """Return the memory of a rank: steps of one size, with 2 GiB each of parameters and gradients, and 3 of states.

    Old gradients are freed before backward, which needs as much memory as forward and these gradients together.
    """

    def reading(allocated: int) -> MemoryReading:
        return MemoryReading(
            allocated_bytes=allocated, peak_allocated_bytes=peak, reserved_bytes=peak, peak_reserved_bytes=peak
        )

    first = StepMemory(step=1, batch_shape=(batch_size, 512), begin=reading(2 * GIB))
    last = StepMemory(
        step=9,
        batch_shape=(batch_size, 512),
        begin=reading(begin),
        after_forward=reading(peak),
        added_bytes=peak - begin,
    )
    events = (
        BlockEvent(10, peak - begin, grows=True),
        BlockEvent(2, -2 * GIB),
        BlockEvent(11, 2 * GIB, grows=True),
        BlockEvent(11, -2 * GIB),
        BlockEvent(10, begin - peak),
        BlockEvent(12, 2 * GIB),
    )
    held = Segment(False, ((1, begin - 2 * GIB, False),)), Segment(False, ((2, 2 * GIB, False),))
    recorded = RecordedSteps(segments=held, steps=(RecordedStep(9, (batch_size, 512), events),))
    return RankMemory(
        latest=reading(begin),
        holdings=MemoryHoldings(
            parameters_bytes=2 * GIB, gradients_bytes=2 * GIB, gradients_kept_bytes=2 * GIB, optimizer_bytes=3 * GIB
        ),
        first_step=first,
        last_step=last,
        recorded=recorded,
        peaks_bytes={"forward": peak},
    )


def an_error(
    *,
    requested: int = 200 * MIB,
    allocated: int = 22 * GIB,
    cached: int = 0,
    free: int = 10 * MIB,
    others: Mapping[int, int] = {},
    allowed: int | None = None,
    **known: Any,
) -> OutOfMemory:
    """Return an error of torch on a GPU of 24 GiB, where forward could not allocate ``requested`` bytes."""
    message = OutOfMemoryMessage(
        source="allocator",
        name="torch",
        requested_bytes=requested,
        total_bytes=24 * GIB,
        free_bytes=free,
        allocated_bytes=allocated,
        cached_bytes=cached,
        others_bytes=others,
        allowed_bytes=allowed,
    )
    model = ModelSize(parameters_bytes=2 * GIB, gradients_bytes=2 * GIB, optimizer_bytes=3 * GIB, fusible=("AdamW",))
    return OutOfMemory(
        **{"message": message, "phase": "training_step/forward", "step": 12, "uuid": "GPU-0", "model": model, **known}
    )


_SHARED: dict[str, Any] = {
    "allocated": 11 * GIB,
    "pid": 40,
    "gpus": (
        GpuReading(
            index=0,
            uuid="GPU-0",
            memory_total_bytes=24 * GIB,
            memory_free_bytes=0,
            processes=tuple(GpuProcess(pid=pid, memory_used_bytes=12 * GIB) for pid in (40, 41)),
        ),
    ),
}
_OWN = [HeldContext(rank=rank, node=0, pid=40 + rank, gpu=rank, uuid=f"GPU-{rank}", is_own=True) for rank in range(4)]
_STRAY = [replace(one, gpu=0, uuid="GPU-0", is_own=False, held_bytes=GIB // 2) for one in _OWN[1:]]
_STEPS_OF_64 = {"memory": counted_steps(64, 8 * GIB, 18 * GIB)}
_OTHERS = {"begins": FLAT, "others": {9: 6 * GIB}}
# By the name of a cause: an error for which it is the first finding, and a similar one without it.
EXAMPLES = {
    "batch_too_large": (
        an_error(begins=FLAT, batch_shape=(32, 512), memory=counted_steps(16, 8 * GIB, 18 * GIB)),
        an_error(begins=FLAT, batch_shape=(64, 512), usual_items=64 * 512, **_STEPS_OF_64),
    ),
    "evaluation_graph": (
        an_error(phase=VALIDATION, validation_begins=GROWING, grad_enabled=True),
        an_error(phase=VALIDATION, validation_begins=GROWING, grad_enabled=False),
    ),
    "fragmentation": (
        an_error(begins=FLAT, allocated=18 * GIB, cached=5 * GIB),
        an_error(begins=FLAT, cached=300 * MIB),
    ),
    "leftover_process": (an_error(**_OTHERS, orphans=(9,)), an_error(**_OTHERS)),
    "loading_checkpoint": (an_error(phase=LOADING_CHECKPOINT), an_error(phase=SETUP)),
    "memory_growth": (
        an_error(begins=GROWING),
        an_error(begins=[*FLAT[:50], *((step, 20.0 * GIB) for step in range(51, 100))]),
    ),
    "model_too_large": (an_error(phase=SETUP, model=ModelSize(parameters_bytes=24 * GIB)), an_error(begins=FLAT[:1])),
    "optimizer_too_large": (an_error(phase=OPTIMIZER, begins=FLAT[:1]), an_error(phase=BACKWARD, begins=FLAT[:1])),
    "other_processes": (an_error(**_OTHERS), an_error(**_OTHERS, **_STEPS_OF_64)),
    "shared_by_ranks": (
        an_error(begins=FLAT, **_SHARED, own_pids=frozenset({40, 41})),
        an_error(begins=FLAT, **_SHARED, own_pids=frozenset({40})),
    ),
    "spike": (
        an_error(batch_shape=(64, 2048), usual_items=64 * 512, **_STEPS_OF_64),
        an_error(batch_shape=(64, 512), usual_items=64 * 512, **_STEPS_OF_64),
    ),
    "stray_contexts": (an_error(begins=FLAT, contexts=(*_OWN, *_STRAY)), an_error(begins=FLAT, contexts=tuple(_OWN))),
    "unexplained": (an_error(phase="callback/A"), an_error(begins=FLAT)),
}
