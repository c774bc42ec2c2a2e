"""spike: this batch is much larger than the others, for example due to one long sample."""

from __future__ import annotations

import math
from collections.abc import Iterator

from lightning_gpu_tools.advice.cause import Shape
from lightning_gpu_tools.advice.examples import GIB
from lightning_gpu_tools.advice.memory_cause import MemoryCause, Ruling, ruling
from lightning_gpu_tools.advice.memory_examples import an_error, counted_steps
from lightning_gpu_tools.advice.memory_remedies import in_validation, largest_that_fits, levers
from lightning_gpu_tools.advice.out_of_memory import OutOfMemory
from lightning_gpu_tools.training.run_measurements import RunMeasurements

_MIN_TIMES = 1.5  # our default: how many times the elements of the median batch


def find(run: RunMeasurements, oom: OutOfMemory) -> Iterator[Ruling]:
    if in_validation(oom) or not oom.batch_shape or not oom.usual_items or not oom.has_completed_steps:
        return
    items = math.prod(oom.batch_shape)
    times = items / oom.usual_items
    if times < _MIN_TIMES:
        return
    shape = " x ".join(map(str, oom.batch_shape))
    fits = largest_that_fits(run, oom, by_items=True)
    yield ruling(
        oom,
        "spike",
        f"This batch has {times:.3g} times as many elements as usual ({shape}; the median is {oom.usual_items:,.0f}).",
        "Limit the elements per batch: truncate long samples, or group samples of similar length.",
        f"By measured memory, {fits.size:,} elements fit in a batch." if fits.size else "",
        levers(run, oom),
        batch_items=items,
        usual_items=oom.usual_items,
        largest_batch_items=fits.size or None,
    )


CAUSE = MemoryCause(
    name="spike",
    shapes=[
        Shape(
            "This batch has ... times as many elements as usual",
            "limit the elements per batch: the advice says how many fit",
        )
    ],
    find=find,
    after=("loading_checkpoint",),
    verified_on="simulated GPU",
    sick=an_error(batch_shape=(64, 2048), usual_items=64 * 512, memory=counted_steps(64, 8 * GIB, 18 * GIB)),
    healthy=an_error(batch_shape=(64, 512), usual_items=64 * 512, memory=counted_steps(64, 8 * GIB, 18 * GIB)),
)
