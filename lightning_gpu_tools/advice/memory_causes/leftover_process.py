"""leftover_process: an orphaned process of a program that has ended holds GPU memory.

Searches the driver's list of processes on the GPU for one that has lost its parent and does not use the GPU.
"""

from __future__ import annotations

from collections.abc import Iterator

from lightning_gpu_tools.advice.cause import MemoryCause, Ruling
from lightning_gpu_tools.advice.memory_causes.other_processes import left_over, named, others_are_the_cause
from lightning_gpu_tools.advice.memory_examples import FLAT, GIB, an_error
from lightning_gpu_tools.advice.out_of_memory import OutOfMemory
from lightning_gpu_tools.training.run_measurements import RunMeasurements


def find(run: RunMeasurements, oom: OutOfMemory) -> Iterator[Ruling]:
    orphans = left_over(oom) if others_are_the_cause(oom) else []
    if not orphans:
        return
    pids = " ".join(str(one.pid) for one in orphans)
    yield Ruling(
        f"On this GPU, {named(orphans)}: left over by a program that has ended.",
        [f"If it is not needed, end it: kill {pids}."],
        {"pids": pids, "leftover_bytes": sum(one.memory_used_bytes or 0 for one in orphans)},
    )


CAUSE = MemoryCause(
    says="On this GPU, process ... holds ...: left over by a program that has ended. It does not use the GPU",
    change="if it is not needed, `kill` it",
    find=find,
    after=("spike",),
    verified_on="hardware",
    sick=an_error(begins=FLAT, others={9: 6 * GIB}, orphans=(9,)),
    healthy=an_error(begins=FLAT, others={9: 6 * GIB}),
)
