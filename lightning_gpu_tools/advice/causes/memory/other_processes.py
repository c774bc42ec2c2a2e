"""other_processes: other processes hold so much of the GPU that this one does not fit.

Without the processes that the driver lists, and the used memory that it lists for no process, this job would fit. If
this job now needs more than it could have had after its first step, others are not the cause.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lightning_gpu_tools.advice.examples import FLAT, GIB, STEPS_OF_64, failed
from lightning_gpu_tools.advice.findings import Cause, Finding, new_finding
from lightning_gpu_tools.advice.out_of_memory import (
    MIN_SHARE,
    MemoryFacts,
    another_gpu,
    has_completed_steps,
    needed,
    needed_bytes,
    others_bytes,
    room_bytes,
    unlisted_bytes,
)
from lightning_gpu_tools.gpus.readings import FOREIGN, GpuProcess
from lightning_gpu_tools.memory.readings import OutOfMemory
from lightning_gpu_tools.units import format_bytes, printable

_LEFT_OVER_SHARE = 0.5  # our default: of other jobs' memory; from here on, leftover processes are the cause


def find(facts: MemoryFacts) -> Iterator[Finding]:
    run, oom = facts
    if not others_are_the_cause(oom) or left_over(oom):
        return
    pick = "FreeMemoryCUDAAccelerator" if run.has_trainer else "select_gpus"
    run_later = f"lightning-gpu-tools run --min-free {needed(oom)} --wait 2h -- CMD"
    wait = f"No other GPU has that much free. Wait for one: {run_later}."
    who, unlisted = [named(oom.others[:3])] if oom.others else [], unlisted_bytes(oom)
    if unlisted:
        hidden = f"{format_bytes(unlisted)} belong to processes that are not visible from here"
        who.append(f"{hidden} (in another container, or another user's)")
    yield new_finding(
        f"Other processes hold {format_bytes(others_bytes(oom))} of this GPU: {', '.join(who)}.",
        [f"This job needs {needed(oom)}.", another_gpu(oom) or wait, f"{pick}(min_free='{needed(oom)}') claims it."],
        {"pids": " ".join(str(process.pid) for process in oom.others) or None, "unlisted_bytes": unlisted or None},
    )


def others_are_the_cause(oom: OutOfMemory) -> bool:
    """Return whether this job would fit, or would still fit, without other jobs' memory."""
    size, total, room = others_bytes(oom), oom.total_bytes, room_bytes(oom)
    missing = max(0, oom.requested_bytes - (oom.free_bytes or 0))
    if not size or size < missing or total is None or room is None or oom.allowed_bytes is not None:
        return False
    if oom.memory is not None and has_completed_steps(oom, full=True):
        # It would fit in what torch has held, or in the room that it had before others came.
        held = oom.memory.latest.peak_reserved_bytes
        if oom.reading is not None:
            held = max(held, oom.reading.peak_reserved_bytes)
        had = oom.memory.room_bytes
        have_come = min(size, had - room) >= MIN_SHARE * total
        return room + missing <= (max(held, had) if have_come else held)
    return size >= MIN_SHARE * total and needed_bytes(oom) <= total


def left_over(oom: OutOfMemory) -> list[GpuProcess]:
    """Return processes left over by ended programs; none if they hold too little of the others' memory."""
    orphans = [process for process in oom.others if process.pid in oom.orphans]
    size = sum(process.memory_used_bytes or 0 for process in orphans)
    return orphans if size >= _LEFT_OVER_SHARE * others_bytes(oom) else []


def named(processes: Sequence[GpuProcess]) -> str:
    """Return a phrase with the processes, their owners, and their memory."""
    found = []
    for one in processes:
        name = f" ({printable(one.name, 40)})" if one.name else ""
        owner = f" of {printable(one.user, 40)}" if one.user else ""
        size = "an unknown amount" if one.memory_used_bytes is None else format_bytes(one.memory_used_bytes)
        process = FOREIGN if one.is_foreign else f"process {one.pid}{name}{owner}"
        found.append(f"{process} holds {size}")
    return ", ".join(found)


CAUSE = Cause(
    says="Other processes hold ... of this GPU, with PID, owner and name, or without them if they are in another "
    "container",
    change="another GPU of this machine, if one has enough room, with the `pick` command; `min_free`",
    find=find,
    verified_on="hardware",
    sick=failed(begins=FLAT, others=(GpuProcess(9, 6 * GIB),)),
    healthy=failed(begins=FLAT, others=(GpuProcess(9, 6 * GIB),), memory=STEPS_OF_64),
)
