"""Synthetic out-of-memory errors: the sick and healthy examples of causes, also used by tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_gpu_tools.advice.examples import STEP, gpu_run
from lightning_gpu_tools.advice.out_of_memory import (
    MemoryFacts,
    ModelSize,
    OutOfMemory,
    OutOfMemoryMessage,
)
from lightning_gpu_tools.training.memory_readings import (
    Block,
    MemoryHoldings,
    MemoryReading,
    RankMemory,
    RecordedStep,
    RecordedSteps,
    Segment,
    StepMemory,
)

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
        Block(10, peak - begin, grows=True),
        Block(2, -2 * GIB),
        Block(11, 2 * GIB, grows=True),
        Block(11, -2 * GIB),
        Block(10, begin - peak),
        Block(12, 2 * GIB),
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


def failed(**options: Any) -> MemoryFacts:
    """Return the same error of a run on this GPU."""
    return MemoryFacts(gpu_run(STEP, 95.0), an_error(**options))


STEPS_OF_64 = counted_steps(64, 8 * GIB, 18 * GIB)
