"""leftover_process: an orphaned process of a program that has ended holds GPU memory.

Searches the driver's list of processes on the GPU for one that has lost its parent and does not use the GPU.
"""

from __future__ import annotations

from collections.abc import Iterator

from lightning_gpu_tools.advice.causes.memory.other_processes import left_over, named, others_are_the_cause
from lightning_gpu_tools.advice.examples import FLAT, GIB, failed
from lightning_gpu_tools.advice.findings import Cause, Finding, new_finding
from lightning_gpu_tools.advice.out_of_memory import MemoryFacts
from lightning_gpu_tools.gpus.readings import GpuProcess


def find(facts: MemoryFacts) -> Iterator[Finding]:
    _, oom = facts
    orphans = left_over(oom) if others_are_the_cause(oom) else []
    if not orphans:
        return
    pids = " ".join(str(process.pid) for process in orphans)
    yield new_finding(
        f"On this GPU, {named(orphans)}: left over by a program that has ended.",
        [f"If it is not needed, end it: kill {pids}."],
        {"pids": pids, "leftover_bytes": sum(process.memory_used_bytes or 0 for process in orphans)},
    )


CAUSE = Cause(
    says="On this GPU, process ... holds ...: left over by a program that has ended. It does not use the GPU",
    change="if it is not needed, `kill` it",
    find=find,
    verified_on="hardware",
    sick=failed(begins=FLAT, others=(GpuProcess(9, 6 * GIB),), orphans=(9,)),
    healthy=failed(begins=FLAT, others=(GpuProcess(9, 6 * GIB),)),
)
